/* Linear layers over packed bfloat16 or int8 weights: few rows of activations against all weights, as in decode steps.
 *
 * Weights are packed once, into panels. A panel holds the weights of a few vectors of outputs, input after input, in
 * 32-bit words: word i has the weight of output i in its lowest bits, that of output LANES + i in the next, and so on:
 * two of bfloat16, four of int8. So shifts turn one load into the vectors to multiply with, and weights are read from
 * memory in the order of their use. float16 is not unpacked by shifts: the CPU converts a vector on load, so its panels
 * have one vector of outputs after the other.
 *
 * All sums are float32, over the inputs in one order, whatever the number of rows and threads: the result of a row
 * depends on that row only.
 */
#include "codes.h"

#include <stdio.h>
#include <stdlib.h>

INLINE int vectors_a_panel(int kind)
{
    return kind == INT8 ? 4 : 2;
}

/* Vector `v` of the weights of one input in a panel. */
INLINE vfloat unpacked(const uint32_t *w, int kind, int v)
{
    if (kind == INT8)
        return __builtin_convertvector((vint)(load_words(w) << (24 - 8 * v)) >> 24, vfloat);
    return from_panel(w, v);
}

/* Memory that a tile fetches while it multiplies: a line of 64 bytes per `period` inputs. No period: none. */
struct prefetch {
    const char *from;
    uint64_t period;
};

