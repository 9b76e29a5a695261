/* Common parts of linear layers of all kinds: their arguments, and the conversion of sums to outputs. */
#ifndef SPLITSERVE_LINEAR_H
#define SPLITSERVE_LINEAR_H

#include "pool.h"
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
/* The same for kinds with tile instructions: their operands come from the L2 cache. */
#define TILED_WORDS (256 * 1024)
/* Rows of activations that are converted at a time. */
#define CHUNK_ROWS 480

enum kind { BF16 = 0, INT8 = 1, W8A8 = 2, PAIRS = 3, GROUPS4 = 4, GROUPS8 = 5, FP8 = 6 };
/* FLOATS: outputs are float32. WIDENED: float32, rounded to 16 bits as PLAIN rounds. */
enum epilogue { PLAIN = 0, SILU_MUL = 1, GELU_MUL = 2, FLOATS = 3, WIDENED = 4 };

/* The same structure for ctypes: splitserve/engine/kernels/library.py. */
struct linear {
    const bf16 *inputs;      /* [num_rows, num_inputs], rows `input_stride` apart */
    const uint32_t *panels;
    const float *bias;       /* one per output, padded to whole panels; or NULL */
    const float *scales;     /* INT8, W8A8: one per output, padded to whole panels */
    void *outputs;           /* [num_rows, num_outputs], bf16; FLOATS, WIDENED: float */
    float *scratch;          /* rows x num_inputs, and for kinds with groups rows x groups more; W8A8: CHUNK_ROWS +
                                rows x 2 x num_inputs / 4, with tiles CHUNK_ROWS + rows x 16 x num_inputs / 64; for at
                                most CHUNK_ROWS rows. PAIRS, and kinds with groups on CPUs with an instruction for
                                pairs or tiles: none */
    uint64_t input_stride, num_rows, num_inputs;
    uint64_t num_outputs;    /* SILU_MUL, GELU_MUL: half of the weights' outputs, in which gate and up alternate by
                                vectors */
    uint64_t num_panels;
    uint64_t group;          /* GROUPS4, GROUPS8, FP8: inputs that share a scale: a multiple of 16, divides num_inputs */
    int32_t kind, epilogue, num_threads;
    int32_t has_offsets;     /* GROUPS4, GROUPS8 */
    int32_t has_halves;      /* kinds with groups: scales and offsets are float16, not float32 */
    int32_t uses_tiles;      /* all kinds except BF16 and INT8: compute with tile instructions */
};

/* The activation of a gate x: x / (1 + e^-x), or GELU by its approximation with tanh, which is x / (1 + e^-2u). */
INLINE vfloat activated(vfloat x, int epilogue)
{
    const vfloat exponent = epilogue == GELU_MUL ? x * (1.5957691216f + 0.07135481627f * x * x) : x;
    /* At least -80, because the divisor of quotient() must be below 1e38. */
    return quotient(x, 1.0f + exp_of(-larger(exponent, splat(-80.0f))));
}

INLINE void store_outputs(const struct linear *l, uint64_t at, vfloat values, uint64_t num)
{
    if (l->epilogue == WIDENED)
        values = widened(narrowed(values));
    if (l->epilogue >= FLOATS)
        memcpy((float *)l->outputs + at, &values, MIN(num, LANES) * sizeof(float));
    else if (num >= LANES)
        store_bf16((bf16 *)l->outputs + at, values);
    else
        store_bf16_first((bf16 *)l->outputs + at, values, num);
}

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
    if (l->epilogue == SILU_MUL || l->epilogue == GELU_MUL) {
        num_values = nv / 2;
        for (int v = 0; v < num_values; v++)
            values[v] = activated(values[2 * v], l->epilogue) * values[2 * v + 1];
    }
    for (int v = 0; v < num_values; v++) {
        uint64_t first = (panel * num_values + v) * LANES;
        if (first >= l->num_outputs)
            break;
        store_outputs(l, row * l->num_outputs + first, values[v], l->num_outputs - first);
    }
}

