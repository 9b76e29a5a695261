/* Linear layers over quantized weights (codes.h) by tile instructions (AMX), for any number of rows.
 *
 * The codes of a stretch of a panel are expanded to pairs of bfloat16 in the cache. Tiles multiply them group by group.
 * The sums of a group leave the tile registers, are multiplied by its scale, and are added to the totals of their rows
 * while the tiles multiply the next group.
 *
 * The order of all sums is fixed: within a group that of the instruction (tiles.c), then group after group. It depends
 * on the size of the group only, so the result of a row does not depend on the others.
 */
#include "codes.h"
#include "tiles.h"

#if HAS_TILES

#if defined(__SSE__)
#include <immintrin.h>
#else
/* Only over the instructions in C: subnormal results stay as they are. */
#define _MM_FLUSH_ZERO_ON 0
#define _mm_getcsr() 0
#define _mm_setcsr(control) ((void)(control))
#endif

/* Inputs that are expanded at a time for one block of rows, and for several: their words stay in the L1 cache. */
#define FEW_INPUTS 128
#define MANY_INPUTS 576

typedef vfloat block_sums[TILED_ROWS][VECTORS];

/* Sizes of groups and tiles, equal for all panels. */
struct layout {
    uint64_t num_groups, group_words, code_words; /* code_words: in front of the factors of a group */
    uint64_t tiles, tile_words;                   /* tiles in a group, words of inputs in a tile */
};

INLINE struct layout layout_of(const struct linear *l, int kind)
{
    /* All tiles of a group are whole. */
    const uint64_t tile_words = l->group % (2 * TILE_ROWS) ? TILE_ROWS / 2 : TILE_ROWS;
    return (struct layout){num_groups(l), group_words(l, kind), l->group / inputs_a_word(kind) * VECTORS * LANES,
                           l->group / 2 / tile_words, tile_words};
}

INLINE vuint as_words(vpair weights)
{
#if HAS_PAIRS
    return weights;
#else
    return words_of(weights.first, weights.second);
#endif
}

/* Expand the codes of tiles [first, last) of a panel to words [inputs / 2, VECTORS x LANES]. */
INLINE void expand(const struct linear *l, int kind, const struct layout *layout, const uint32_t *panel,
                   uint64_t first, uint64_t last, vuint *expanded)
{
    const int places = kind == GROUPS4 ? 4 : 2;
    const float zero = zero_of(l, kind);
    const vuint table = table_of(zero_of(l, GROUPS4), 1.0f);
    const uint64_t tile_codes = layout->code_words / layout->tiles;
    for (uint64_t t = first, g = first / layout->tiles; t < last; g++) {
        const uint64_t stop = MIN(last, (g + 1) * layout->tiles);
        const uint32_t *w = panel + g * layout->group_words + (t - g * layout->tiles) * tile_codes;
        for (const uint32_t *const end = w + (stop - t) * tile_codes; w < end; w += VECTORS * LANES) {
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                vuint words;
                memcpy(&words, w + v * LANES, sizeof words);
                __builtin_prefetch(w + AHEAD + v * LANES, 0, 2);
#pragma GCC unroll 4
                for (int place = 0; place < places; place++)
                    expanded[place * VECTORS + v] = as_words(pair_at(words, kind, place, table, zero));
            }
            expanded += places * VECTORS;
        }
        t = stop;
    }
}

/* Sums of a group, a block of rows and a panel that are not in the totals yet. They are added between the products of
 * the next group: tiles and vectors are computed at the same time. */
struct pending_group {
    const uint32_t *factors;
    vfloat (*totals)[VECTORS];
    const float *row_sums; /* of the rows of the block */
    uint64_t row, panel;
    int next, rows, is_first, is_last;
    /* Outputs of the next row, for `finish_simple`; or NULL. */
    bf16 *to;
};

/* The total of row `r` with its sum of the group. */
INLINE void add_row(const struct pending_group *p, const vfloat (*sums)[VECTORS], int r, int is_first, int has_offsets,
                    const vfloat *factors, vfloat *values)
{
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) {
        values[v] = fused(sums[r][v], factors[v], is_first ? splat(0.0f) : p->totals[r][v]);
        if (has_offsets)
            values[v] = fused(factors[VECTORS + v], splat(p->row_sums[r]), values[v]);
    }
}

INLINE void add_to_totals(const struct pending_group *p, const vfloat (*sums)[VECTORS], int end, int is_first,
                          int has_offsets, const vfloat *factors)
{
    vfloat(*const totals)[VECTORS] = p->totals;
    for (int r = p->next; r < end; r++)
        add_row(p, sums, r, is_first, has_offsets, factors, totals[r]);
}

