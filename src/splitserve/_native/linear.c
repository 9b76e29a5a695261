/* Linear layers over packed bfloat16 or int8 weights: few rows of activations against all weights, as in decode steps.
 *
 * Weights are packed once, into panels. A panel holds the weights of a few vectors of outputs, input after input, in
 * 32-bit words: word i has the weight of output i in its lowest bits, that of output LANES + i in the next, and so on:
 * two of bfloat16, four of int8. So shifts turn one load into the vectors to multiply with, and weights are read from
 * memory in the order of their use.
 *
 * All sums are float32, over the inputs in one order, whatever the number of rows and threads: the result of a row
 * depends on that row only.
 */
#include "linear.h"

INLINE int vectors_a_panel(int kind)
{
    return kind == INT8 ? 4 : 2;
}

INLINE vfloat unpacked(vuint words, int kind, int v)
{
    if (kind == INT8)
        return __builtin_convertvector((vint)(words << (24 - 8 * v)) >> 24, vfloat);
    return (vfloat)(v ? words & 0xffff0000u : words << 16);
}

/* `rows` rows against `panels` adjacent panels; both numbers are known to the compiler. */
INLINE void tile(const struct linear *l, int kind, int rows, int panels, uint64_t row, uint64_t panel,
                 const uint32_t *w, const float *a)
{
    const int nv = vectors_a_panel(kind);
    const uint64_t num_inputs = l->num_inputs;
    vfloat sums[SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * panels * nv; i++)
        sums[i] = (vfloat){0};
    for (uint64_t k = 0; k < num_inputs; k++) {
#pragma GCC unroll 8
        for (int p = 0; p < panels; p++) {
            vuint words;
            memcpy(&words, w + (p * num_inputs + k) * LANES, sizeof words);
            vfloat weight[4];
#pragma GCC unroll 4
            for (int v = 0; v < nv; v++)
                weight[v] = unpacked(words, kind, v);
            /* Row by row, so that the register of an activation is free at once. */
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                const vfloat activation = splat(a[k * rows + r]);
#pragma GCC unroll 4
                for (int v = 0; v < nv; v++)
                    sums[(p * rows + r) * nv + v] += weight[v] * activation;
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int p = 0; p < panels; p++)
            finish(l, nv, row + r, panel + p, sums + (p * rows + r) * nv);
}

#define TILE(kind, rows) \
    case rows: \
        tile(l, kind, rows, 1, row, panel, w, a); \
        break;
#define BF16_TILE(rows) TILE(BF16, rows)
#define INT8_TILE(rows) TILE(INT8, rows)

/* One panel against any number of rows that fits the registers. w: the panel's weights. */
static void tile_of(const struct linear *l, int kind, int rows, uint64_t row, uint64_t panel, const uint32_t *w,
                    const float *a)
{
    if (kind == INT8) {
        switch (rows) {
            TILES_OF_FOUR_VECTORS(INT8_TILE)
        }
        return;
    }
    switch (rows) {
        TILES_OF_TWO_VECTORS(BF16_TILE)
    }
}

/* One or two rows leave registers free for several panels at once; with one panel each sum would wait for the last.
 * Returns the panels done; 0 if the general tile is as fast.
 */
static uint64_t wide_tile(const struct linear *l, int rows, uint64_t row, uint64_t panel, uint64_t end,
                          const uint32_t *w, const float *a)
{
    if (rows == 1 && l->kind == BF16 && panel + 4 <= end) {
        tile(l, BF16, 1, 4, row, panel, w, a);
        return 4;
    }
    if (rows == 1 && l->kind == INT8 && panel + 2 <= end) {
        tile(l, INT8, 1, 2, row, panel, w, a);
        return 2;
    }
    if (rows == 2 && l->kind == BF16 && panel + 2 <= end) {
        tile(l, BF16, 2, 2, row, panel, w, a);
        return 2;
    }
    return 0;
}

/* With more than one tile of rows it is faster to expand a panel of int8 into two of bfloat16, which hold int8
 * exactly. */
static int is_expanded(const struct linear *l)
{
    return l->kind == INT8 && l->num_rows > SUMS / 4;
}

static int tile_rows(const struct linear *l)
{
    return alike_rows(l, l->kind == INT8 && !is_expanded(l) ? SUMS / 4 : SUMS / 2);
}

/* Convert activations to floats, tile after tile, and within a tile input after input. */
static void convert_tile(const struct linear *l, uint64_t chunk, int first, int rows)
{
    float *to = l->scratch + (size_t)first * l->num_inputs;
    for (int r = 0; r < rows; r++) {
        const bf16 *from = l->inputs + (chunk + first + r) * l->input_stride;
        for (uint64_t k = 0; k < l->num_inputs; k++)
            to[k * rows + r] = from_bf16(from[k]);
    }
}

/* Rows [top, bottom) of a chunk against one panel, in tiles. */
static void multiply_panel(const struct linear *l, int kind, uint64_t chunk, int top, int bottom, uint64_t panel,
                           const uint32_t *w)
{
    const int step = tile_rows(l);
    for (int r = top; r < bottom; r += step)
        tile_of(l, kind, MIN(step, bottom - r), chunk + r, panel, w, l->scratch + (size_t)r * l->num_inputs);
}

/* Expand one panel of int8 into two of bfloat16: the first has the outputs of the two low bytes. */
static void expand(const struct linear *l, const uint32_t *w, uint32_t *to)
{
    for (uint64_t k = 0; k < l->num_inputs; k++) {
        vuint words, halves[2];
        memcpy(&words, w + k * LANES, sizeof words);
        for (int v = 0; v < 2; v++) {
            const vuint low = (vuint)unpacked(words, INT8, 2 * v), high = (vuint)unpacked(words, INT8, 2 * v + 1);
            halves[v] = low >> 16 | high;
            memcpy(to + (v * l->num_inputs + k) * LANES, &halves[v], sizeof halves[v]);
        }
    }
}

/* A chunk's rows against panels [begin, end). */
static void multiply(const struct linear *l, uint64_t chunk, int num_rows, uint64_t begin, uint64_t end,
                     uint32_t *expanded)
{
    const int step = tile_rows(l);
    const int block = MAX(step, (int)(BLOCK_WORDS / l->num_inputs) / step * step);
    for (int top = 0; top < num_rows; top += block) {
        const int bottom = MIN(num_rows, top + block);
        for (uint64_t panel = begin; panel < end;) {
            const uint32_t *w = l->panels + panel * l->num_inputs * LANES;
            const float *a = l->scratch + (size_t)top * l->num_inputs;
            const uint64_t done = num_rows <= 2 ? wide_tile(l, num_rows, chunk, panel, end, w, a) : 0;
            if (done) {
                panel += done;
                continue;
            }
            if (is_expanded(l)) {
                expand(l, w, expanded);
                multiply_panel(l, BF16, chunk, top, bottom, 2 * panel, expanded);
                multiply_panel(l, BF16, chunk, top, bottom, 2 * panel + 1, expanded + l->num_inputs * LANES);
            } else {
                multiply_panel(l, l->kind, chunk, top, bottom, panel, w);
            }
            panel++;
        }
    }
}

/* Panels are divided over threads in whole groups, so that each thread has enough adjacent panels. */
#define GROUP 4

void linear_share(const struct linear *l)
{
    if (l->kind == W8A8) {
        w8a8_share(l);
        return;
    }
    if (l->kind == PAIRS) {
        pairs_share(l);
        return;
    }
    if (l->kind >= GROUPS4) {
        groups_share(l);
        return;
    }
    const uint64_t num_groups = (l->num_panels + GROUP - 1) / GROUP;
    const uint64_t threads = (uint64_t)l->num_threads;
    const int step = tile_rows(l);
    for (uint64_t chunk = 0; chunk < l->num_rows; chunk += CHUNK_ROWS) {
        const int rows = (int)MIN((uint64_t)CHUNK_ROWS, l->num_rows - chunk);
#pragma omp for schedule(static)
        for (int r = 0; r < rows; r += step)
            convert_tile(l, chunk, r, MIN(step, rows - r));
        /* Both loops wait for all threads at their end. */
#pragma omp for schedule(static)
        for (uint64_t t = 0; t < threads; t++)
            multiply(l, chunk, rows, MIN(l->num_panels, t * num_groups / threads * GROUP),
                     MIN(l->num_panels, (t + 1) * num_groups / threads * GROUP),
                     l->expanded + t * 2 * l->num_inputs * LANES);
    }
}

void linear(const struct linear *l)
{
    if (!l->num_rows)
        return;
#pragma omp parallel num_threads(l->num_threads)
    linear_share(l);
}

/* Used by the packing of weights. */
uint64_t lanes(void)
{
    return LANES;
}
