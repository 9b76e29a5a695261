/* Linear layers over bfloat16 weights for CPUs that multiply pairs of bfloat16 and add both products in one
 * instruction. If the CPU has tile instructions, tiles.c multiplies instead.
 *
 * A panel holds the weights of two vectors of outputs in 32-bit words: a word has two inputs of one output, the first
 * in its low half, zero behind the last. Activations are read in place: a row's next two inputs are one such word.
 *
 * Sums are float32, over the pairs of inputs in one order, whatever the number of rows and threads: the result of a row
 * depends on that row only. The instruction treats subnormal numbers as zero.
 */
#include "linear.h"

#include "pairs.h"

/* Vectors of outputs in a panel. */
#define VECTORS 2
/* Rows with sums that fit the registers. */
#define TILE_ROWS (SUMS / VECTORS)
/* Adjacent panels for one row. */
#define WIDE 4
/* Pairs of inputs between two fetches of later memory. */
#define STRETCH 16

INLINE uint64_t num_pairs(const struct linear *l)
{
    return (l->num_inputs + 1) / 2;
}

/* Memory that is read after a tile. The tile fetches `bytes` of it into the L2 cache per STRETCH pairs of inputs. So
 * memory is read while the CPU multiplies, also if several tiles of rows use the same panel. */
struct ahead {
    const char *from;
    uint64_t bytes; /* whole lines */
};

/* Add the products of pairs of inputs [begin, end). */
INLINE void add_pairs(const struct linear *l, int rows, int panels, const bf16 *inputs, const uint32_t *w,
                      uint64_t begin, uint64_t end, vfloat *sums)
{
    const uint64_t words = num_pairs(l);
#pragma GCC unroll 1
    for (uint64_t k = begin; k < end; k++) {
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            vuint weights[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                memcpy(&weights[v], w + ((p * words + k) * VECTORS + v) * LANES, sizeof weights[v]);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                const vuint activation = splat_pair(inputs + r * l->input_stride + 2 * k);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++)
                    sums[(p * rows + r) * VECTORS + v] =
                        add_products(sums[(p * rows + r) * VECTORS + v], weights[v], activation);
            }
        }
    }
}

/* `rows` rows against `panels` adjacent panels; both numbers are known to the compiler. */
INLINE void tile(const struct linear *l, int rows, int panels, uint64_t row, uint64_t panel, struct ahead ahead)
{
    const uint64_t words = num_pairs(l), whole = l->num_inputs / 2;
    const uint32_t *w = l->panels + panel * words * VECTORS * LANES;
    const bf16 *inputs = l->inputs + row * l->input_stride;
    fetch_outputs(l, VECTORS, rows, panels, row, panel);
    vfloat sums[SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * panels * VECTORS; i++)
        sums[i] = (vfloat){0};
    const uint64_t stretch = ahead.bytes ? STRETCH : whole;
    for (uint64_t k = 0; k < whole; k += stretch) {
        for (const char *end = ahead.from + ahead.bytes; ahead.from < end; ahead.from += 64)
            __builtin_prefetch(ahead.from, 0, 2);
        add_pairs(l, rows, panels, inputs, w, k, MIN(whole, k + stretch), sums);
    }
    if (whole < words) {
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                vuint weight;
                memcpy(&weight, w + ((p * words + whole) * VECTORS + v) * LANES, sizeof weight);
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++)
                    sums[(p * rows + r) * VECTORS + v] =
                        add_products(sums[(p * rows + r) * VECTORS + v], weight,
                                     splat_word(inputs[r * l->input_stride + 2 * whole]));
            }
    }
    finish_tile(l, VECTORS, rows, panels, row, panel, sums);
}

#define TILE(rows) \
    case rows: \
        tile(l, rows, 1, row, panel, ahead); \
        break;

static void tile_of(const struct linear *l, int rows, uint64_t row, uint64_t panel, struct ahead ahead)
{
    switch (rows) {
        TILES_OF_TWO_VECTORS(TILE)
    }
}

/* Few rows leave registers free for several panels at once; with one panel each sum would wait for the last. Returns
 * the panels done; 0 if one panel at a time is as fast.
 */
static uint64_t wide_tile(const struct linear *l, uint64_t rows, uint64_t row, uint64_t panel, uint64_t end)
{
    if (rows == 1 && panel + WIDE <= end) {
        tile(l, 1, WIDE, row, panel, (struct ahead){0});
        return WIDE;
    }
    if (rows == 2 && panel + WIDE / 2 <= end) {
        tile(l, 2, WIDE / 2, row, panel, (struct ahead){0});
        return WIDE / 2;
    }
    return 0;
}

/* Rows [first, last), which stay in the cache, against panels [begin, end). */
static void multiply(const struct linear *l, uint64_t first, uint64_t last, uint64_t begin, uint64_t end, uint64_t step)
{
    const uint64_t words = num_pairs(l), tiles = parts_of(last - first, step);
    /* Each tile of rows fetches its share of the next panel. A single tile reads memory all the time anyway. */
    const uint64_t bytes = tiles > 1 ? parts_of(STRETCH * VECTORS * LANES * sizeof(uint32_t) / 64, tiles) * 64 : 0;
    /* If threads alternate, the next task of this thread begins at this panel. */
    const uint64_t after = MIN(begin + (uint64_t)l->num_threads * (end - begin), l->num_panels - 1);
    for (uint64_t panel = begin; panel < end;) {
        const uint64_t done = wide_tile(l, last - first, first, panel, end);
        if (!done) {
            const uint64_t next = panel + 1 < end ? panel + 1 : after;
            struct ahead ahead = {(const char *)(l->panels + next * words * VECTORS * LANES), bytes};
            for (uint64_t row = first; row < last; row += step, ahead.from += parts_of(words, STRETCH) * bytes)
                tile_of(l, (int)MIN(step, last - row), row, panel, ahead);
        }
        panel += done ? done : 1;
    }
}

static void run(const void *args, uint64_t phase, uint64_t task)
{
    const struct linear *l = args;
    const struct part p = part_of_task(l, task);
    (void)phase;
    if (l->uses_tiles) {
        const struct tiled_rows rows = {l->inputs + p.first * l->input_stride, NULL, l->input_stride * sizeof(bf16),
                                        p.first, p.last - p.first};
        multiply_tiles(l, &rows, p.begin, p.end);
        return;
    }
    multiply(l, p.first, p.last, p.begin, p.end, p.step);
}

const struct kernel pairs_kernel = {divided_phases, divided_tasks, run};

/* Whether this build has the instruction: without it linear.c is faster. */
uint64_t multiplies_pairs(void)
{
    return HAS_PAIRS;
}