/* Add the next `num` rows to the totals, and convert these to outputs if the group is the last one. */
INLINE void add_rows(const struct linear *l, struct pending_group *p, const vfloat (*sums)[VECTORS], int num)
{
    const int end = MIN(p->rows, p->next + num), has_offsets = l->has_offsets;
    if (p->next >= end)
        return;
    vfloat factors[2 * VECTORS], values[VECTORS];
    for (int v = 0; v < (has_offsets ? 2 : 1) * VECTORS; v++)
        factors[v] = factors_at(l, p->factors, v);
    if (p->is_last) {
        for (int r = p->next; r < end; r++) {
            add_row(p, sums, r, p->is_first, has_offsets, factors, values);
            if (!p->to) {
                finish(l, VECTORS, p->row + (uint64_t)r, p->panel, values);
                continue;
            }
            finish_simple(l->epilogue == SILU_MUL, VECTORS, p->to, values);
            p->to += l->num_outputs;
        }
    } else if (p->is_first && has_offsets) {
        add_to_totals(p, sums, end, 1, 1, factors);
    } else if (p->is_first) {
        add_to_totals(p, sums, end, 1, 0, factors);
    } else if (has_offsets) {
        add_to_totals(p, sums, end, 0, 1, factors);
    } else {
        add_to_totals(p, sums, end, 0, 0, factors);
    }
    p->next = end;
}

/* Sums of the activations of each group: [groups, rows]. */
INLINE void sum_rows(const struct linear *l, const struct part *part, uint64_t num_groups, float *sums)
{
    const uint64_t num_rows = part->last - part->first;
    float of_row[num_groups];
    for (uint64_t r = 0; r < num_rows; r++) {
        sum_groups(l, part->first + r, of_row);
        for (uint64_t g = 0; g < num_groups; g++)
            sums[g * num_rows + r] = of_row[g];
    }
}

/* Rows of a part, which stay in the cache, against its panels. `kind` is known to the compiler. */
INLINE void multiply(const struct linear *l, int kind, const struct part *part)
{
    const struct layout layout = layout_of(l, kind);
    const uint64_t num_rows = part->last - part->first, num_tiles = layout.num_groups * layout.tiles;
    const uint64_t most = num_rows > TILED_ROWS ? MANY_INPUTS : FEW_INPUTS, row_stride = l->input_stride;
    const uint64_t stretch = parts_of(num_tiles, parts_of(l->num_inputs, most));
    const uint64_t kept_blocks = stretch < num_tiles ? parts_of(num_rows, TILED_ROWS) : 1;
    const int share = (int)MAX(FINISHED_ROWS, parts_of(TILED_ROWS, layout.tiles));
    _Alignas(64) vuint expanded[stretch * layout.tile_words * VECTORS];
    /* totals: one per block if a stretch is shorter than a panel. unfinished: sums of a group that continues in the
     * next stretch. */
    _Alignas(64) block_sums totals[kept_blocks], unfinished[kept_blocks];
    _Alignas(64) block_sums sums;
    float row_sums[l->has_offsets ? num_rows * layout.num_groups : 1];
    if (l->has_offsets)
        sum_rows(l, part, layout.num_groups, row_sums);
    struct pending_group pending = {0};
    int shaped = 0;
    for (uint64_t panel = part->begin; panel < part->end; panel++)
        for (uint64_t first = 0; first < num_tiles; first += stretch) {
            const uint64_t last = MIN(num_tiles, first + stretch);
            const uint32_t *const words = l->panels + panel * layout.num_groups * layout.group_words;
            expand(l, kind, &layout, words, first, last, expanded);
            for (uint64_t row = 0; row < num_rows; row += TILED_ROWS) {
                const int rows = (int)MIN(TILED_ROWS, num_rows - row), both = rows > TILE_ROWS;
                const uint64_t kept = kept_blocks > 1 ? row / TILED_ROWS : 0;
                const bf16 *inputs = l->inputs + (part->first + row) * row_stride + 2 * first * layout.tile_words;
                const vuint *weights = expanded;
                if (rows != shaped)
                    shape_tiles(rows, (int)layout.tile_words);
                shaped = rows;
                uint64_t g = first / layout.tiles, left = (g + 1) * layout.tiles - first;
                if (left < layout.tiles)
                    load_sums(both, unfinished[kept]);
                for (uint64_t t = first; t < last; t++) {
                    if (left == layout.tiles)
                        zero_sums(both);
                    add_tiles(0, 1, both, inputs, row_stride * sizeof(bf16), weights);
                    inputs += 2 * layout.tile_words;
                    weights += layout.tile_words * VECTORS;
                    add_rows(l, &pending, sums, share);
                    if (--left)
                        continue;
                    add_rows(l, &pending, sums, TILED_ROWS);
                    store_sums(both, sums);
                    const int is_last = g + 1 == layout.num_groups;
                    pending = (struct pending_group){
                        .factors = words + g * layout.group_words + layout.code_words, .totals = totals[kept],
                        .row_sums = row_sums + (l->has_offsets ? g * num_rows + row : 0), .row = part->first + row,
                        .panel = panel, .rows = rows, .is_first = !g, .is_last = is_last,
                        .to = is_last ? simple_outputs(l, VECTORS, part->first + row, panel) : NULL};
                    g++;
                    left = layout.tiles;
                }
                if (left < layout.tiles)
                    store_sums(both, unfinished[kept]);
            }
        }
    add_rows(l, &pending, sums, TILED_ROWS);
    RELEASE_TILES();
}

