/* Peak of the multiply-adds of linear layers: all operands are in registers. Benchmarks compare steps with it. */
#include "linear.h"

#include "pairs.h"
#include "tiles.h"

/* Compute `rounds` of them, with pairs of bfloat16 or with floats, and return their number. `operands`: two vectors,
 * which the compiler cannot know; the first receives the sum.
 */
uint64_t multiply_adds(uint64_t rounds, uint64_t of_pairs, float *operands)
{
    const vfloat a = load(operands), b = load(operands + LANES);
    const int pairs = HAS_PAIRS && of_pairs;
    vfloat sums[SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < SUMS; i++)
        sums[i] = a + (float)i;
    if (pairs)
        for (uint64_t round = 0; round < rounds; round++)
#pragma GCC unroll 32
            for (int i = 0; i < SUMS; i++)
                sums[i] = add_products(sums[i], (vuint)a, (vuint)b);
    else
        for (uint64_t round = 0; round < rounds; round++)
#pragma GCC unroll 32
            for (int i = 0; i < SUMS; i++)
                /* The sum is a factor: a constant product would be computed only once. */
                sums[i] = sums[i] * a + b;
    for (int i = 1; i < SUMS; i++)
        sums[0] += sums[i];
    store(operands, sums[0]);
    return rounds * SUMS * LANES * (pairs ? 2 : 1);
}

#if HAS_TILES
/* The same with pairs of bfloat16 in tiles, four sums at a time as in tiles.c. Call it only if tiles are permitted. */
uint64_t multiply_adds_of_tiles(uint64_t rounds)
{
    uint16_t halves[TILE_ROWS * TILE_BYTES / 2];
    for (int i = 0; i < TILE_ROWS * TILE_BYTES / 2; i++)
        halves[i] = 0x3f00;
    shape_tiles(TILED_ROWS, TILE_ROWS);
    LOAD_TILE(4, halves, TILE_BYTES);
    LOAD_TILE(5, halves, TILE_BYTES);
    LOAD_TILE(6, halves, TILE_BYTES);
    LOAD_TILE(7, halves, TILE_BYTES);
    for (uint64_t round = 0; round < rounds; round++) {
        ADD_BF16_PRODUCTS(0, 4, 6);
        ADD_BF16_PRODUCTS(1, 4, 7);
        ADD_BF16_PRODUCTS(2, 5, 6);
        ADD_BF16_PRODUCTS(3, 5, 7);
    }
    RELEASE_TILES();
    return rounds * 4 * TILE_ROWS * TILE_ROWS * TILE_BYTES / 2;
}
#else
uint64_t multiply_adds_of_tiles(uint64_t rounds)
{
    (void)rounds;
    return 0;
}
#endif
