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

/* Bytes of each row that are multiplied with up to KEPT_PANELS panels before the next bytes. For TILED_ROWS rows they
 * stay in the L1 cache. Panels come from L2. */
#define STRETCH_BYTES 1280
/* Panels that are multiplied with one stretch of bytes before the next stretch. Their sums are kept. */
#define KEPT_PANELS 8
/* Bytes of panels between a product and the fetch of later ones, if there is one block of rows. */
#define FETCH_DISTANCE 4096

typedef uint32_t block_sums[TILED_ROWS][VECTORS * LANES];

struct block {
    const uint8_t *activations;
    const uint32_t *weights;
    uint64_t stride; /* of activations, in bytes */
    int rows;
};

/* Sums of a block of rows and a panel that are not outputs yet. They are converted between the products of the next
 * block, which is faster than after each block. */
struct pending_sums {
    const uint32_t (*sums)[VECTORS * LANES];
    uint64_t first, panel; /* first row, counted in struct tiled_rows; panel */
    int next, rows;
    /* Outputs of the next row, for `finish_simple`; or NULL. */
    bf16 *to;
};

/* Memory that is needed later: its next lines are fetched into the L2 cache with each product. */
struct ahead {
    const char *from, *end;
    uint64_t bytes; /* per product, whole lines */
};

/* `products`: their number until the memory is needed. */
INLINE struct ahead memory_ahead(const void *from, uint64_t bytes, uint64_t products)
{
    return (struct ahead){from, (const char *)from + bytes, parts_of(bytes, 64 * products) * 64};
}

INLINE void fetch(struct ahead *a)
{
    const char *const end = MIN(a->end, a->from + a->bytes);
    for (; a->from < end; a->from += 64)
        __builtin_prefetch(a->from, 0, 2);
}

