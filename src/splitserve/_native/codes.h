/* Codes of quantized weights in panels (GROUPS4, GROUPS8, FP8), and the numbers that they stand for.
 *
 * A weight is code x scale + offset. Without offsets, the code of zero is the middle of all codes, 8 or 128. In FP8,
 * a code is a number in E4M3.
 *
 * A panel holds the weights of two vectors of outputs, group after group: codes in 32-bit words, then scales, then
 * offsets if there are any. A word has eight inputs of one output, four of 8 bits: those with even numbers in its low
 * half, the others in its high half. So a shift of both halves gives the codes of a pair of adjacent inputs. bfloat16
 * holds the numbers of all codes exactly: those of 4 bits are in a table. Scales and offsets are float16 if that is
 * exact for all of the layer, else float32.
 */
#ifndef SPLITSERVE_CODES_H
#define SPLITSERVE_CODES_H

#include "linear.h"
#include "pairs.h"

/* Vectors of outputs in a panel. */
#define VECTORS 2
/* Adjacent panels for one row. */
#define WIDE 4
/* Words between those in use and those that are fetched from memory. */
#define AHEAD 512

INLINE uint64_t inputs_a_word(int kind)
{
    return kind == GROUPS4 ? 8 : 4;
}

INLINE uint64_t num_groups(const struct linear *l)
{
    return l->num_inputs / l->group;
}

/* Words of one group of a panel. */
INLINE uint64_t group_words(const struct linear *l, int kind)
{
    const uint64_t numbers = (l->has_offsets ? 2 : 1) * VECTORS * LANES;
    return l->group / inputs_a_word(kind) * VECTORS * LANES + (l->has_halves ? numbers / 2 : numbers);
}

/* Numbers of two adjacent inputs per lane. */
typedef struct {
    vfloat first, second;
} vfloats;

/* The code of the number 0. */
INLINE float zero_of(const struct linear *l, int kind)
{
    if (l->has_offsets)
        return 0.0f;
    return kind == GROUPS4 ? 8.0f : 128.0f;
}

/* The number of the code in the lowest four bits. */
INLINE vfloat from_nibble(vuint words, float zero)
{
#if VECTOR_BYTES == 64 && defined(__AVX512F__)
    const vfloat codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    /* A lookup ignores the bits above. */
    return (vfloat)_mm512_permutexvar_ps((__m512i)words, (__m512)(codes - zero));
#else
    return __builtin_convertvector((vint)(words & 15), vfloat) - zero;
#endif
}

/* The number of the code in the lowest eight bits: such a code in the last bits of 2^23 is a float. */
INLINE vfloat from_byte(vuint words, float zero)
{
    return (vfloat)((words & 0xff) | 0x4b000000) - (0x1p23f + zero);
}

#if HAS_PAIRS
/* The numbers of the codes 0 to 15, twice: a lookup ignores the bits above the lowest five. */
INLINE vuint table_of(float zero, float factor)
{
    uint16_t numbers[32];
    for (int code = 0; code < 32; code++) {
        const float number = ((float)(code & 15) - zero) * factor;
        uint32_t bits;
        memcpy(&bits, &number, sizeof bits);
        numbers[code] = (uint16_t)(bits >> 16);
    }
    vuint table;
    memcpy(&table, numbers, sizeof table);
    return table;
}

/* The numbers of E4M3 codes, two in a word per lane. */
INLINE vuint pairs_of_e4m3(vuint words, int place)
{
    const __m512i shifted = place ? (__m512i)words : _mm512_slli_epi16((__m512i)words, 8);
    const __m512i bits = _mm512_srli_epi16(_mm512_and_si512(shifted, _mm512_set1_epi16(0x7f00)), 4);
    const __m512i sign = _mm512_and_si512(shifted, _mm512_set1_epi16((short)0x8000));
    const __m512i normal = _mm512_add_epi16(bits, _mm512_set1_epi16(0x3c00));
    /* Multiples of 2^-9 have the exponent 0 in E4M3. The instruction for pairs treats numbers with exponent 0 as 0. */
    const __m512i multiples = (__m512i)table_of(0.0f, 0x1p-9f);
    const __mmask32 small = _mm512_cmplt_epu16_mask(bits, _mm512_set1_epi16(0x80));
    const __m512i found = _mm512_mask_permutexvar_epi16(normal, small, _mm512_srli_epi16(bits, 4), multiples);
    return (vuint)_mm512_or_si512(found, sign);
}
#else
INLINE vuint table_of(float zero, float factor)
{
    (void)zero;
    (void)factor;
    return (vuint){0};
}

