/* Attention over paged latents, one row per token that is key and value of all heads: the first numbers of a row are
 * the value. For single new tokens and for prompts.
 *
 * 1. A unit of work is some consecutive rows of a request: new tokens, and within each token its heads; at most ROWS.
 * 2. Rows are in the lanes of vectors, TILE of them at a time, so that keys are read in place, and softmax of a row
 *    stays in its lane.
 * 3. Keys are processed block by block, and parts are joined (attend.h). If units are few, threads compute parts of the
 *    same unit.
 *
 * So a row's result depends on its own query and keys only: not on other rows, the step's chunk, or threads.
 */
#include "attend.h"
#include "pool.h"

#define ROWS 96
#define VECTORS 2
#define TILE (VECTORS * LANES)
#define TILES ((ROWS + TILE - 1) / TILE)
/* Sums that fit the registers. */
#define WIDE 16
/* splitserve/engine/attention/latents.py rejects larger ones. */
#define MAX_SIZE 576
#define MAX_VALUE_SIZE 512

/* The same structure for ctypes: splitserve/engine/kernels/library.py. */
struct latent_attention {
    const bf16 *queries;    /* [tokens, num_heads, size] */
    const bf16 *latents;    /* [pages, page_size, size] */
    bf16 *outputs;          /* [tokens, num_heads, value_size] */
    float *partials;        /* [num_items, TILES] struct sums; NULL: a unit's parts are computed by one thread */
    const int64_t *pages;   /* [requests, pages_stride] */
    const int64_t *units;   /* [num_units, 4]: request, position and index of its first new token, first row */
    const int64_t *sizes;   /* [num_units]: rows */
    const int64_t *items;   /* [num_items, 2]: unit, part; a unit's parts are adjacent and in order */
    const int64_t *firsts;  /* [num_units + 1]: a unit's first item */
    uint64_t pages_stride, num_units, num_items, num_heads, size, value_size, page_size;
    float scale;
    int32_t num_threads;
};

/* Weighted sums of a tile's rows, before the division by the sum of the weights. */
struct sums {
    float values[MAX_VALUE_SIZE * TILE]; /* [value_size, VECTORS, LANES] */
    float most[TILE], weight[TILE];
};

struct tile {
    uint32_t queries[MAX_SIZE / 2 * TILE]; /* [size / 2, VECTORS, LANES]: two numbers of each row */
    int32_t positions[TILE];
    struct sums part, total;
};

struct state {
    struct tile tiles[TILES];
    const bf16 *keys[BLOCK];
    float scores[BLOCK * TILE];              /* [BLOCK, VECTORS, LANES] */
    uint32_t weights[BLOCK / 2 * TILE];      /* [BLOCK / 2, VECTORS, LANES]: of two consecutive keys */
    uint32_t pairs[BLOCK / 2 * MAX_VALUE_SIZE]; /* [BLOCK / 2, value_size]: the values of the same two keys */
};

struct unit {
    const int64_t *pages;
    uint64_t position, token, row, num_rows;
};

static struct unit unit_of(const struct latent_attention *a, uint64_t number)
{
    const int64_t *u = a->units + 4 * number;
    return (struct unit){a->pages + u[0] * a->pages_stride, u[1], u[2], u[3], (uint64_t)a->sizes[number]};
}

static uint64_t num_tiles(const struct unit *u)
{
    return (u->num_rows + TILE - 1) / TILE;
}

/* Vectors of a tile with rows in them. */
static int num_vectors(const struct unit *u, uint64_t tile)
{
    return u->num_rows - tile * TILE > LANES ? VECTORS : 1;
}

static uint64_t last_position(const struct latent_attention *a, const struct unit *u)
{
    return u->position + (u->row + u->num_rows - 1) / a->num_heads;
}

