/* Products of pairs of bfloat16 numbers, two of which lie in a 32-bit word, the first in its low half. */
#ifndef SPLITSERVE_PAIRS_H
#define SPLITSERVE_PAIRS_H

#include "vectors.h"

#if VECTOR_BYTES == 64 && defined(__AVX512BF16__)
#include <immintrin.h>
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

/* Of each lane: its sum, and the products of both halves of a and b. */
INLINE vfloat add_products(vfloat sum, vuint a, vuint b)
{
#if HAS_PAIRS
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum += (vfloat)(a << 16) * (vfloat)(b << 16);
    return sum + (vfloat)(a & 0xffff0000u) * (vfloat)(b & 0xffff0000u);
#endif
}

INLINE vuint splat_word(uint32_t word)
{
    return word - (vuint){0};
}

/* Two numbers in a row. */
INLINE vuint splat_pair(const bf16 *from)
{
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return splat_word(word);
}

#endif
