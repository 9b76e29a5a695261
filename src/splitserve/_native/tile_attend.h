/* Attention by tile instructions (AMX), of prompts (prompts.c) and of decode steps (attention.c).
 *
 * TDPBF16PS sums 16 pairs of inputs in an order of its own (tiles.c). So both kernels use it, for the same pairs: 32
 * numbers of a key for a score, and 32 keys from a multiple of 32 on for a value. In prompts keys are rows of tiles and
 * query rows are columns. In decode steps it is the reverse, and the order of sums is the same.
 *
 * Behind the last number of a key there are zeros. Keys that are missing have no weight and repeat another key.
 */
#ifndef SPLITSERVE_TILE_ATTEND_H
#define SPLITSERVE_TILE_ATTEND_H

#include "attend.h"
#include "tiles.h"

#if HAS_TILES
#define USES_TILES(args) ((args)->uses_tiles)
#else
#define USES_TILES(args) 0
#endif

/* Inputs of a tile's row: numbers of a key, or keys. */
#define TILE_INPUTS (TILE_BYTES / 2)
/* Rows of a prompt that are multiplied at once, in the lanes of two vectors: TILE of prompts.c. */
#define COLUMNS (2 * LANES)

INLINE uint64_t whole_tiles(uint64_t inputs)
{
    return (inputs + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS;
}

/* The keys of a block as tiles of TILE_ROWS keys. */
struct key_tiles {
    const bf16 *first[BLOCK / TILE_ROWS];
    uint64_t stride[BLOCK / TILE_ROWS]; /* from key to key, in bytes */
    _Alignas(64) bf16 copies[BLOCK * MAX_HEAD_SIZE];
};

/* Find the tiles of n keys, `stride` numbers apart within a page, but for the first `hidden` ones. Keys are read in place
 * if a page and a head consist of whole tiles; otherwise they are copied. */
INLINE void find_key_tiles(struct key_tiles *k, const bf16 *const *keys, uint64_t n, uint64_t hidden,
                           uint64_t head_size, uint64_t stride, uint64_t page_size)
{
    const uint64_t size = whole_tiles(head_size);
    for (uint64_t i = 0; i < whole_tiles(n); i += TILE_ROWS) {
        const int is_whole =
            hidden <= i && i + TILE_ROWS <= n && page_size % TILE_ROWS == 0 && size == head_size;
        bf16 *const copy = k->copies + i * size;
        for (uint64_t r = 0; r < (is_whole ? 0 : TILE_ROWS); r++) {
            memcpy(copy + r * size, keys[MIN(i + r, n - 1)], head_size * sizeof(bf16));
            memset(copy + r * size + head_size, 0, (size - head_size) * sizeof(bf16));
        }
        k->first[i / TILE_ROWS] = is_whole ? keys[i] : copy;
        k->stride[i / TILE_ROWS] = (is_whole ? stride : size) * sizeof(bf16);
    }
}

/* Transpose `vectors` vectors, from number d on, of the values of TILE_INPUTS keys. The compiler knows `vectors`. */
INLINE void spread_numbers(const bf16 *const *values, uint64_t d, int vectors, uint32_t *to)
{
    vuint words[2][LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        vuint pairs[2];
        pair_up(values[2 * i] + d, values[2 * i + 1] + d, vectors, pairs);
        for (int v = 0; v < vectors; v++)
            words[v][i] = pairs[v];
    }
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
        transpose(words[v]);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            memcpy(to + (d + v * LANES + i) * (BLOCK / 2), &words[v][i], sizeof words[v][i]);
    }
}

/* Transpose the values of n keys: [value_size, BLOCK / 2] pairs of keys. */
INLINE void spread_values(const bf16 **values, uint64_t n, uint64_t value_size, void *to)
{
    for (uint64_t i = n; i < whole_tiles(n); i++)
        values[i] = values[n - 1];
    for (uint64_t i = 0; i < n; i += TILE_INPUTS) {
        uint32_t *const pairs = (uint32_t *)to + i / 2;
        uint64_t d = 0;
        for (; d + 2 * LANES <= value_size; d += 2 * LANES)
            spread_numbers(values + i, d, 2, pairs);
        if (d < value_size)
            spread_numbers(values + i, d, 1, pairs);
    }
}

/* Zero the pairs of numbers behind the last one of each query. */
INLINE void pad_queries(void *queries, uint64_t head_size)
{
    memset((uint32_t *)queries + head_size / 2 * COLUMNS, 0,
           (whole_tiles(head_size) - head_size) / 2 * COLUMNS * sizeof(uint32_t));
}

/* Add the products of 16 pairs of one or `both` tiles of rows, `first` and `second`, with those of COLUMNS columns. */
INLINE void add_pairs(int both, const void *first, uint64_t stride, const void *second, uint64_t second_stride,
                      const uint32_t *columns)
{
    LOAD_TILE(6, columns, COLUMNS * sizeof *columns);
    LOAD_TILE(7, columns + LANES, COLUMNS * sizeof *columns);
    LOAD_TILE(4, first, stride);
    ADD_BF16_PRODUCTS(0, 4, 6);
    ADD_BF16_PRODUCTS(1, 4, 7);
    if (!both)
        return;
    LOAD_TILE(5, second, second_stride);
    ADD_BF16_PRODUCTS(2, 5, 6);
    ADD_BF16_PRODUCTS(3, 5, 7);
}