/* Fetch the memory of the outputs of a tile before its sums are computed. Rows of outputs may be far apart, and stores
 * would wait for each. */
INLINE void fetch_outputs(const struct linear *l, int nv, int rows, int panels, uint64_t row, uint64_t panel)
{
    const uint64_t bytes = l->epilogue >= FLOATS ? sizeof(float) : sizeof(bf16);
    const uint64_t a_panel = LANES * bytes * (uint64_t)(l->epilogue == SILU_MUL || l->epilogue == GELU_MUL ? nv / 2 : nv);
    const char *at = (const char *)l->outputs + row * l->num_outputs * bytes + panel * a_panel;
    for (int r = 0; r < rows; r++, at += l->num_outputs * bytes)
        for (uint64_t line = 0; line < (uint64_t)panels * a_panel; line += 64)
            __builtin_prefetch(at + line, 1);
}

/* Whether `finish_simple` may convert the sums of panels [.., end). */
INLINE int is_simple(const struct linear *l, int nv, uint64_t end)
{
    const uint64_t num_values = (uint64_t)(l->epilogue == SILU_MUL ? nv / 2 : nv);
    return !l->scales && !l->bias && l->epilogue <= SILU_MUL && end * num_values * LANES <= l->num_outputs;
}

/* Outputs of a row over one panel, for `finish_simple`; or NULL. */
INLINE bf16 *simple_outputs(const struct linear *l, int nv, uint64_t row, uint64_t panel)
{
    if (!is_simple(l, nv, panel + 1))
        return NULL;
    const uint64_t num_values = (uint64_t)(l->epilogue == SILU_MUL ? nv / 2 : nv);
    return (bf16 *)l->outputs + row * l->num_outputs + panel * num_values * LANES;
}

/* Convert the sums of one row over one panel to outputs. */
INLINE void finish_simple(int is_gated, int nv, bf16 *to, const vfloat *sums)
{
    if (is_gated)
        for (int v = 0; v < nv / 2; v++)
            store_bf16(to + v * LANES, activated(sums[2 * v], SILU_MUL) * sums[2 * v + 1]);
    else
        for (int v = 0; v < nv; v++)
            store_bf16(to + v * LANES, sums[v]);
}

/* Convert the sums of a tile to outputs. `sums`: [panels, rows, nv]. */
INLINE void finish_tile(const struct linear *l, int nv, int rows, int panels, uint64_t row, uint64_t panel,
                        const vfloat *sums)
{
    /* A copy, because the compiler assumes that outputs may overlap what `l` points to. */
    const struct linear own = *l;
    const int is_gated = own.epilogue == SILU_MUL, num_values = is_gated ? nv / 2 : nv;
    const int simple = is_simple(&own, nv, panel + (uint64_t)panels);
    bf16 *to = (bf16 *)own.outputs + row * own.num_outputs + panel * (uint64_t)num_values * LANES;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++, to += own.num_outputs)
#pragma GCC unroll 8
        for (int p = 0; p < panels; p++) {
            const vfloat *from = sums + (p * rows + r) * nv;
            if (simple)
                finish_simple(is_gated, nv, to + p * num_values * LANES, from);
            else
                finish(&own, nv, row + (uint64_t)r, panel + (uint64_t)p, from);
        }
}

/* Vector `v` of the weights of one input in a panel of 16-bit numbers. */
INLINE vfloat from_panel(const uint32_t *w, int v)
{
#if defined(FLOAT16)
    return load_bf16((const bf16 *)w + v * LANES);
#else
    return v ? high_of(load_words(w)) : low_of(load_words(w));
#endif
}

/* Rows per tile: as many as fit, in tiles of similar size. Eight rows are faster as four and four than as six and
 * two. */
INLINE int alike_rows(const struct linear *l, int most)
{
    if (l->num_rows >= 8 * (uint64_t)most)
        return most;
    const int rows = (int)l->num_rows, tiles = (rows + most - 1) / most;
    return (rows + tiles - 1) / tiles;
}