static void clear(const struct latent_attention *a, struct sums *s)
{
    memset(s->values, 0, a->value_size * TILE * sizeof(float));
    for (int lane = 0; lane < TILE; lane++) {
        s->most[lane] = NONE;
        s->weight[lane] = 0.0f;
    }
}

static void begin_tile(const struct latent_attention *a, const struct unit *u, struct tile *t, uint64_t first)
{
    for (uint64_t lane = 0; lane < TILE; lane++) {
        /* Lanes beyond the last row repeat it; their results are not used. */
        const uint64_t row = u->row + MIN(first + lane, u->num_rows - 1);
        const bf16 *q = a->queries + (u->token * a->num_heads + row) * a->size;
        for (uint64_t d = 0; d < a->size / 2; d++)
            memcpy(t->queries + d * TILE + lane, q + 2 * d, sizeof(uint32_t));
        t->positions[lane] = (int32_t)(u->position + row / a->num_heads);
    }
}

static void find(const struct latent_attention *a, struct state *s, const struct unit *u, uint64_t first, uint64_t n)
{
    const int64_t *page = u->pages + first / a->page_size;
    uint64_t place = first % a->page_size;
    for (uint64_t i = 0; i < n; i++) {
        s->keys[i] = a->latents + ((uint64_t)*page * a->page_size + place) * a->size;
        if (++place == a->page_size) {
            place = 0;
            page++;
        }
    }
}

/* Values in pairs; the second is zero if it is missing. */
static void pair_values(const struct latent_attention *a, struct state *s, uint64_t n)
{
    static const bf16 zeros[MAX_VALUE_SIZE];
    for (uint64_t i = 0; i < n; i += 2)
        for (uint64_t d = 0; d < a->value_size; d += LANES) {
            vuint both;
            pair_up(s->keys[i] + d, i + 1 < n ? s->keys[i + 1] + d : zeros, 1, &both);
            memcpy(s->pairs + i / 2 * a->value_size + d, &both, sizeof both);
        }
}