/* One row against `panels` adjacent panels, without tiles but in the order of their sums: each tile adds the products
 * of even inputs, then those of odd inputs, then both sums to those of the group. `kind` and `panels` are known to the
 * compiler. inputs: no subnormal numbers. */
INLINE void row_tile(const struct linear *l, int kind, int panels, uint64_t row, uint64_t panel, const float *inputs,
                     const float *row_sums)
{
    const struct layout layout = layout_of(l, kind);
    const int num_sums = panels * VECTORS;
    const uint64_t places = kind == GROUPS4 ? 4 : 2;
    const uint64_t panel_words = layout.num_groups * layout.group_words;
    const uint32_t *w = l->panels + panel * panel_words;
    const float zero = zero_of(l, kind);
    vfloat totals[WIDE * VECTORS] = {0};
    for (uint64_t g = 0; g < layout.num_groups; g++, w += layout.group_words - layout.code_words) {
        vfloat sums[WIDE * VECTORS] = {0};
        for (uint64_t tile = 0; tile < layout.tiles; tile++) {
            vfloat even[WIDE * VECTORS] = {0}, odd[WIDE * VECTORS] = {0};
            for (uint64_t k = 0; k < layout.tile_words; k += places, w += VECTORS * LANES, inputs += 2 * places)
#pragma GCC unroll 8
                for (int i = 0; i < num_sums; i++) {
                    const uint32_t *const at = w + i / VECTORS * panel_words + i % VECTORS * LANES;
                    vuint words;
                    memcpy(&words, at, sizeof words);
                    __builtin_prefetch(at + AHEAD);
#pragma GCC unroll 4
                    for (uint64_t place = 0; place < places; place++) {
                        const vfloats weights = floats_at(words, kind, (int)place, zero);
                        even[i] = fused(weights.first, splat(inputs[2 * place]), even[i]);
                        odd[i] = fused(weights.second, splat(inputs[2 * place + 1]), odd[i]);
                    }
                }
#pragma GCC unroll 8
            for (int i = 0; i < num_sums; i++)
                sums[i] += even[i] + odd[i];
        }
#pragma GCC unroll 8
        for (int i = 0; i < num_sums; i++) {
            const uint32_t *const factors = w + i / VECTORS * panel_words;
            totals[i] = fused(sums[i], factors_at(l, factors, i % VECTORS), totals[i]);
            if (l->has_offsets)
                totals[i] = fused(factors_at(l, factors, VECTORS + i % VECTORS), splat(row_sums[g]), totals[i]);
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++)
        finish(l, VECTORS, row, panel + (uint64_t)p, totals + p * VECTORS);
}

/* One row against panels [begin, end). Memory limits it, so expanded weights are not stored. */
INLINE void multiply_row(const struct linear *l, int kind, uint64_t row, uint64_t begin, uint64_t end)
{
    float inputs[l->num_inputs], row_sums[num_groups(l)];
    for (uint64_t k = 0; k < l->num_inputs; k += LANES) {
        const vuint numbers = (vuint)load_bf16(l->inputs + row * l->input_stride + k);
        /* Tile instructions treat subnormal numbers as 0. */
        store(inputs + k, (vfloat)(numbers & ((vuint)((numbers & 0x7f800000) != 0) | 0x80000000)));
    }
    if (l->has_offsets)
        sum_groups(l, row, row_sums);
    for (; begin + WIDE <= end; begin += WIDE)
        row_tile(l, kind, WIDE, row, begin, inputs, row_sums);
    for (; begin < end; begin++)
        row_tile(l, kind, 1, row, begin, inputs, row_sums);
}

INLINE void multiply_part(const struct linear *l, int kind, const struct part *p)
{
    if (p->last - p->first == 1)
        multiply_row(l, kind, p->first, p->begin, p->end);
    else
        multiply(l, kind, p);
}

void multiply_tiled_groups(const struct linear *l, const struct part *p)
{
    /* Subnormal results become 0, as those of tile instructions do. */
    const unsigned int control = _mm_getcsr();
    _mm_setcsr(control | _MM_FLUSH_ZERO_ON);
    if (l->kind == GROUPS4)
        multiply_part(l, GROUPS4, p);
    else if (l->kind == GROUPS8)
        multiply_part(l, GROUPS8, p);
    else
        multiply_part(l, FP8, p);
    _mm_setcsr(control);
}

#else

/* Never called, because `uses_tiles` is not set without permission. */
void multiply_tiled_groups(const struct linear *l, const struct part *p)
{
    (void)l, (void)p;
}

#endif
