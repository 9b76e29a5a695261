/* Linear layers over quantized weights (codes.h) on CPUs without an instruction for pairs of bfloat16.
 *
 * Activations are float32 (linear.c). Codes of 4 bits become float32 as they are, so the sum of a group begins with
 * minus what the code of zero adds to it. Codes of 8 bits become signed: long groups would lose digits by such a first
 * sum. Few rows are multiplied with codes as they are read. For more rows, a block at a time, the codes of a panel are
 * expanded once to bfloat16, which holds them exactly.
 *
 * The sum of a group is multiplied by its scale, and the group's sum of activations by its offset. All sums are
 * float32, in one order, whatever the number of rows and threads: the result of a row depends on that row only.
 */
#include "codes.h"

#if !HAS_PAIRS

/* Adjacent panels for one row. One to four are as fast. */
#define ROW_PANELS 2

/* Addresses of a tile's operands. */
struct tile_operands {
    const uint32_t *panel;    /* codes and factors */
    const uint32_t *expanded; /* codes of the panel as bfloat16, or NULL */
    const float *inputs;      /* [num_inputs, rows] */
    const float *row_sums;    /* sums of the activations of each group: [rows, groups] */
    uint64_t row, panel_number; /* of the first row and panel in the outputs */
};

/* The codes of input `i` of each word, as floats; those of 8 bits minus 128. */
INLINE vfloat codes_at(vuint words, int kind, int i)
{
    const int shift = i % 2 * 16 + i / 2 * (kind == GROUPS4 ? 4 : 8);
    if (kind == FP8)
        return from_e4m3(words, shift);
    if (kind == GROUPS4)
        return from_nibble(words >> shift, 0.0f);
    return __builtin_convertvector((vint)((words ^ 0x80808080u) << (24 - shift)) >> 24, vfloat);
}

/* What `codes_at` returns for a weight that is 0 without its offset. */
INLINE float zero_code(const struct linear *l, int kind)
{
    return kind == FP8 ? 0.0f : zero_of(l, kind) - (kind == GROUPS8 ? 128.0f : 0.0f);
}

/* Add the products of `rows` rows with the weights of one input to their sums. */
INLINE void add_input(int rows, const float *activations, const vfloat *weights, vfloat *sums)
{
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        const vfloat activation = splat(activations[r]);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++)
            sums[r * VECTORS + v] = fused(weights[v], activation, sums[r * VECTORS + v]);
    }
}

/* Add the products of a group's inputs to the sums [panels, rows, VECTORS]. */
INLINE void add_codes(const struct linear *l, int kind, int rows, int panels, const uint32_t *w, uint64_t panel_words,
                      const float *a, vfloat *sums)
{
    const int inputs = (int)inputs_a_word(kind);
    const float *const end = a + l->group * (uint64_t)rows;
    for (; a < end; a += inputs * rows, w += VECTORS * LANES) {
        vuint codes[ROW_PANELS * VECTORS];
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) {
            const uint32_t *at = w + (uint64_t)p * panel_words;
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                codes[p * VECTORS + v] = load_words(at + v * LANES);
                __builtin_prefetch(at + v * LANES + AHEAD);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < inputs; i++)
#pragma GCC unroll 2
            for (int p = 0; p < panels; p++) {
                const vuint *of_panel = codes + p * VECTORS;
                const vfloat weights[VECTORS] = {codes_at(of_panel[0], kind, i), codes_at(of_panel[1], kind, i)};
                add_input(rows, a + i * rows, weights, sums + p * rows * VECTORS);
            }
    }
}

/* Add the products of a group's inputs with one expanded panel. */
INLINE void add_expanded(const struct linear *l, int rows, const uint32_t *w, const float *a, vfloat *sums)
{
    for (uint64_t k = 0; k < l->group; k++, w += LANES, a += rows) {
        const vfloat weights[VECTORS] = {from_panel(w, 0), from_panel(w, 1)};
        add_input(rows, a, weights, sums);
    }
}

/* `rows` rows against `panels` adjacent panels; both numbers are known to the compiler. */
INLINE void tile(const struct linear *l, int kind, int is_expanded, int rows, int panels, const struct tile_operands *o)
{
    const uint64_t stride = group_words(l, kind), panel_words = num_groups(l) * stride;
    const uint64_t code_words = l->group / inputs_a_word(kind) * VECTORS * LANES;
    const float zero = zero_code(l, kind);
    vfloat totals[SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * panels * VECTORS; i++)
        totals[i] = (vfloat){0};
    for (uint64_t g = 0; g < num_groups(l); g++) {
        const uint32_t *w = o->panel + g * stride;
        const float *row_sums = o->row_sums + g, *a = o->inputs + g * l->group * (uint64_t)rows;
        vfloat sums[SUMS];
#pragma GCC unroll 32
        for (int i = 0; i < rows * panels * VECTORS; i++)
            sums[i] = splat(zero == 0.0f ? 0.0f : -zero * row_sums[(uint64_t)(i / VECTORS % rows) * num_groups(l)]);
        if (is_expanded)
            add_expanded(l, rows, o->expanded + g * l->group * LANES, a, sums);
        else
            add_codes(l, kind, rows, panels, w, panel_words, a, sums);
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++)
            add_group(l, rows, w + (uint64_t)p * panel_words + code_words, row_sums, sums + p * rows * VECTORS,
                      totals + p * rows * VECTORS);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++)
            finish(l, VECTORS, o->row + (uint64_t)r, o->panel_number + (uint64_t)p, totals + (p * rows + r) * VECTORS);
}

typedef void tile_function(const struct linear *, const struct tile_operands *);

