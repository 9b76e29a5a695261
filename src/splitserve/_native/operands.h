/* Operands of attention (attention.c, prompts.c): pairs of numbers, or floats. */
#ifndef SPLITSERVE_OPERANDS_H
#define SPLITSERVE_OPERANDS_H

#include "tile_attend.h"

/* An operand is a pair of consecutive numbers in a word, or one number as a float. */
#if HAS_PAIRS || HAS_TILES
#define NUMBERS 2
typedef uint32_t operand;
typedef vuint voperand;
#else
#define NUMBERS 1
typedef float operand;
typedef vfloat voperand;
#endif

INLINE vfloat add(vfloat sum, voperand a, voperand b)
{
#if NUMBERS == 2
    return add_products(sum, a, b);
#else
    return sum + a * b;
#endif
}

/* Operand `i` from `from` on, in all lanes. */
INLINE voperand splat_operand(const void *from, uint64_t i)
{
    operand x;
    memcpy(&x, (const char *)from + i * sizeof x, sizeof x);
    return x - (voperand){0};
}

INLINE voperand load_operands(const operand *from)
{
    voperand v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* `num` operands from operand `first` on: LANES, or half of them if they are pairs. */
INLINE voperand numbers_of(const bf16 *from, uint64_t first, uint64_t num)
{
#if NUMBERS == 2
    voperand v = {0};
    if (num == LANES)
        memcpy(&v, from + 2 * first, sizeof v);
    else
        memcpy(&v, from + 2 * first, sizeof v / 2);
    return v;
#else
    (void)num;
    return load_bf16(from + first);
#endif
}

/* Store weights of consecutive keys, which are in the lanes, rounded to bfloat16. */
INLINE void store_weights(operand *to, vfloat weights)
{
#if NUMBERS == 2
    store_pairs((bf16 *)to, weights);
#else
    store(to, rounded_off(weights));
#endif
}

/* Store the weights of two consecutive keys, which are in two vectors, rounded to bfloat16: in one operand, or `stride`
 * apart. */
INLINE void put_weights(operand *to, uint64_t stride, vfloat first, vfloat second)
{
#if NUMBERS == 2
    (void)stride;
    const vuint both = pair_of(first, second);
    memcpy(to, &both, sizeof both);
#else
    store(to, rounded_off(first));
    store(to + stride, rounded_off(second));
#endif
}

#endif
