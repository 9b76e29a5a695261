/* Linear layers by tile instructions (AMX), for PAIRS and W8A8: the panels of pairs.c and w8a8.c are read in place.
 *
 * TDPBF16PS sums 16 pairs of inputs in an order of its own: the products of the first inputs, those of the second
 * inputs, then both sums and the earlier one. pairs.c has another order. So tiles compute any number of rows, and the
 * result of a row depends on that row only. Sums of int8 are exact in any order.
 */
#if defined(__linux__)
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "linear.h"
#include "tiles.h"

/* Vectors of outputs in a panel. */
#define VECTORS 2

#if HAS_TILES

/* Words that a tile of weights holds of each output. */
#define TILE_WORDS TILE_ROWS

struct block {
    const uint8_t *activations;
    const uint32_t *weights;
    uint64_t stride; /* of activations, in bytes */
    int rows;
};

/* Add the products of TILE_WORDS words. */
INLINE void add_words(int kind, const struct block *b, const void *activations, uint64_t stride,
                      const uint32_t *weights)
{
    LOAD_TILE(6, weights, VECTORS * LANES * sizeof *weights);
    LOAD_TILE(7, weights + LANES, VECTORS * LANES * sizeof *weights);
    LOAD_TILE(4, activations, stride);
    if (kind == PAIRS) {
        ADD_BF16_PRODUCTS(0, 4, 6);
        ADD_BF16_PRODUCTS(1, 4, 7);
    } else {
        ADD_INT8_PRODUCTS(0, 4, 6);
        ADD_INT8_PRODUCTS(1, 4, 7);
    }
    if (b->rows <= TILE_ROWS)
        return;
    LOAD_TILE(5, (const uint8_t *)activations + TILE_ROWS * stride, stride);
    if (kind == PAIRS) {
        ADD_BF16_PRODUCTS(2, 5, 6);
        ADD_BF16_PRODUCTS(3, 5, 7);
    } else {
        ADD_INT8_PRODUCTS(2, 5, 6);
        ADD_INT8_PRODUCTS(3, 5, 7);
    }
}

/* Add the products of the last words, fewer than TILE_WORDS. Nothing behind a row or a panel may be read. */
static void add_last_words(int kind, const struct block *b, uint64_t first_byte, uint64_t num_bytes)
{
    _Alignas(64) uint8_t activations[TILED_ROWS][TILE_BYTES] = {0};
    _Alignas(64) uint32_t weights[TILE_WORDS][VECTORS * LANES] = {0};
    for (int r = 0; r < b->rows; r++)
        memcpy(activations[r], b->activations + r * b->stride + first_byte, num_bytes);
    memcpy(weights, b->weights + first_byte / 4 * VECTORS * LANES, parts_of(num_bytes, 4) * sizeof weights[0]);
    add_words(kind, b, activations, TILE_BYTES, weights[0]);
}

/* Sums of a block of rows over one panel: float32, for W8A8 int32. */
INLINE void add_all(int kind, const struct block *b, uint64_t row_bytes, uint32_t sums[TILED_ROWS][VECTORS * LANES])
{
    const uint64_t stride = sizeof sums[0], whole = row_bytes / TILE_BYTES * TILE_BYTES;
    ZERO_TILE(0);
    ZERO_TILE(1);
    if (b->rows > TILE_ROWS) {
        ZERO_TILE(2);
        ZERO_TILE(3);
    }
    for (uint64_t byte = 0; byte < whole; byte += TILE_BYTES)
        add_words(kind, b, b->activations + byte, b->stride, b->weights + byte / 4 * VECTORS * LANES);
    if (whole < row_bytes)
        add_last_words(kind, b, whole, row_bytes - whole);
    STORE_TILE(0, sums[0], stride);
    STORE_TILE(1, sums[0] + LANES, stride);
    if (b->rows > TILE_ROWS) {
        STORE_TILE(2, sums[TILE_ROWS], stride);
        STORE_TILE(3, sums[TILE_ROWS] + LANES, stride);
    }
}

INLINE void multiply(int kind, const struct linear *l, const struct tiled_rows *t, uint64_t begin, uint64_t end)
{
    const uint64_t row_bytes = l->num_inputs * (kind == PAIRS ? sizeof(bf16) : 1);
    const uint64_t panel_words = parts_of(row_bytes, 4) * VECTORS * LANES;
    int shaped = 0;
    for (uint64_t panel = begin; panel < end; panel++)
        for (uint64_t first = 0; first < t->num_rows; first += TILED_ROWS) {
            const struct block b = {(const uint8_t *)t->rows + first * t->stride, l->panels + panel * panel_words,
                                    t->stride, (int)MIN(TILED_ROWS, t->num_rows - first)};
            _Alignas(64) uint32_t sums[TILED_ROWS][VECTORS * LANES];
            if (b.rows != shaped)
                shape_tiles(b.rows);
            shaped = b.rows;
            add_all(kind, &b, row_bytes, sums);
            for (int r = 0; r < b.rows; r++) {
                vfloat values[VECTORS];
                memcpy(values, sums[r], sizeof values);
                if (kind == W8A8)
                    for (int v = 0; v < VECTORS; v++)
                        values[v] = __builtin_convertvector((vint)values[v], vfloat) * t->scales[first + r];
                finish(l, VECTORS, t->row + first + r, panel, values);
            }
        }
    /* A register in use is saved with the thread, and keeps the core from deeper sleep. */
    RELEASE_TILES();
}

void multiply_tiles(const struct linear *l, const struct tiled_rows *rows, uint64_t begin, uint64_t end)
{
    if (l->kind == PAIRS)
        multiply(PAIRS, l, rows, begin, end);
    else
        multiply(W8A8, l, rows, begin, end);
}

/* Request the use of tile registers for all threads of this process. Returns whether this build can use them and the
 * system permits it. Linux: ARCH_REQ_XCOMP_PERM for the state component of tile data.
 */
uint64_t request_tiles(void)
{
#if defined(TILE_REFERENCE)
    return 1;
#else
    return !syscall(SYS_arch_prctl, 0x1023, 18);
#endif
}

#else

/* Never called, because `uses_tiles` is not set without permission. */
void multiply_tiles(const struct linear *l, const struct tiled_rows *rows, uint64_t begin, uint64_t end)
{
    (void)l, (void)rows, (void)begin, (void)end;
}

uint64_t request_tiles(void)
{
    return 0;
}

#endif