/* Score n keys: [n, COLUMNS]. `hide` overwrites the scores of missing keys of the last tiles. */
INLINE void score_tiles(const struct key_tiles *k, uint64_t n, const void *queries, uint64_t head_size, float *scores)
{
    for (uint64_t i = 0; i < n; i += 2 * TILE_ROWS) {
        const uint64_t t = i / TILE_ROWS;
        zero_sums(1);
        for (uint64_t d = 0; d < head_size; d += TILE_INPUTS)
            add_pairs(1, k->first[t] + d, k->stride[t], k->first[t + 1] + d, k->stride[t + 1],
                      (const uint32_t *)queries + d / 2 * COLUMNS);
        store_sums(1, scores + i * COLUMNS);
    }
}

/* Add weighted values of n keys to sums. `weights`: [BLOCK / 2, COLUMNS] pairs of keys, zero for missing
 * keys of the last tiles. */
INLINE void add_value_tiles(const void *values, const void *weights, uint64_t n, uint64_t value_size, float *sums)
{
    const uint32_t *const pairs = weights;
    for (uint64_t d = 0; d < value_size; d += 2 * TILE_ROWS) {
        const int both = d + TILE_ROWS < value_size;
        float *const at = sums + d * COLUMNS;
        load_sums(both, at);
        for (uint64_t i = 0; i < n; i += TILE_INPUTS) {
            const bf16 *const rows = (const bf16 *)values + d * BLOCK + i;
            add_pairs(both, rows, BLOCK * sizeof *rows, rows + TILE_ROWS * BLOCK, BLOCK * sizeof *rows,
                      pairs + i / 2 * COLUMNS);
        }
        store_sums(both, at);
    }
}

/* Give the registers the shapes for a decode step with `heads` query heads per KV head: 0 to 3 sums, 4 and 5 operands
 * with 16 pairs, 6 and 7 operands with 8 pairs. */
INLINE void shape_for_heads(uint64_t heads)
{
    const uint8_t rows = (uint8_t)heads;
    const struct tile_shapes shapes = {
        1,
        .row_bytes = {TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES / 2, TILE_BYTES},
        .rows = {rows, rows, rows, rows, rows, TILE_ROWS, rows, TILE_ROWS / 2}};
    CONFIGURE_TILES(&shapes);
}

/* DO(i) for each of the first `num` registers of sums. */
#define FOR_SUMS(num, DO) \
    do { \
        DO(0); \
        if ((num) > 1) \
            DO(1); \
        if ((num) > 2) \
            DO(2); \
        if ((num) > 3) \
            DO(3); \
    } while (0)

/* Score keys [first, end) of a block against as many queries as `shape_for_heads` was given: [heads, BLOCK]. keys:
 * [head_size / 2, BLOCK] pairs of numbers. */
INLINE void score_heads_by_tiles(const bf16 *queries, uint64_t head_size, const uint32_t *keys, uint64_t first,
                                 uint64_t end, float *scores)
{
    const uint64_t place = first / LANES * LANES, num = (end - place + LANES - 1) / LANES;
    const uint64_t stride = head_size * sizeof *queries, words = BLOCK * sizeof *keys;
    float *const to = scores + place;
#define STORE_SUM(i) STORE_TILE(i, to + i * LANES, BLOCK * sizeof *to)
#define ADD_KEYS(i) \
    do { \
        LOAD_TILE(5, keys + d / 2 * BLOCK + place + i * LANES, words); \
        ADD_BF16_PRODUCTS(i, 4, 5); \
    } while (0)
#define ADD_LAST_KEYS(i) \
    do { \
        LOAD_TILE(7, keys + d / 2 * BLOCK + place + i * LANES, words); \
        ADD_BF16_PRODUCTS(i, 6, 7); \
    } while (0)
    FOR_SUMS(num, ZERO_TILE);
    uint64_t d = 0;
    for (; d + TILE_INPUTS <= head_size; d += TILE_INPUTS) {
        LOAD_TILE(4, queries + d, stride);
        FOR_SUMS(num, ADD_KEYS);
    }
    if (d < head_size) {
        LOAD_TILE(6, queries + d, stride);
        FOR_SUMS(num, ADD_LAST_KEYS);
    }
    FOR_SUMS(num, STORE_SUM);
}

/* Add weighted values of keys [first, end) of a block to sums x `before`: [heads, stride]. `values`: [BLOCK / 2,
 * value_size] pairs of keys, in tiles that have one of these keys. `weights`: [heads, BLOCK]. */
INLINE void add_values_by_tiles(const bf16 *weights, const uint32_t *values, uint64_t heads, uint64_t value_size,
                                uint64_t first, uint64_t end, const float *before, float *sums, uint64_t stride)
{
    for (uint64_t h = 0; h < heads; h++)
        for (uint64_t d = 0; d < value_size; d += LANES)
            store(sums + h * stride + d, load(sums + h * stride + d) * before[h]);
#define LOAD_SUM(i) LOAD_TILE(i, sums + d + i * LANES, stride * sizeof *sums)
#define STORE_VALUES(i) STORE_TILE(i, sums + d + i * LANES, stride * sizeof *sums)
#define ADD_VALUES(i) \
    do { \
        LOAD_TILE(5, values + k / 2 * value_size + d + i * LANES, value_size * sizeof *values); \
        ADD_BF16_PRODUCTS(i, 4, 5); \
    } while (0)
    for (uint64_t d = 0; d < value_size; d += 4 * LANES) {
        const uint64_t num = MIN(4, (value_size - d) / LANES);
        FOR_SUMS(num, LOAD_SUM);
        for (uint64_t k = first / TILE_INPUTS * TILE_INPUTS; k < end; k += TILE_INPUTS) {
            LOAD_TILE(4, weights + k, BLOCK * sizeof *weights);
            FOR_SUMS(num, ADD_VALUES);
        }
        FOR_SUMS(num, STORE_VALUES);
    }
}

#endif