/* CASE(rows) for each number of rows that a tile of two or four vectors of outputs may have, or one of few rows
 * (FEW_ROWS): a switch or a table over these has every tile compiled for its number of rows.
 */
#define TILES_UP_TO_3(CASE) CASE(1) CASE(2) CASE(3)
#define TILES_UP_TO_4(CASE) TILES_UP_TO_3(CASE) CASE(4)
#define TILES_UP_TO_6(CASE) TILES_UP_TO_4(CASE) CASE(5) CASE(6)
#define TILES_UP_TO_8(CASE) TILES_UP_TO_6(CASE) CASE(7) CASE(8)
#define TILES_UP_TO_12(CASE) TILES_UP_TO_8(CASE) CASE(9) CASE(10) CASE(11) CASE(12)
#if SUMS > 12
#define TILES_OF_TWO_VECTORS TILES_UP_TO_12
#define TILES_OF_FOUR_VECTORS TILES_UP_TO_6
#define TILES_OF_FEW_ROWS TILES_UP_TO_8
#else
#define TILES_OF_TWO_VECTORS TILES_UP_TO_6
#define TILES_OF_FOUR_VECTORS TILES_UP_TO_3
#define TILES_OF_FEW_ROWS TILES_UP_TO_4
#endif

/* Rows that tile registers hold at once. */
#define TILED_ROWS 32

/* Tasks per thread: if a thread loses its core for a while, the other threads compute its remaining tasks. */
#define SHARES 4
/* Maximum number of multiplications in a task, some 30 to 100 microseconds. After a task a thread can give its core
 * back, and threads wait for the last one. */
#define TASK_PRODUCTS (1 << 23)
/* The same for tile instructions: 90 microseconds at their peak, in practice 200 to 300. */
#define TILED_PRODUCTS (1 << 27)
/* The panels of a task are a multiple of this number if there are one or two rows that need adjacent panels. */
#define GROUP 4

/* Panels in a task of `rows` rows: all panels in `num_tasks` tasks, but at most TASK_PRODUCTS
 * multiplications each, with tiles TILED_PRODUCTS. */
INLINE uint64_t panels_a_task(const struct linear *l, uint64_t rows, uint64_t outputs_a_panel, uint64_t num_tasks)
{
    const uint64_t equal = parts_of(l->num_panels, num_tasks);
    const uint64_t products = l->uses_tiles ? TILED_PRODUCTS : TASK_PRODUCTS;
    /* The rows of a task are rounded up to TILED_ROWS. A single row of quantized weights uses no tiles. */
    const uint64_t group = (l->kind >= GROUPS4 ? MIN(rows, l->num_rows) : rows) > 2 ? 1 : GROUP;
    const uint64_t most = products / (rows * l->num_inputs * outputs_a_panel);
    return MAX(1, (MIN(equal, most) + group - 1) / group) * group;
}

/* Rows of the chunk that begins at row `chunk`. */
INLINE uint64_t chunk_rows(const struct linear *l, uint64_t chunk)
{
    return MIN((uint64_t)CHUNK_ROWS, l->num_rows - chunk);
}

/* Kinds that convert activations have two phases per chunk of rows: rows are converted, then multiplied. */
INLINE uint64_t chunk_phases(const void *args)
{
    return 2 * parts_of(((const struct linear *)args)->num_rows, CHUNK_ROWS);
}

/* Panels in a task that multiplies a chunk of `rows` rows. */
INLINE uint64_t chunk_panels(const struct linear *l, uint64_t rows, uint64_t outputs_a_panel)
{
    return panels_a_task(l, rows, outputs_a_panel, (uint64_t)l->num_threads * SHARES);
}