/* `rows` rows against `panels` adjacent panels; both numbers are known to the compiler. */
INLINE void tile(const struct linear *l, int kind, int rows, int panels, uint64_t row, uint64_t panel,
                 const uint32_t *w, const float *a, struct prefetch next)
{
    const int nv = vectors_a_panel(kind);
    const uint64_t num_inputs = l->num_inputs;
    vfloat sums[SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * panels * nv; i++)
        sums[i] = (vfloat){0};
    uint64_t due = next.period ? 0 : num_inputs;
    for (uint64_t k = 0; k < num_inputs; k++) {
        if (k == due) {
            __builtin_prefetch(next.from);
            next.from += 64;
            due += next.period;
        }
#pragma GCC unroll 8
        for (int p = 0; p < panels; p++) {
            vfloat weight[4];
#pragma GCC unroll 4
            for (int v = 0; v < nv; v++)
                weight[v] = unpacked(w + (p * num_inputs + k) * LANES, kind, v);
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
        tile(l, kind, rows, 1, row, panel, w, a, next); \
        break;
#define BF16_TILE(rows) TILE(BF16, rows)
#define INT8_TILE(rows) TILE(INT8, rows)

/* One panel against any number of rows that fits the registers. w: the panel's weights. */
static void tile_of(const struct linear *l, int kind, int rows, uint64_t row, uint64_t panel, const uint32_t *w,
                    const float *a, struct prefetch next)
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
    const struct prefetch none = {NULL, 0};
    if (rows == 1 && l->kind == BF16 && panel + 4 <= end) {
        tile(l, BF16, 1, 4, row, panel, w, a, none);
        return 4;
    }
    if (rows == 1 && l->kind == INT8 && panel + 2 <= end) {
        tile(l, INT8, 1, 2, row, panel, w, a, none);
        return 2;
    }
    if (rows == 2 && l->kind == BF16 && panel + 2 <= end) {
        tile(l, BF16, 2, 2, row, panel, w, a, none);
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
    if (l->kind >= GROUPS4 && l->num_rows <= FEW_ROWS)
        return alike_rows(l, FEW_ROWS / 2);
    return alike_rows(l, l->kind == INT8 && !is_expanded(l) ? SUMS / 4 : SUMS / 2);
}

/* Convert activations to floats, tile after tile, and within a tile input after input. */
static void convert_tile(const struct linear *l, uint64_t chunk, int first, int rows)
{
    const bf16 *from = l->inputs + (chunk + first) * l->input_stride;
    float *to = l->scratch + (size_t)first * l->num_inputs;
    uint64_t k = 0;
#if 2 * LANES >= SUMS
    /* A store writes beyond its rows, into the place of the next input, which is written later. The last inputs have no
     * next one, so they are stored number by number. */
    for (; k + 2 * LANES <= l->num_inputs; k += LANES) {
        vuint inputs[LANES];
#pragma GCC unroll 16
        for (int r = 0; r < LANES; r++)
            inputs[r] = (vuint)load_bf16(from + MIN(r, rows - 1) * l->input_stride + k);
        transpose(inputs);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            memcpy(to + (k + i) * rows, &inputs[i], sizeof inputs[i]);
    }
#endif
    for (; k < l->num_inputs; k++)
        for (int r = 0; r < rows; r++)
            to[k * rows + r] = from_bf16(from[r * l->input_stride + k]);
}

/* Rows [top, bottom) of a chunk against one panel, in tiles. The first tile reads the panel from memory. The others
 * read it from the cache, so that memory is free for a part of the next panel in each tile. */
static void multiply_panel(const struct linear *l, int kind, uint64_t chunk, int top, int bottom, uint64_t panel,
                           const uint32_t *w)
{
    const int step = tile_rows(l), tiles = (bottom - top + step - 1) / step;
    const uint64_t an_input = LANES * sizeof(uint32_t), bytes = l->num_inputs * an_input;
    /* An expanded panel is in the cache. */
    const int is_expanded_panel = kind != l->kind;
    struct prefetch next = {(const char *)w + bytes, is_expanded_panel ? 0 : MAX(1, (uint64_t)tiles * 64 / an_input)};
    for (int r = top; r < bottom; r += step, next.from += bytes / (uint64_t)tiles)
        tile_of(l, kind, MIN(step, bottom - r), chunk + r, panel, w, l->scratch + (size_t)r * l->num_inputs, next);
}

/* Expand one panel of int8 into two of bfloat16: the first has the outputs of the two low bytes. */
static void expand(const struct linear *l, const uint32_t *w, uint32_t *to)
{
    for (uint64_t k = 0; k < l->num_inputs; k++) {
        vuint halves[2];
        for (int v = 0; v < 2; v++) {
            const uint32_t *at = w + k * LANES;
            halves[v] = words_of(unpacked(at, INT8, 2 * v), unpacked(at, INT8, 2 * v + 1));
            memcpy(to + (v * l->num_inputs + k) * LANES, &halves[v], sizeof halves[v]);
        }
    }
}

uint32_t *memory_of_thread(size_t needed)
{
    static _Thread_local uint32_t *memory;
    static _Thread_local size_t size;
    if (size < needed) {
        free(memory);
        memory = malloc(needed);
        size = needed;
        if (!memory) {
            fprintf(stderr, "splitserve: no memory for %zu bytes of expanded weights\n", needed);
            abort();
        }
    }
    return memory;
}

/* A chunk's rows against panels [begin, end). */
static void multiply(const struct linear *l, uint64_t chunk, int num_rows, uint64_t begin, uint64_t end)
{
    uint32_t *expanded = is_expanded(l) ? memory_of_thread(2 * l->num_inputs * LANES * sizeof(uint32_t)) : NULL;
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
            if (expanded) {
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

static uint64_t outputs_of(const struct linear *l)
{
    return (uint64_t)vectors_a_panel(l->kind) * LANES;
}

static uint64_t num_tasks(const void *args, uint64_t phase)
{
    const struct linear *l = args;
    return chunk_tasks(l, phase, (uint64_t)tile_rows(l), outputs_of(l));
}

/* Return the sums of each group's activations [rows, groups], stored behind the activations of a chunk. */
static float *group_sums_of(const struct linear *l)
{
    return l->scratch + MIN((uint64_t)CHUNK_ROWS, l->num_rows) * l->num_inputs;
}

static void run(const void *args, uint64_t phase, uint64_t task)
{
    const struct linear *l = args;
    const uint64_t chunk = phase / 2 * CHUNK_ROWS, rows = chunk_rows(l, chunk);
    if (phase % 2) {
        const uint64_t panels = chunk_panels(l, rows, outputs_of(l));
        const uint64_t begin = task * panels, end = MIN(l->num_panels, begin + panels);
        const struct float_rows converted = {l->scratch, group_sums_of(l), chunk, (int)rows, tile_rows(l)};
        if (l->kind >= GROUPS4)
            multiply_float_groups(l, &converted, begin, end);
        else
            multiply(l, chunk, (int)rows, begin, end);
        return;
    }
    const uint64_t step = (uint64_t)tile_rows(l), part = items_a_task(step * l->num_inputs) * step;
    const uint64_t last = MIN(rows, (task + 1) * part);
    for (uint64_t r = task * part; r < last; r += step)
        convert_tile(l, chunk, (int)r, (int)MIN(step, rows - r));
    if (l->kind >= GROUPS4)
        for (uint64_t r = task * part; r < last; r++)
            sum_groups(l, chunk + r, group_sums_of(l) + r * num_groups(l));
}

static const struct kernel widening_kernel = {chunk_phases, num_tasks, run};

static const struct kernel *kernel_of(const struct linear *l)
{
    switch (l->kind) {
    case W8A8:
        return &w8a8_kernel;
    case PAIRS:
        return &pairs_kernel;
    case GROUPS4:
    case GROUPS8:
    case FP8:
        return HAS_PAIRS || l->uses_tiles ? &groups_kernel : &widening_kernel;
    default:
        return &widening_kernel;
    }
}

static uint64_t phases_of_kind(const void *args)
{
    return kernel_of(args)->num_phases(args);
}

static uint64_t tasks_of_kind(const void *args, uint64_t phase)
{
    return kernel_of(args)->num_tasks(args, phase);
}

static void run_kind(const void *args, uint64_t phase, uint64_t task)
{
    kernel_of(args)->run(args, phase, task);
}

const struct kernel linear_kernel = {phases_of_kind, tasks_of_kind, run_kind};

void linear(const struct linear *l)
{
    run_kernel(&linear_kernel, l, (uint64_t)l->num_threads);
}

/* Used by the packing of weights. */
uint64_t lanes(void)
{
    return LANES;
}

/* Whether numbers of 16 bits are float16 in this build. */
uint64_t computes_float16(void)
{
#if defined(FLOAT16)
    return 1;
#else
    return 0;
#endif
}
