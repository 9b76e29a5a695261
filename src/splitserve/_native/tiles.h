/* Tile instructions of CPUs with AMX.
 *
 * A thread has eight tile registers with up to 16 rows of 64 bytes, 16 words of 32 bits. A product adds to each sum
 * [m, n] the products of word [m, k] of the activations and word [k, n] of the weights, for all k. A word is two
 * bfloat16 or four int8, so weights have the layout of our panels. Use of the registers: 0 to 3 sums, 4 and 5 the
 * activations of 32 rows, 6 and 7 the weights of two vectors of outputs.
 *
 * These are macros over assembly, because the intrinsics of GCC 11 and 12 do not declare which memory they read. Tests
 * set TILE_REFERENCE to a header that has the same operations in plain C.
 */
#ifndef SPLITSERVE_TILES_H
#define SPLITSERVE_TILES_H

#include "vectors.h"

#if defined(TILE_REFERENCE)
#define HAS_TILES 1
#elif VECTOR_BYTES == 64 && defined(__AVX512BF16__) && defined(__x86_64__) && defined(__linux__) && \
    (__GNUC__ >= 11 || defined(__clang__))
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

/* Rows and bytes per row of a tile. */
#define TILE_ROWS 16
#define TILE_BYTES 64
/* Rows of earlier sums that are added or converted during a product. */
#define FINISHED_ROWS 4

/* Operand of LDTILECFG. */
struct tile_shapes {
    uint8_t palette, start_row, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

#if defined(TILE_REFERENCE)
#include TILE_REFERENCE
#elif HAS_TILES
#define CONFIGURE_TILES(shapes) __asm__ volatile("ldtilecfg %0" : : "m"(*(shapes)) : "memory")
#define RELEASE_TILES() __asm__ volatile("tilerelease" : : : "memory")
#define ZERO_TILE(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define LOAD_TILE(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((uint64_t)(stride)) : "memory")
/* Load what is not needed again soon: it does not displace what is in the L1 cache. */
#define LOAD_TILE_ONCE(tile, from, stride) \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((uint64_t)(stride)) : "memory")
#define STORE_TILE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((uint64_t)(stride)) : "memory")
#define ADD_BF16_PRODUCTS(sums, activations, weights) \
    __asm__ volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #activations ", %%tmm" #sums : :)
#define ADD_INT8_PRODUCTS(sums, activations, weights) \
    __asm__ volatile("tdpbssd %%tmm" #weights ", %%tmm" #activations ", %%tmm" #sums : :)
#else
/* Never executed, because `uses_tiles` is not set. */
#define CONFIGURE_TILES(shapes) ((void)(shapes))
#define RELEASE_TILES() ((void)0)
#define ZERO_TILE(tile) ((void)0)
#define LOAD_TILE(tile, from, stride) ((void)(from), (void)(stride))
#define LOAD_TILE_ONCE(tile, from, stride) ((void)(from), (void)(stride))
#define STORE_TILE(tile, to, stride) ((void)(to), (void)(stride))
#define ADD_BF16_PRODUCTS(sums, activations, weights) ((void)0)
#define ADD_INT8_PRODUCTS(sums, activations, weights) ((void)0)
#endif

/* Configure the registers for `rows` rows, at most two tiles, and `words` words of activations and weights. */
INLINE void shape_tiles(int rows, int words)
{
    const uint8_t upper = (uint8_t)(rows < TILE_ROWS ? rows : TILE_ROWS), lower = (uint8_t)(rows - upper);
    struct tile_shapes shapes = {1, .rows = {upper, upper, lower, lower, upper, lower, (uint8_t)words, (uint8_t)words}};
    for (int i = 0; i < 8; i++)
        shapes.row_bytes[i] = shapes.rows[i] ? TILE_BYTES : 0;
    for (int i = 4; i < 6; i++)
        if (shapes.rows[i])
            shapes.row_bytes[i] = (uint16_t)(4 * words);
    CONFIGURE_TILES(&shapes);
}

/* Zero, load or store the sums: one tile of rows, or `both`, with two vectors each. */
INLINE void zero_sums(int both)
{
    ZERO_TILE(0);
    ZERO_TILE(1);
    if (both) {
        ZERO_TILE(2);
        ZERO_TILE(3);
    }
}

/* Two vectors of 32-bit words: of sums, and of weights. */
#define SUMS_STRIDE (2 * TILE_BYTES)

/* Load an operand that is kept in the L1 cache, or one that does not displace it. */
#define LOAD_OPERAND(is_kept, tile, from, stride) \
    do { \
        if (is_kept) \
            LOAD_TILE(tile, from, stride); \
        else \
            LOAD_TILE_ONCE(tile, from, stride); \
    } while (0)
#define ADD_PRODUCTS(are_int8, sums, activations, weights) \
    do { \
        if (are_int8) \
            ADD_INT8_PRODUCTS(sums, activations, weights); \
        else \
            ADD_BF16_PRODUCTS(sums, activations, weights); \
    } while (0)

/* Add the products of a tile of activations, or `both`, rows `stride` bytes apart, and of two tiles of weights. Either
 * weights are kept in the L1 cache, or activations. */
INLINE void add_tiles(int are_int8, int keeps_weights, int both, const void *activations, uint64_t stride,
                      const void *weights)
{
    LOAD_OPERAND(keeps_weights, 6, weights, SUMS_STRIDE);
    LOAD_OPERAND(keeps_weights, 7, (const char *)weights + TILE_BYTES, SUMS_STRIDE);
    LOAD_OPERAND(!keeps_weights, 4, activations, stride);
    ADD_PRODUCTS(are_int8, 0, 4, 6);
    ADD_PRODUCTS(are_int8, 1, 4, 7);
    if (!both)
        return;
    LOAD_OPERAND(!keeps_weights, 5, (const char *)activations + TILE_ROWS * stride, stride);
    ADD_PRODUCTS(are_int8, 2, 5, 6);
    ADD_PRODUCTS(are_int8, 3, 5, 7);
}

INLINE void load_sums(int both, const void *sums)
{
    const char *const lower = (const char *)sums + TILE_ROWS * SUMS_STRIDE;
    LOAD_TILE(0, sums, SUMS_STRIDE);
    LOAD_TILE(1, (const char *)sums + TILE_BYTES, SUMS_STRIDE);
    if (both) {
        LOAD_TILE(2, lower, SUMS_STRIDE);
        LOAD_TILE(3, lower + TILE_BYTES, SUMS_STRIDE);
    }
}

INLINE void store_sums(int both, void *sums)
{
    char *const lower = (char *)sums + TILE_ROWS * SUMS_STRIDE;
    STORE_TILE(0, sums, SUMS_STRIDE);
    STORE_TILE(1, (char *)sums + TILE_BYTES, SUMS_STRIDE);
    if (both) {
        STORE_TILE(2, lower, SUMS_STRIDE);
        STORE_TILE(3, lower + TILE_BYTES, SUMS_STRIDE);
    }
}

#endif