/* Tasks of such a phase. `step`: rows of a tile. */
INLINE uint64_t chunk_tasks(const struct linear *l, uint64_t phase, uint64_t step, uint64_t outputs_a_panel)
{
    const uint64_t rows = chunk_rows(l, phase / 2 * CHUNK_ROWS);
    if (phase % 2)
        return parts_of(l->num_panels, chunk_panels(l, rows, outputs_a_panel));
    return tasks_for(parts_of(rows, step), step * l->num_inputs);
}

/* A task of PAIRS, and of the kinds with groups on CPUs with pairs or tiles: some rows, which stay in the cache, against
 * some panels. */
struct division {
    uint64_t step, rows, panels, num_row_parts;
};

INLINE struct division divide(const struct linear *l)
{
    const uint64_t step = l->uses_tiles ? TILED_ROWS : (uint64_t)alike_rows(l, SUMS / 2);
    const uint64_t words = l->uses_tiles ? TILED_WORDS : BLOCK_WORDS;
    const uint64_t block = MAX(step, words / ((l->num_inputs + 1) / 2) / step * step);
    /* Parts of similar size. */
    const uint64_t parts = parts_of(l->num_rows, block);
    const uint64_t rows = parts_of(parts_of(l->num_rows, parts), step) * step;
    const uint64_t num_row_parts = parts_of(l->num_rows, rows);
    const uint64_t most = parts_of((uint64_t)l->num_threads * SHARES, num_row_parts);
    return (struct division){step, rows, panels_a_task(l, rows, 2 * LANES, most), num_row_parts};
}

/* These kinds have one phase. */
INLINE uint64_t divided_phases(const void *args)
{
    return ((const struct linear *)args)->num_rows ? 1 : 0;
}

INLINE uint64_t divided_tasks(const void *args, uint64_t phase)
{
    const struct linear *l = args;
    const struct division d = divide(l);
    (void)phase;
    return d.num_row_parts * parts_of(l->num_panels, d.panels);
}

/* The part of a task: rows [first, last) against panels [begin, end). Tasks with the same panels follow each other. */
struct part {
    uint64_t first, last, begin, end, step;
};

INLINE struct part part_of_task(const struct linear *l, uint64_t task)
{
    const struct division d = divide(l);
    const uint64_t row = task % d.num_row_parts * d.rows, panel = task / d.num_row_parts * d.panels;
    return (struct part){row, MIN(l->num_rows, row + d.rows), panel, MIN(l->num_panels, panel + d.panels), d.step};
}

/* Rows for tile instructions. */
struct tiled_rows {
    const void *rows;    /* inputs: bfloat16, for W8A8 int8 */
    const float *scales; /* W8A8: one per row */
    uint64_t stride;     /* of rows, in bytes */
    uint64_t row;        /* number of the first row in the outputs */
    uint64_t num_rows;
};

/* Multiply rows, which stay in the cache, with panels [begin, end). */
void multiply_tiles(const struct linear *l, const struct tiled_rows *rows, uint64_t begin, uint64_t end);
/* Multiply one part of a layer of a kind with groups. */
void multiply_tiled_groups(const struct linear *l, const struct part *p);

/* Rows that float_groups.c multiplies with codes as they are read. Codes need registers, so tiles have fewer rows. */
#define FEW_ROWS (2 * SUMS / 3)

/* Rows converted to float32, tile after tile, and within a tile input after input. */
struct float_rows {
    const float *inputs;
    const float *sums;  /* of the activations of each group: [num_rows, groups] */
    uint64_t row;       /* number of the first row in the outputs */
    int num_rows, step; /* step: rows of a tile */
};

/* Multiply rows with panels [begin, end) of a kind with groups. */
void multiply_float_groups(const struct linear *l, const struct float_rows *rows, uint64_t begin, uint64_t end);
/* Memory of this thread, for expanded panels. Aborts the process if there is none. */
uint32_t *memory_of_thread(size_t bytes);

/* The kernels of W8A8, of PAIRS, and of the kinds with groups on CPUs with pairs or tiles. linear.c has the others, and
 * calls these. */
extern const struct kernel linear_kernel, w8a8_kernel, pairs_kernel, groups_kernel;

#endif
