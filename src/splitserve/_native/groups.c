/* Linear layers over weights of 4 or 8 bits with a scale for each output and each group of adjacent inputs, as
 * quantized checkpoints have them (codes.h). This file multiplies on CPUs with an instruction for pairs of bfloat16.
 * If the CPU has tile instructions, tiled_groups.c does, and on CPUs without either, float_groups.c.
 *
 * The sum of a group is multiplied by its scale, and the group's sum of activations by its offset. All sums are
 * float32, in one order, whatever the number of rows and threads: the result of a row depends on that row only.
 */
#include "codes.h"

#if HAS_PAIRS

/* Rows with sums that fit the registers. */
#define TILE_ROWS (SUMS / VECTORS)

/* Add to the sums of `rows` rows the products of one word per lane, pair by pair, for two vectors of outputs. */
INLINE void add_words(const struct linear *l, int kind, int rows, const uint32_t *w, const bf16 *inputs, vuint table,
                      vfloat *sums)
{
    const int places = kind == GROUPS4 ? 4 : 2;
    const float zero = zero_of(l, kind);
    vuint words[VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) {
        words[v] = load_words(w + v * LANES);
        __builtin_prefetch(w + AHEAD + v * LANES);
    }
#pragma GCC unroll 4
    for (int place = 0; place < places; place++) {
        vpair weights[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++)
            weights[v] = pair_at(words[v], kind, place, table, zero);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const vuint activations = splat_pair(inputs + r * l->input_stride + 2 * place);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                sums[r * VECTORS + v] = add_products(sums[r * VECTORS + v], weights[v], activations);
        }
    }
}

/* `rows` rows against `panels` adjacent panels; both numbers and the kind are known to the compiler. row_sums: those of
 * the first row. */
INLINE void tile(const struct linear *l, int kind, int rows, int panels, uint64_t row, uint64_t panel,
                 const float *row_sums)
{
    const uint64_t stride = group_words(l, kind), panel_words = num_groups(l) * stride;
    const uint64_t words = l->group / inputs_a_word(kind);
    const uint32_t *w = l->panels + panel * panel_words;
    const bf16 *inputs = l->inputs + row * l->input_stride;
    const vuint table = table_of(zero_of(l, GROUPS4), 1.0f);
    vfloat totals[SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * panels * VECTORS; i++)
        totals[i] = (vfloat){0};
    for (uint64_t g = 0; g < num_groups(l); g++, w += stride) {
        vfloat sums[SUMS];
#pragma GCC unroll 32
        for (int i = 0; i < rows * panels * VECTORS; i++)
            sums[i] = (vfloat){0};
        for (uint64_t k = 0; k < words; k++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                add_words(l, kind, rows, w + p * panel_words + k * VECTORS * LANES,
                          inputs + g * l->group + k * inputs_a_word(kind), table, sums + p * rows * VECTORS);
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            add_group(l, rows, w + p * panel_words + words * VECTORS * LANES, row_sums + g,
                      sums + p * rows * VECTORS, totals + p * rows * VECTORS);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            finish(l, VECTORS, row + r, panel + p, totals + (p * rows + r) * VECTORS);
}

#define TILE(kind, rows) \
    case rows: \
        tile(l, kind, rows, 1, row, panel, row_sums); \
        break;
#define GROUPS4_TILE(rows) TILE(GROUPS4, rows)
#define GROUPS8_TILE(rows) TILE(GROUPS8, rows)
#define FP8_TILE(rows) TILE(FP8, rows)

static void tile_of(const struct linear *l, int rows, uint64_t row, uint64_t panel, const float *row_sums)
{
    if (l->kind == GROUPS4)
        switch (rows) {
            TILES_OF_TWO_VECTORS(GROUPS4_TILE)
        }
    else if (l->kind == GROUPS8)
        switch (rows) {
            TILES_OF_TWO_VECTORS(GROUPS8_TILE)
        }
    else
        switch (rows) {
            TILES_OF_TWO_VECTORS(FP8_TILE)
        }
}

/* One row leaves registers free for several panels at once. Returns the panels done; 0 if one panel at a time is as
 * fast. */
static uint64_t wide_tile(const struct linear *l, uint64_t rows, uint64_t row, uint64_t panel, uint64_t end,
                          const float *row_sums)
{
    if (rows != 1 || panel + WIDE > end)
        return 0;
    if (l->kind == GROUPS4)
        tile(l, GROUPS4, 1, WIDE, row, panel, row_sums);
    else if (l->kind == GROUPS8)
        tile(l, GROUPS8, 1, WIDE, row, panel, row_sums);
    else
        tile(l, FP8, 1, WIDE, row, panel, row_sums);
    return WIDE;
}

/* Rows [first, last), which stay in the cache, against panels [begin, end). */
static void multiply(const struct linear *l, uint64_t first, uint64_t last, uint64_t begin, uint64_t end, uint64_t step)
{
    const uint64_t groups = num_groups(l);
    float row_sums[(last - first) * groups];
    if (l->has_offsets)
        for (uint64_t row = first; row < last; row++)
            sum_groups(l, row, row_sums + (row - first) * groups);
    for (uint64_t panel = begin; panel < end;) {
        const uint64_t done = wide_tile(l, last - first, first, panel, end, row_sums);
        if (!done)
            for (uint64_t row = first; row < last; row += step)
                tile_of(l, (int)MIN(step, last - row), row, panel, row_sums + (row - first) * groups);
        panel += done ? done : 1;
    }
}

#endif

static void run(const void *args, uint64_t phase, uint64_t task)
{
    const struct linear *l = args;
    const struct part p = part_of_task(l, task);
    (void)phase;
#if HAS_PAIRS
    if (!l->uses_tiles) {
        multiply(l, p.first, p.last, p.begin, p.end, p.step);
        return;
    }
#endif
    multiply_tiled_groups(l, &p);
}

const struct kernel groups_kernel = {divided_phases, divided_tasks, run};