/* A function per tile: as one function they take GCC twice the time. Expanded panels are alike for all kinds. */
#define FUNCTION(name, rows, kind, is_expanded) \
    static __attribute__((noinline)) void name##rows(const struct linear *l, const struct tile_operands *o) \
    { \
        tile(l, kind, is_expanded, rows, 1, o); \
    }
#define FUNCTION4(rows) FUNCTION(tile4_, rows, GROUPS4, 0)
#define FUNCTION8(rows) FUNCTION(tile8_, rows, GROUPS8, 0)
#define FUNCTION_FP8(rows) FUNCTION(tile_fp8_, rows, FP8, 0)
#define FUNCTION_EXPANDED(rows) FUNCTION(expanded_tile_, rows, l->kind, 1)
TILES_OF_FEW_ROWS(FUNCTION4)
TILES_OF_FEW_ROWS(FUNCTION8)
TILES_OF_FEW_ROWS(FUNCTION_FP8)
TILES_OF_TWO_VECTORS(FUNCTION_EXPANDED)

/* Functions by their rows - 1. */
#define NAME4(rows) tile4_##rows,
#define NAME8(rows) tile8_##rows,
#define NAME_FP8(rows) tile_fp8_##rows,
#define NAME_EXPANDED(rows) expanded_tile_##rows,
static tile_function *const tiles4[] = {TILES_OF_FEW_ROWS(NAME4)};
static tile_function *const tiles8[] = {TILES_OF_FEW_ROWS(NAME8)};
static tile_function *const tiles_fp8[] = {TILES_OF_FEW_ROWS(NAME_FP8)};
static tile_function *const expanded_tiles[] = {TILES_OF_TWO_VECTORS(NAME_EXPANDED)};
_Static_assert(sizeof tiles4 / sizeof *tiles4 == FEW_ROWS / 2, "tile_rows() of few rows");
_Static_assert(sizeof expanded_tiles / sizeof *expanded_tiles == SUMS / 2, "tile_rows()");

/* Expand the codes of a panel to words [num_inputs, LANES], with the first vector of outputs in the low halves. */
INLINE void expand(const struct linear *l, int kind, const uint32_t *w, uint32_t *to)
{
    const int inputs = (int)inputs_a_word(kind);
    for (uint64_t g = 0; g < num_groups(l); g++, w += group_words(l, kind))
        for (uint64_t k = 0; k < l->group / (uint64_t)inputs; k++) {
            const vuint low = load_words(w + k * VECTORS * LANES), high = load_words(w + (k * VECTORS + 1) * LANES);
#pragma GCC unroll 8
            for (int i = 0; i < inputs; i++, to += LANES) {
                const vuint words = words_of(codes_at(low, kind, i), codes_at(high, kind, i));
                memcpy(to, &words, sizeof words);
            }
        }
}

/* Multiply rows [top, bottom) with one panel. */
INLINE void multiply_panel(const struct linear *l, int kind, const struct float_rows *rows, int top, int bottom,
                           uint64_t panel, uint32_t *memory)
{
    struct tile_operands o = {.panel = l->panels + panel * num_groups(l) * group_words(l, kind), .panel_number = panel};
    tile_function *const *tiles = kind == GROUPS4 ? tiles4 : kind == GROUPS8 ? tiles8 : tiles_fp8;
    if (memory) {
        tiles = expanded_tiles;
        expand(l, kind, o.panel, memory);
        o.expanded = memory;
    }
    for (int r = top; r < bottom; r += rows->step) {
        o.inputs = rows->inputs + (size_t)r * l->num_inputs;
        o.row_sums = rows->sums + (size_t)r * num_groups(l);
        o.row = rows->row + (uint64_t)r;
        tiles[MIN(rows->step, bottom - r) - 1](l, &o);
    }
}

INLINE void multiply(const struct linear *l, int kind, const struct float_rows *rows, uint64_t begin, uint64_t end)
{
    const uint64_t panel_words = num_groups(l) * group_words(l, kind);
    uint32_t *memory = NULL;
    if (rows->num_rows == 1) {
        struct tile_operands o = {NULL, NULL, rows->inputs, rows->sums, rows->row, begin};
        for (; o.panel_number + ROW_PANELS <= end; o.panel_number += ROW_PANELS) {
            o.panel = l->panels + o.panel_number * panel_words;
            tile(l, kind, 0, 1, ROW_PANELS, &o);
        }
        begin = o.panel_number;
    } else if (l->num_rows > FEW_ROWS) {
        memory = memory_of_thread(l->num_inputs * LANES * sizeof(uint32_t));
    }
    const int block = MAX(rows->step, (int)(BLOCK_WORDS / l->num_inputs) / rows->step * rows->step);
    for (int top = 0; top < rows->num_rows; top += block)
        for (uint64_t panel = begin; panel < end; panel++)
            multiply_panel(l, kind, rows, top, MIN(rows->num_rows, top + block), panel, memory);
}

void multiply_float_groups(const struct linear *l, const struct float_rows *rows, uint64_t begin, uint64_t end)
{
    if (l->kind == GROUPS4)
        multiply(l, GROUPS4, rows, begin, end);
    else if (l->kind == GROUPS8)
        multiply(l, GROUPS8, rows, begin, end);
    else
        multiply(l, FP8, rows, begin, end);
}

#else

/* Never called: groups.c or tiled_groups.c multiplies. */
void multiply_float_groups(const struct linear *l, const struct float_rows *rows, uint64_t begin, uint64_t end)
{
    (void)l, (void)rows, (void)begin, (void)end;
}

#endif