/* Score WIDE / nv keys against nv vectors of rows; nv is known to the compiler. */
INLINE void score_keys(const struct latent_attention *a, int nv, const uint32_t *queries, const bf16 *const *keys,
                       float *scores)
{
    vfloat sums[WIDE];
#pragma GCC unroll 16
    for (int i = 0; i < WIDE; i++)
        sums[i] = (vfloat){0};
    for (uint64_t d = 0; d < a->size / 2; d++) {
        vuint q[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++)
            memcpy(&q[v], queries + d * TILE + v * LANES, sizeof q[v]);
#pragma GCC unroll 16
        for (int i = 0; i < WIDE / nv; i++) {
            const vuint key = splat_pair(keys[i] + 2 * d);
#pragma GCC unroll 2
            for (int v = 0; v < nv; v++)
                sums[i * nv + v] = add_products(sums[i * nv + v], q[v], key);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDE; i++)
        store(scores + i / nv * TILE + i % nv * LANES, sums[i] * (a->scale * LOG2_E));
}

INLINE void score(const struct latent_attention *a, int nv, struct state *s, const struct tile *t, uint64_t n)
{
    const uint64_t step = WIDE / nv;
    for (uint64_t i = 0; i < n; i += step) {
        const bf16 *keys[WIDE];
        /* Repeat the last key in place of missing ones: their scores are never read. */
        for (uint64_t j = 0; j < step; j++)
            keys[j] = s->keys[MIN(i + j, n - 1)];
        score_keys(a, nv, t->queries, keys, s->scores + i * TILE);
    }
}

/* Convert scores to weights, as pairs of bfloat16. `before`: factor of earlier sums under the new maximum. */
static void weigh(struct sums *sums, int nv, struct state *s, uint64_t n, vfloat *before)
{
    for (int v = 0; v < nv; v++) {
        const float *scores = s->scores + v * LANES;
        const vfloat old = load(sums->most + v * LANES);
        vfloat most = old;
        for (uint64_t i = 0; i < n; i++)
            most = larger(most, load(scores + i * TILE));
        store(sums->most + v * LANES, most);
        before[v] = factor_of(old, most);
        const vfloat shift = shift_of(most);
        vfloat sum = load(sums->weight + v * LANES) * before[v];
        for (uint64_t i = 0; i < n; i += 2) {
            const vfloat first = exp2_of(load(scores + i * TILE) - shift);
            const vfloat second = i + 1 < n ? exp2_of(load(scores + (i + 1) * TILE) - shift) : (vfloat){0};
            const vuint both = pair_of(first, second);
            sum += first + second;
            memcpy(s->weights + i / 2 * TILE + v * LANES, &both, sizeof both);
        }
        store(sums->weight + v * LANES, sum);
    }
}

/* Add weighted values to WIDE / nv numbers of each row's sum. */
INLINE void add_values(const struct latent_attention *a, int nv, const struct state *s, float *at, uint64_t d,
                       uint64_t n, const vfloat *before)
{
    vfloat sums[WIDE];
#pragma GCC unroll 16
    for (int i = 0; i < WIDE; i++)
        sums[i] = load(at + i / nv * TILE + i % nv * LANES) * before[i % nv];
    for (uint64_t i = 0; i < n; i += 2) {
        vuint weights[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++)
            memcpy(&weights[v], s->weights + i / 2 * TILE + v * LANES, sizeof weights[v]);
        const uint32_t *values = s->pairs + i / 2 * a->value_size + d;
#pragma GCC unroll 16
        for (int j = 0; j < WIDE / nv; j++) {
            const vuint value = splat_word(values[j]);
#pragma GCC unroll 2
            for (int v = 0; v < nv; v++)
                sums[j * nv + v] = add_products(sums[j * nv + v], weights[v], value);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDE; i++)
        store(at + i / nv * TILE + i % nv * LANES, sums[i]);
}

/* A block of n keys for nv vectors of a tile. */
INLINE void work_block(const struct latent_attention *a, int nv, struct state *s, struct tile *t, uint64_t first,
                       uint64_t n)
{
    score(a, nv, s, t, n);
    if (first + n - 1 > (uint64_t)t->positions[0])
        hide(t->positions, nv, 0, s->scores, TILE, first, n);
    vfloat before[VECTORS];
    weigh(&t->part, nv, s, n, before);
    for (uint64_t d = 0; d < a->value_size; d += WIDE / nv)
        add_values(a, nv, s, t->part.values + d * TILE, d, n, before);
}

/* Fill `part` of each tile of the unit. */
static void work_part(const struct latent_attention *a, struct state *s, const struct unit *u, uint64_t part)
{
    const uint64_t end = MIN((part + 1) * PART, last_position(a, u) + 1);
    for (uint64_t i = 0; i < num_tiles(u); i++)
        clear(a, &s->tiles[i].part);
    for (uint64_t first = part * PART; first < end; first += BLOCK) {
        const uint64_t n = MIN((uint64_t)BLOCK, end - first);
        find(a, s, u, first, n);
        pair_values(a, s, n);
        for (uint64_t i = 0; i < num_tiles(u); i++)
            if (num_vectors(u, i) == 1)
                work_block(a, 1, s, s->tiles + i, first, n);
            else
                work_block(a, VECTORS, s, s->tiles + i, first, n);
    }
}

/* Add a part to the parts before it. */
static void join(const struct latent_attention *a, int nv, struct sums *total, const struct sums *part)
{
    for (int v = 0; v < nv; v++) {
        const int lane = v * LANES;
        struct joined all = {load(total->most + lane), load(total->weight + lane)};
        vfloat before, after;
        join_part(&all, load(part->most + lane), load(part->weight + lane), &before, &after);
        store(total->most + lane, all.most);
        store(total->weight + lane, all.weight);
        for (uint64_t d = 0; d < a->value_size; d++) {
            float *at = total->values + d * TILE + lane;
            store(at, fused(load(at), before, load(part->values + d * TILE + lane) * after));
        }
    }
}

static void end_tile(const struct latent_attention *a, const struct unit *u, const struct sums *total, uint64_t first)
{
    for (uint64_t lane = 0; lane < TILE && first + lane < u->num_rows; lane++) {
        bf16 *out = a->outputs + (u->token * a->num_heads + u->row + first + lane) * a->value_size;
        const float factor = 1.0f / total->weight[lane];
        for (uint64_t d = 0; d < a->value_size; d += LANES) {
            float values[LANES];
            for (uint64_t i = 0; i < LANES; i++)
                values[i] = total->values[(d + i) * TILE + lane];
            store_bf16(out + d, load(values) * factor);
        }
    }
}

/* All parts of a unit. */
static void work_unit(const struct latent_attention *a, struct state *s, uint64_t number)
{
    const struct unit u = unit_of(a, number);
    for (uint64_t i = 0; i < num_tiles(&u); i++) {
        begin_tile(a, &u, s->tiles + i, i * TILE);
        clear(a, &s->tiles[i].total);
    }
    for (int64_t item = a->firsts[number]; item < a->firsts[number + 1]; item++) {
        work_part(a, s, &u, (uint64_t)a->items[2 * item + 1]);
        for (uint64_t i = 0; i < num_tiles(&u); i++)
            join(a, num_vectors(&u, i), &s->tiles[i].total, &s->tiles[i].part);
    }
    for (uint64_t i = 0; i < num_tiles(&u); i++)
        end_tile(a, &u, &s->tiles[i].total, i * TILE);
}

static void work_item(const struct latent_attention *a, struct state *s, uint64_t item)
{
    const struct unit u = unit_of(a, (uint64_t)a->items[2 * item]);
    struct sums *partials = (struct sums *)a->partials + item * TILES;
    for (uint64_t i = 0; i < num_tiles(&u); i++)
        begin_tile(a, &u, s->tiles + i, i * TILE);
    work_part(a, s, &u, (uint64_t)a->items[2 * item + 1]);
    for (uint64_t i = 0; i < num_tiles(&u); i++)
        memcpy(partials + i, &s->tiles[i].part, sizeof(struct sums));
}

static void join_unit(const struct latent_attention *a, struct state *s, uint64_t number)
{
    const struct unit u = unit_of(a, number);
    for (uint64_t i = 0; i < num_tiles(&u); i++) {
        struct sums *total = &s->tiles[i].total;
        clear(a, total);
        for (int64_t item = a->firsts[number]; item < a->firsts[number + 1]; item++)
            join(a, num_vectors(&u, i), total, (const struct sums *)a->partials + item * TILES + i);
        end_tile(a, &u, total, i * TILE);
    }
}

static uint64_t num_phases(const void *args)
{
    return ((const struct latent_attention *)args)->partials ? 2 : 1;
}

static uint64_t num_tasks(const void *args, uint64_t phase)
{
    const struct latent_attention *a = args;
    return a->partials && !phase ? a->num_items : a->num_units;
}

static void run(const void *args, uint64_t phase, uint64_t task)
{
    const struct latent_attention *a = args;
    struct state s;
    if (!a->partials)
        work_unit(a, &s, task);
    else if (!phase)
        work_item(a, &s, task);
    else
        join_unit(a, &s, task);
}

static const struct kernel kernel = {num_phases, num_tasks, run};

void latent_attention(const struct latent_attention *a)
{
    run_kernel(&kernel, a, (uint64_t)a->num_threads);
}

/* Rows of a unit, keys of a part, and floats of a unit's partial sums. */
uint64_t latent_rows(void)
{
    return ROWS;
}

uint64_t latent_part(void)
{
    return PART;
}

uint64_t latent_partials(void)
{
    return TILES * sizeof(struct sums) / sizeof(float);
}