/* The number of the E4M3 code in bits [shift, shift + 8). The shift copies the sign bit, the mask clears the copies. */
INLINE vfloat from_e4m3(vuint words, int shift)
{
    const vint signed_words = (vint)(words << (24 - shift)) >> 4;
    return (vfloat)((vuint)signed_words & 0x87f00000u) * 0x1p120f;
}
#endif

/* The numbers of pair `place` of the codes in words. */
INLINE vfloats floats_at(vuint words, int kind, int place, float zero)
{
    const int shift = (kind == GROUPS4 ? 4 : 8) * place;
    const vuint first = words >> shift, second = words >> (16 + shift);
    if (kind == GROUPS4)
        return (vfloats){from_nibble(first, zero), from_nibble(second, zero)};
    if (kind == GROUPS8)
        return (vfloats){from_byte(first, zero), from_byte(second, zero)};
#if HAS_PAIRS
    const vuint pair = pairs_of_e4m3(words, place);
    return (vfloats){(vfloat)(pair << 16), (vfloat)(pair & 0xffff0000u)};
#else
    return (vfloats){from_e4m3(words, shift), from_e4m3(words, 16 + shift)};
#endif
}

/* Weights of a pair of inputs per lane: two bfloat16 in a word if the CPU multiplies these. */
#if HAS_PAIRS
typedef vuint vpair;
#else
typedef vfloats vpair;
#endif

INLINE vpair pair_at(vuint words, int kind, int place, vuint table, float zero)
{
#if HAS_PAIRS
    if (kind == GROUPS4)
        return (vuint)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)words, 4 * place), (__m512i)table);
    if (kind == FP8)
        return pairs_of_e4m3(words, place);
    const vfloats numbers = floats_at(words, kind, place, zero);
    return (vuint)numbers.first >> 16 | ((vuint)numbers.second & 0xffff0000u);
#else
    (void)table;
    return floats_at(words, kind, place, zero);
#endif
}

/* Load vector `v` of a group's scales and offsets. All are finite. */
INLINE vfloat factors_at(const struct linear *l, const uint32_t *w, int v)
{
    if (!l->has_halves)
        return load((const float *)w + v * LANES);
    vhalf halves;
    memcpy(&halves, (const uint16_t *)w + v * LANES, sizeof halves);
#if HAS_WIDE_WORDS
    return (vfloat)_mm512_cvtph_ps((__m256i)halves);
#elif VECTOR_BYTES == 32 && defined(__F16C__)
    return (vfloat)_mm256_cvtph_ps((__m128i)halves);
#else
    const vuint bits = __builtin_convertvector(halves, vuint);
    return (vfloat)((bits & 0x8000) << 16 | (bits & 0x7fff) << 13) * 0x1p112f;
#endif
}

/* Add the sums of a group, with its scales and offsets, to the totals [rows, VECTORS]. row_sums: sums of the group's
 * activations, `num_groups` apart. */
INLINE void add_group(const struct linear *l, int rows, const uint32_t *factors, const float *row_sums,
                      const vfloat *sums, vfloat *totals)
{
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) {
        const vfloat scale = factors_at(l, factors, v);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
            totals[r * VECTORS + v] = fused(sums[r * VECTORS + v], scale, totals[r * VECTORS + v]);
        if (l->has_offsets) {
            const vfloat offset = factors_at(l, factors, VECTORS + v);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++)
                totals[r * VECTORS + v] = fused(offset, splat(row_sums[r * num_groups(l)]), totals[r * VECTORS + v]);
        }
    }
}

/* Compute the sum of each group of a row's activations. */
INLINE void sum_groups(const struct linear *l, uint64_t row, float *sums)
{
    const bf16 *inputs = l->inputs + row * l->input_stride;
    for (uint64_t g = 0; g < num_groups(l); g++) {
        vfloat sum = (vfloat){0};
        for (uint64_t k = g * l->group; k < (g + 1) * l->group; k += LANES)
            sum += load_bf16(inputs + k);
        sums[g] = sum_of(sum);
    }
}

#endif