/* Convert the next `num` rows. */
INLINE void finish_rows(int kind, const struct linear *l, const struct tiled_rows *t, struct pending_sums *w, int num)
{
    const int end = MIN(w->rows, w->next + num);
    for (; w->next < end; w->next++) {
        vfloat values[VECTORS];
        memcpy(values, w->sums[w->next], sizeof values);
        if (w->to) {
            finish_simple(l->epilogue == SILU_MUL, VECTORS, w->to, values);
            w->to += l->num_outputs;
            continue;
        }
        const uint64_t row = w->first + (uint64_t)w->next;
        if (kind == W8A8)
            for (int v = 0; v < VECTORS; v++)
                values[v] = __builtin_convertvector((vint)values[v], vfloat) * t->scales[row];
        finish(l, VECTORS, t->row + row, w->panel, values);
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
    add_tiles(kind != PAIRS, 0, b->rows > TILE_ROWS, activations, TILE_BYTES, weights[0]);
}

/* Add the products of bytes [begin, end) of the rows of a block. Meanwhile convert pending sums, and fetch both
 * memories `ahead`. */
INLINE void add_stretch(int kind, const struct linear *l, const struct tiled_rows *t, const struct block *b,
                        uint64_t begin, uint64_t end, struct pending_sums *w, struct ahead *ahead)
{
    const uint64_t whole = end / TILE_BYTES * TILE_BYTES;
    for (uint64_t byte = begin; byte < whole; byte += TILE_BYTES) {
        add_tiles(kind != PAIRS, 0, b->rows > TILE_ROWS, b->activations + byte, b->stride,
                  b->weights + byte / 4 * VECTORS * LANES);
        finish_rows(kind, l, t, w, FINISHED_ROWS);
        fetch(ahead);
        fetch(ahead + 1);
    }
    if (whole < end)
        add_last_words(kind, b, whole, end - whole);
    finish_rows(kind, l, t, w, TILED_ROWS);
}

INLINE struct pending_sums pending_sums_of(int kind, const struct linear *l, const struct tiled_rows *t,
                                           uint64_t first, uint64_t panel, int rows, const block_sums sums)
{
    struct pending_sums w = {sums, first, panel, 0, rows, NULL};
    if (kind == PAIRS)
        w.to = simple_outputs(l, VECTORS, t->row + first, panel);
    return w;
}

/* Panels to fetch during products. Up to 16 rows: none, because it was no faster. Up to 32 rows: FETCH_DISTANCE behind
 * the first panel, then in the order of memory, which is the order of use if a row is one stretch. More rows: the
 * panels of the next task of this thread, if threads take tasks in turn. */
INLINE struct ahead panels_ahead(const struct linear *l, const struct tiled_rows *t, uint64_t begin, uint64_t end,
                                 uint64_t panel_bytes, uint64_t products)
{
    const char *const panels = (const char *)l->panels;
    if (t->num_rows <= TILE_ROWS)
        return (struct ahead){0};
    if (t->num_rows <= TILED_ROWS)
        return (struct ahead){panels + begin * panel_bytes + FETCH_DISTANCE, panels + l->num_panels * panel_bytes,
                              TILE_ROWS * VECTORS * TILE_BYTES};
    /* Tasks with the same panels follow each other, and threads take them in turn. */
    const uint64_t tasks = MAX(1, (uint64_t)l->num_threads / parts_of(l->num_rows, t->num_rows));
    const uint64_t first = MIN(begin + tasks * (end - begin), l->num_panels);
    const uint64_t last = MIN(first + end - begin, l->num_panels);
    return memory_ahead(panels + first * panel_bytes, (last - first) * panel_bytes,
                        products * parts_of(t->num_rows, TILED_ROWS));
}

/* The next block of rows. */
INLINE struct ahead rows_ahead(const struct tiled_rows *t, uint64_t next, uint64_t products)
{
    const uint64_t num_rows = next < t->num_rows ? MIN(TILED_ROWS, t->num_rows - next) : 0;
    return memory_ahead((const char *)t->rows + next * t->stride, num_rows * t->stride, products);
}

INLINE void multiply(int kind, const struct linear *l, const struct tiled_rows *t, uint64_t begin, uint64_t end)
{
    const uint64_t row_bytes = l->num_inputs * (kind == PAIRS ? sizeof(bf16) : 1);
    const uint64_t panel_words = parts_of(row_bytes, 4) * VECTORS * LANES;
    /* Stretches of similar size. */
    const uint64_t stretch = parts_of(row_bytes, parts_of(row_bytes, STRETCH_BYTES) * TILE_BYTES) * TILE_BYTES;
    const uint64_t products = (end - begin) * parts_of(row_bytes, TILE_BYTES);
    struct ahead ahead[2] = {{0}, panels_ahead(l, t, begin, end, panel_words * sizeof(uint32_t), products)};
    _Alignas(64) block_sums sums[KEPT_PANELS];
    struct pending_sums w = {0};
    int shaped = 0;
    for (uint64_t first = 0; first < t->num_rows; first += TILED_ROWS) {
        const int rows = (int)MIN(TILED_ROWS, t->num_rows - first), both = rows > TILE_ROWS;
        ahead[0] = rows_ahead(t, first + TILED_ROWS, products);
        if (rows != shaped)
            shape_tiles(rows, TILE_WORDS);
        shaped = rows;
        for (uint64_t group = begin; group < end; group += KEPT_PANELS)
            for (uint64_t byte = 0; byte < row_bytes; byte += stretch)
                for (uint64_t panel = group; panel < MIN(end, group + KEPT_PANELS); panel++) {
                    const struct block b = {(const uint8_t *)t->rows + first * t->stride,
                                            l->panels + panel * panel_words, t->stride, rows};
                    block_sums *const own = sums + (stretch < row_bytes ? panel - group : 0);
                    const uint64_t stop = MIN(row_bytes, byte + stretch);
                    if (byte)
                        load_sums(both, *own);
                    else
                        zero_sums(both);
                    add_stretch(kind, l, t, &b, byte, stop, &w, ahead);
                    store_sums(both, *own);
                    if (stop == row_bytes)
                        w = pending_sums_of(kind, l, t, first, panel, rows, *own);
                }
    }
    finish_rows(kind, l, t, &w, TILED_ROWS);
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
