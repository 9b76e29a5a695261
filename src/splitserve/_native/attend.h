/* Arithmetic of attention that decode steps (attention.c) and prompts (prompts.c) share, so that a token gets the same
 * bits from both, whatever the number of new tokens of its request.
 *
 * 1. Keys are divided by their positions: into parts of PART keys, and a part into blocks of BLOCK keys.
 * 2. A block adds to the sums of its part: scores over pairs of numbers in order, the running maximum, weights
 *    2^(score x factor - maximum) as bfloat16, weighted values over pairs of keys in order.
 * 3. Parts are joined in order.
 *
 * Keys that a token does not attend to have a weight of zero, so blocks and parts of such keys change nothing. The
 * result of a token depends on its own visible keys only.
 */
#ifndef SPLITSERVE_ATTEND_H
#define SPLITSERVE_ATTEND_H

#include "pairs.h"

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

#define PART 512
#define BLOCK 64
/* splitserve/engine/kernels/library.py rejects larger ones. */
#define MAX_HEAD_SIZE 256

static const float NONE = -__builtin_inff();

/* Limit scores to +-softcap by tanh. */
INLINE vfloat limited(vfloat scores, float scale, float softcap)
{
    return (1.0f - 2.0f / (exp_of(scores * (2.0f * scale / softcap)) + 1.0f)) * softcap;
}

/* The factor from scores to exponents of 2. Without a softcap scores are products that are not scaled. `limited` has
 * scaled them otherwise. */
INLINE float log2_scale(float scale, float softcap)
{
    return (softcap != 0.0f ? 1.0f : scale) * LOG2_E;
}

/* The largest of n scores per lane, `stride` apart: four at a time, because larger() has a latency. n % 4 is 0. */
INLINE vfloat most_of_keys(const float *scores, uint64_t stride, uint64_t n)
{
    vfloat most[4] = {splat(NONE), splat(NONE), splat(NONE), splat(NONE)};
    for (uint64_t i = 0; i < n; i += 4)
#pragma GCC unroll 4
        for (uint64_t j = 0; j < 4; j++)
            most[j] = larger(most[j], load(scores + (i + j) * stride));
    return larger(larger(most[0], most[1]), larger(most[2], most[3]));
}

/* The number to subtract before 2^x: the maximum. 0 while no key was visible, because all scores are -inf then. */
INLINE vfloat shift_of(vfloat most)
{
    return (vfloat)((vuint)most & ~(vuint)(most == splat(NONE)));
}

/* The factor of earlier sums when the maximum rises from `old`. */
INLINE vfloat factor_of(vfloat old, vfloat most)
{
    return exp2_of(old - shift_of(most));
}

/* Set scores of keys that a row does not attend to to -inf: later keys, and those before its window (0: none). Rows are
 * in the lanes of `vectors` vectors. scores: of n keys from `first` on, `stride` apart. */
INLINE void hide(const int32_t *rows, int vectors, uint64_t window, float *scores, uint64_t stride, uint64_t first,
                 uint64_t n)
{
    for (int v = 0; v < vectors; v++) {
        vint positions;
        memcpy(&positions, rows + v * LANES, sizeof positions);
        for (uint64_t i = 0; i < n; i++) {
            const int32_t key = (int32_t)(first + i);
            vuint hidden = (vuint)(positions < key);
            if (window)
                hidden |= (vuint)(positions - (int32_t)window >= key);
            float *at = scores + i * stride + v * LANES;
            store(at, (vfloat)(((vuint)load(at) & ~hidden) | ((vuint)splat(NONE) & hidden)));
        }
    }
}

/* Maximum and sum of weights of a row's joined parts: per lane, or the same in all lanes. */
struct joined {
    vfloat most, weight;
};

/* Add a part to the joined ones. `before`, `after`: factors of the joined and of the new sums. */
INLINE void join_part(struct joined *all, vfloat most, vfloat weight, vfloat *before, vfloat *after)
{
    const vfloat old = all->most;
    all->most = larger(old, most);
    *before = factor_of(old, all->most);
    *after = factor_of(most, all->most);
    all->weight = fused(all->weight, *before, weight * *after);
}

/* The output of a row. A sum of zero is +0: keys without a weight change its sign. */
INLINE vfloat output_of(vfloat sums, vfloat factor)
{
    return sums * factor + 0.0f;
}

/* Values of two keys as pairs: `vectors` (1 or 2) vectors of words, the first key's number in the low half. */
INLINE void pair_up(const bf16 *first, const bf16 *second, int vectors, vuint *pairs)
{
#if HAS_WIDE_WORDS
    if (vectors == 2) {
        static const uint16_t orders[2][32] = {
            {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45,
             14, 46, 15, 47},
            {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60,
             29, 61, 30, 62, 31, 63}};
        const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
        for (int v = 0; v < 2; v++)
            pairs[v] = (vuint)_mm512_permutex2var_epi16(a, _mm512_loadu_si512(orders[v]), b);
        return;
    }
#endif
    for (int v = 0; v < vectors; v++) {
        vhalf a, b;
        memcpy(&a, first + v * LANES, sizeof a);
        memcpy(&b, second + v * LANES, sizeof b);
        pairs[v] = __builtin_convertvector(a, vuint) | __builtin_convertvector(b, vuint) << 16;
    }
}

#endif
