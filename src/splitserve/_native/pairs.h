/* Products of pairs of bfloat16 numbers; a 32-bit word holds two of them, the first in its low half. */
#ifndef SPLITSERVE_PAIRS_H
#define SPLITSERVE_PAIRS_H

#include "vectors.h"

#if VECTOR_BYTES == 64 && defined(__AVX512BF16__)
#include <immintrin.h>
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

/* Per lane: add to the sum the products of both halves of a and b. */
INLINE vfloat add_products(vfloat sum, vuint a, vuint b)
{
#if HAS_PAIRS
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum += low_of(a) * low_of(b);
    return sum + high_of(a) * high_of(b);
#endif
}

/* Per lane: both as bfloat16 in one word, the first in its low half. */
INLINE vuint pair_of(vfloat first, vfloat second)
{
#if HAS_PAIRS
    const vuint order = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                         0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (vuint)_mm512_permutexvar_epi16((__m512i)order, (__m512i)both);
#else
    return rounded(first) | rounded(second) << 16;
#endif
}

/* Consecutive numbers as bfloat16, as `pair_of` rounds them. */
INLINE void store_pairs(bf16 *to, vfloat v)
{
#if HAS_PAIRS
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)v);
    memcpy(to, &halves, sizeof halves);
#else
    store_bf16(to, v);
#endif
}

INLINE vuint splat_word(uint32_t word)
{
    return word - (vuint){0};
}

/* Two consecutive numbers. */
INLINE vuint splat_pair(const bf16 *from)
{
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return splat_word(word);
}

#endif
