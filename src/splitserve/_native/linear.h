/* Common parts of linear layers of all kinds: their arguments, and the conversion of sums to outputs. */
#ifndef SPLITSERVE_LINEAR_H
#define SPLITSERVE_LINEAR_H

#include "vectors.h"

#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* Vectors of sums that fit the registers beside weights and an activation. */
#if VECTOR_BYTES == 64
#define SUMS 24
#else
#define SUMS 12
#endif
/* Activations that stay in the cache of a core while panels are read, in 32-bit words. */
#define BLOCK_WORDS (48 * 1024)
/* Rows of activations that are converted at a time. */
#define CHUNK_ROWS 480

enum kind { BF16 = 0, INT8 = 1, W8A8 = 2, PAIRS = 3, GROUPS4 = 4, GROUPS8 = 5, FP8 = 6 };
enum epilogue { PLAIN = 0, SILU_MUL = 1 };

/* The same structure for ctypes: splitserve/engine/native/library.py. */
struct linear {
    const bf16 *inputs;      /* [num_rows, num_inputs], rows `input_stride` apart */
    const uint32_t *panels;
    const float *bias;       /* of each output, padded to whole panels; or NULL */
    const float *scales;     /* INT8, W8A8: of each output, padded to whole panels */
    bf16 *outputs;           /* [num_rows, num_outputs] */
    float *scratch;          /* rows x num_inputs; W8A8: CHUNK_ROWS + rows x 2 x num_inputs / 4; of up to CHUNK_ROWS rows;
                                PAIRS and the kinds with groups: none */
    uint32_t *expanded;      /* INT8: num_threads x 2 x num_inputs x LANES */
    uint64_t input_stride, num_rows, num_inputs;
    uint64_t num_outputs;    /* SILU_MUL: half of the weights' outputs, which alternate vector by vector: gate, up */
    uint64_t num_panels;
    uint64_t group;          /* GROUPS4, GROUPS8, FP8: inputs that share a scale, a multiple of 16 that divides num_inputs */
    int32_t kind, epilogue, num_threads;
    int32_t has_offsets;     /* GROUPS4, GROUPS8 */
};

/* Convert the sums of one row over one panel, `nv` vectors of outputs, to outputs. */
INLINE void finish(const struct linear *l, int nv, uint64_t row, uint64_t panel, const vfloat *sums)
{
    vfloat values[4];
#pragma GCC unroll 4
    for (int v = 0; v < nv; v++) {
        uint64_t first = (panel * nv + v) * LANES;
        values[v] = l->scales ? sums[v] * load(l->scales + first) : sums[v];
        if (l->bias)
            values[v] += load(l->bias + first);
    }
    int num_values = nv;
    if (l->epilogue == SILU_MUL) {
        num_values = nv / 2;
        for (int v = 0; v < num_values; v++)
            values[v] = values[2 * v] / (1.0f + exp_of(-values[2 * v])) * values[2 * v + 1];
    }
    for (int v = 0; v < num_values; v++) {
        uint64_t first = (panel * num_values + v) * LANES;
        if (first >= l->num_outputs)
            break;
        bf16 *to = l->outputs + row * l->num_outputs + first;
        if (first + LANES <= l->num_outputs)
            store_bf16(to, values[v]);
        else
            store_bf16_first(to, values[v], l->num_outputs - first);
    }
}

/* Rows per tile: as many as fit, in tiles of similar size: eight rows are faster as four and four than as six and
 * two. */
INLINE int alike_rows(const struct linear *l, int most)
{
    if (l->num_rows >= 8 * (uint64_t)most)
        return most;
    const int rows = (int)l->num_rows, tiles = (rows + most - 1) / most;
    return (rows + tiles - 1) / tiles;
}

/* CASE(rows) for each number of rows that a tile of two or four vectors of outputs may have: a switch over these
 * compiles every tile for its number of rows.
 */
#define TILES_UP_TO_3(CASE) CASE(1) CASE(2) CASE(3)
#define TILES_UP_TO_6(CASE) TILES_UP_TO_3(CASE) CASE(4) CASE(5) CASE(6)
#define TILES_UP_TO_12(CASE) TILES_UP_TO_6(CASE) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#if SUMS > 12
#define TILES_OF_TWO_VECTORS TILES_UP_TO_12
#define TILES_OF_FOUR_VECTORS TILES_UP_TO_6
#else
#define TILES_OF_TWO_VECTORS TILES_UP_TO_6
#define TILES_OF_FOUR_VECTORS TILES_UP_TO_3
#endif

/* Compute a thread's share; called by all threads of a team (program.c), of which l->num_threads are used. */
void linear_share(const struct linear *l);
/* The same for W8A8, for PAIRS, and for the kinds with groups. */
void w8a8_share(const struct linear *l);
void pairs_share(const struct linear *l);
void groups_share(const struct linear *l);

#endif
