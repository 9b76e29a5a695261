/* Attention of a prompt's tokens, or of a chunk of them, over paged keys and values: limited by arithmetic.
 *
 * 1. A unit of work is some consecutive tokens under one KV head, for all query heads that share it: one row each, at
 *    most ROWS.
 * 2. Rows are in the lanes of vectors, TILE of them at a time, so that a key's next numbers are multiplied with those of
 *    all rows at once, and softmax of a row stays in its lane.
 * 3. Keys are processed block by block, and parts are joined (attend.h).
 * 4. Builds with an instruction for pairs multiply pairs, and read keys in place. Others convert a block to floats once
 *    for all rows of the unit, because their conversions take as long as their multiplications.
 *
 * A tile reads keys that some of its rows do not see; they change nothing for those rows. So a row does not depend on
 * the chunk it is in, on other requests, or on the number of threads.
 */
#include "operands.h"
#include "pool.h"

/* Rows per unit and per tile. */
#define ROWS 192
#define VECTORS 2
#define TILE (VECTORS * LANES)
#define TILES ((ROWS + TILE - 1) / TILE)
/* Keys, and elements of a value, with sums that fit the registers. */
#define WIDE (VECTOR_BYTES == 64 ? 8 : 4)

/* The same structure for ctypes: splitserve/engine/kernels/library.py. */
struct prompt_attention {
    const bf16 *queries;  /* [num_tokens, num_kv_heads x group, head_size], tokens `query_stride` apart */
    const bf16 *keys;     /* [pages, page_size, num_kv_heads, head_size] */
    const bf16 *values;   /* [pages, page_size, num_kv_heads, value_size] */
    bf16 *outputs;        /* [num_tokens, num_kv_heads x group, value_size] */
    const int64_t *pages; /* of this request */
    uint64_t query_stride, num_tokens;
    uint64_t start;       /* position of the first token */
    uint64_t window;      /* 0: none */
    uint64_t num_kv_heads, group, head_size, value_size, page_size;
    float scale, softcap; /* scale is positive; softcap 0: none */
    int32_t num_threads;
    int32_t uses_tiles;   /* compute with tile instructions (tile_attend.h) */
};

struct tile {
    /* [head_size / NUMBERS, VECTORS, LANES] */
    _Alignas(64) operand queries[MAX_HEAD_SIZE / NUMBERS * TILE];
    /* [value_size, VECTORS, LANES]: of the current part, and of the parts joined so far. */
    float sums[MAX_HEAD_SIZE * TILE], joined_sums[MAX_HEAD_SIZE * TILE];
    float most[TILE], weight[TILE];
    struct joined joined[VECTORS];
    int32_t positions[TILE];
};

struct state {
    struct tile tiles[TILES];
    const bf16 *keys[BLOCK], *values[BLOCK];
    /* [BLOCK, VECTORS, LANES] */
    _Alignas(64) float scores[BLOCK * TILE];
    /* [BLOCK / NUMBERS, VECTORS, LANES]: weights of consecutive keys. */
    _Alignas(64) operand weights[BLOCK / NUMBERS * TILE];
    /* [BLOCK / NUMBERS, value_size], with tiles [value_size, BLOCK / NUMBERS]: values of the same keys. */
    _Alignas(64) operand numbers[BLOCK / NUMBERS * MAX_HEAD_SIZE];
    struct key_tiles key_tiles;
#if NUMBERS == 1
    /* [BLOCK, head_size] */
    float keys_as_floats[BLOCK * MAX_HEAD_SIZE];
#endif
};

/* Operands of key `i` of the block. */
INLINE const void *key_of(const struct prompt_attention *a, const struct state *s, uint64_t i)
{
#if NUMBERS == 2
    (void)a;
    return s->keys[i];
#else
    return s->keys_as_floats + i * a->head_size;
#endif
}

struct unit {
    uint64_t head, token, num_rows;
};

static void begin_part(const struct prompt_attention *a, struct tile *t)
{
    for (uint64_t lane = 0; lane < TILE; lane++) {
        t->most[lane] = NONE;
        t->weight[lane] = 0.0f;
    }
    memset(t->sums, 0, a->value_size * TILE * sizeof(float));
}

/* Row `row` of a unit is token row / group under query head row % group. Lanes beyond the last row repeat it; their
 * results are not used. */
static void begin_tile(const struct prompt_attention *a, const struct unit *u, struct tile *t, uint64_t first)
{
    const uint64_t size = a->head_size / NUMBERS;
    for (uint64_t v = 0; v < VECTORS; v++) {
        const bf16 *queries[LANES];
        for (uint64_t lane = 0; lane < LANES; lane++) {
            const uint64_t row = MIN(first + v * LANES + lane, u->num_rows - 1), token = u->token + row / a->group;
            const uint64_t head = u->head * a->group + row % a->group;
            queries[lane] = a->queries + token * a->query_stride + head * a->head_size;
            t->positions[v * LANES + lane] = (int32_t)(a->start + token);
        }
        for (uint64_t d = 0; d < size; d += LANES) {
            vuint rows[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                rows[i] = (vuint)numbers_of(queries[i], d, MIN(LANES, size - d));
            transpose(rows);
            for (uint64_t i = 0; i < MIN(LANES, size - d); i++)
                memcpy(t->queries + (d + i) * TILE + v * LANES, &rows[i], sizeof rows[i]);
        }
    }
    if (USES_TILES(a))
        pad_queries(t->queries, a->head_size);
    for (int v = 0; v < VECTORS; v++)
        t->joined[v] = (struct joined){splat(NONE), {0}};
    memset(t->joined_sums, 0, a->value_size * TILE * sizeof(float));
    begin_part(a, t);
}

/* Find the keys and values of a block. The first `hidden` ones are before the window of all rows: their pages may be
 * gone. The next key takes their place; they have no weight. */
static void find(const struct prompt_attention *a, struct state *s, uint64_t head, uint64_t first, uint64_t n,
                 uint64_t hidden)
{
    const int64_t *page = a->pages + (first + hidden) / a->page_size;
    uint64_t place = (first + hidden) % a->page_size;
    for (uint64_t i = hidden; i < n; i++) {
        const uint64_t row = ((uint64_t)*page * a->page_size + place) * a->num_kv_heads + head;
        s->keys[i] = a->keys + row * a->head_size;
        s->values[i] = a->values + row * a->value_size;
        if (++place == a->page_size) {
            place = 0;
            page++;
        }
    }
    for (uint64_t i = 0; i < hidden; i++) {
        s->keys[i] = s->keys[hidden];
        s->values[i] = s->values[hidden];
    }
}

#if NUMBERS == 2
/* Pair the values of consecutive keys; a missing second one, which has no weight, is the first. */
static void convert(const struct prompt_attention *a, struct state *s, uint64_t n)
{
    for (uint64_t i = 0; i < n; i += 2) {
        const bf16 *first = s->values[i], *second = s->values[MIN(i + 1, n - 1)];
        uint32_t *to = s->numbers + i / 2 * a->value_size;
        vuint pairs[2];
        for (uint64_t d = 0; d < a->value_size; d += 2 * LANES) {
            const int vectors = d + 2 * LANES <= a->value_size ? 2 : 1;
            pair_up(first + d, second + d, vectors, pairs);
            memcpy(to + d, pairs, (size_t)vectors * sizeof *pairs);
        }
    }
}
#else
static void convert(const struct prompt_attention *a, struct state *s, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        for (uint64_t d = 0; d < a->head_size; d += LANES)
            store(s->keys_as_floats + i * a->head_size + d, load_bf16(s->keys[i] + d));
        for (uint64_t d = 0; d < a->value_size; d += LANES)
            store(s->numbers + i * a->value_size + d, load_bf16(s->values[i] + d));
    }
}
#endif

/* Score WIDE keys from key `first` on against a tile of rows. The last of n keys replaces missing ones, and
 * `hide` overwrites their scores. */
INLINE void score_keys(const struct prompt_attention *a, struct state *s, const struct tile *t, uint64_t first,
                       uint64_t n)
{
    vfloat sums[WIDE * VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < WIDE * VECTORS; i++)
        sums[i] = (vfloat){0};
    const void *keys[WIDE];
#pragma GCC unroll 8
    for (uint64_t i = 0; i < WIDE; i++)
        keys[i] = key_of(a, s, MIN(first + i, n - 1));
    for (uint64_t d = 0; d < a->head_size / NUMBERS; d++) {
        voperand q[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++)
            q[v] = load_operands(t->queries + d * TILE + v * LANES);
#pragma GCC unroll 8
        for (uint64_t i = 0; i < WIDE; i++) {
            const voperand key = splat_operand(keys[i], d);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                sums[i * VECTORS + v] = add(sums[i * VECTORS + v], q[v], key);
        }
    }
    float *scores = s->scores + first * TILE;
#pragma GCC unroll 16
    for (int i = 0; i < WIDE * VECTORS; i++)
        store(scores + i * LANES, sums[i]);
}

/* Convert n scores to weights 2^(score x factor - maximum), rounded to bfloat16. `before`: factor of earlier sums under
 * the new maximum. Weights are added in the order of attention.c, which has keys in lanes: key by key into LANES sums,
 * then these sums by halves. n is a multiple of LANES. */
static void weigh(const struct prompt_attention *a, struct state *s, struct tile *t, uint64_t n, vfloat *before)
{
    const vfloat factor = splat(log2_scale(a->scale, a->softcap));
    for (int v = 0; v < VECTORS; v++) {
        const float *const scores = s->scores + v * LANES;
        operand *const weights = s->weights + v * LANES;
        const vfloat old = load(t->most + v * LANES);
        const vfloat most = larger(old, most_of_keys(scores, TILE, n) * factor);
        store(t->most + v * LANES, most);
        const vfloat shift = shift_of(most);
        before[v] = factor_of(old, most);
        vfloat sums[LANES];
        for (uint64_t j = 0; j < LANES; j += 2) {
            vfloat even = {0}, odd = {0};
            for (uint64_t i = j; i < n; i += LANES) {
                const float *const at = scores + i * TILE;
                const vfloat first = exp2_of(fused(load(at), factor, -shift));
                const vfloat second = exp2_of(fused(load(at + TILE), factor, -shift));
                even += first;
                odd += second;
                put_weights(weights + i / NUMBERS * TILE, TILE, first, second);
            }
            sums[j] = even;
            sums[j + 1] = odd;
        }
#pragma GCC unroll 4
        for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
            for (int i = 0; i < half; i++)
                sums[i] += sums[i + half];
        store(t->weight + v * LANES, fused(load(t->weight + v * LANES), before[v], sums[0]));
    }
}

/* Add weighted values to WIDE numbers of each row's sum. */
INLINE void add_values(const struct prompt_attention *a, const struct state *s, float *at, uint64_t d, uint64_t n)
{
    vfloat sums[WIDE * VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < WIDE * VECTORS; i++)
        sums[i] = load(at + i * LANES);
    for (uint64_t i = 0; i < n; i += NUMBERS) {
        voperand weights[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++)
            weights[v] = load_operands(s->weights + i / NUMBERS * TILE + v * LANES);
        const operand *values = s->numbers + i / NUMBERS * a->value_size + d;
#pragma GCC unroll 8
        for (uint64_t j = 0; j < WIDE; j++) {
            const voperand value = splat_operand(values, j);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                sums[j * VECTORS + v] = add(sums[j * VECTORS + v], weights[v], value);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDE * VECTORS; i++)
        store(at + i * LANES, sums[i]);
}

/* Scale a tile's sums if the maximum of a row rose. */
static void scale_sums(const struct prompt_attention *a, struct tile *t, const vfloat *before)
{
    vuint rises = {0};
    for (int v = 0; v < VECTORS; v++)
        rises |= (vuint)(before[v] != splat(1.0f)) & 1;
    if (most_of(__builtin_convertvector(rises, vfloat)) == 0.0f)
        return;
    for (uint64_t i = 0; i < a->value_size * VECTORS; i++)
        store(t->sums + i * LANES, load(t->sums + i * LANES) * before[i % VECTORS]);
}

/* Process a block of keys for a tile: those of n that its last row sees. */
static void work_tile(const struct prompt_attention *a, struct state *s, struct tile *t, uint64_t first, uint64_t n)
{
    const uint64_t last = (uint64_t)t->positions[TILE - 1];
    if (last < first)
        return;
    n = MIN(n, last + 1 - first);
    /* The scores of keys [n, all) are stale. `hide` overwrites them, because these keys are later than all rows. */
    const uint64_t all = USES_TILES(a) ? whole_tiles(n) : parts_of(n, LANES) * LANES;
    if (USES_TILES(a))
        score_tiles(&s->key_tiles, n, t->queries, a->head_size, s->scores);
    for (uint64_t i = 0; i < n && !USES_TILES(a); i += WIDE)
        score_keys(a, s, t, i, n);
    if (a->softcap != 0.0f)
        for (uint64_t j = 0; j < all * TILE; j += LANES)
            store(s->scores + j, limited(load(s->scores + j), a->scale, a->softcap));
    if (first + all - 1 > (uint64_t)t->positions[0] || (a->window && first + a->window <= last))
        hide(t->positions, VECTORS, a->window, s->scores, TILE, first, all);
    vfloat before[VECTORS];
    weigh(a, s, t, all, before);
    scale_sums(a, t, before);
    if (USES_TILES(a))
        add_value_tiles(s->numbers, s->weights, n, a->value_size, t->sums);
    for (uint64_t d = 0; d < a->value_size && !USES_TILES(a); d += WIDE)
        add_values(a, s, t->sums + d * TILE, d, n);
}

/* Join the current part to the earlier ones. */
static void end_part(const struct prompt_attention *a, struct tile *t)
{
    for (int v = 0; v < VECTORS; v++) {
        vfloat before, after;
        join_part(&t->joined[v], load(t->most + v * LANES), load(t->weight + v * LANES), &before, &after);
        for (uint64_t d = 0; d < a->value_size; d++) {
            float *at = t->joined_sums + d * TILE + v * LANES;
            store(at, fused(load(at), before, load(t->sums + d * TILE + v * LANES) * after));
        }
    }
}

static void end_tile(const struct prompt_attention *a, const struct unit *u, const struct tile *t, uint64_t first)
{
    for (uint64_t v = 0; v < VECTORS && first + v * LANES < u->num_rows; v++) {
        const vfloat factor = 1.0f / t->joined[v].weight;
        const uint64_t num_rows = MIN(LANES, u->num_rows - first - v * LANES);
        for (uint64_t d = 0; d < a->value_size; d += LANES) {
            vuint sums[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                sums[i] = (vuint)output_of(load(t->joined_sums + (d + i) * TILE + v * LANES), factor);
            transpose(sums);
            for (uint64_t lane = 0; lane < num_rows; lane++) {
                const uint64_t row = first + v * LANES + lane, token = u->token + row / a->group;
                const uint64_t head = (token * a->num_kv_heads + u->head) * a->group + row % a->group;
                store_bf16(a->outputs + head * a->value_size + d, (vfloat)sums[lane]);
            }
        }
    }
}

static void work(const struct prompt_attention *a, struct state *s, const struct unit *u)
{
    const uint64_t last = a->start + u->token + (u->num_rows - 1) / a->group, position = a->start + u->token;
    const uint64_t seen = a->window && position >= a->window ? position - a->window + 1 : 0;
    const uint64_t tiles = (u->num_rows + TILE - 1) / TILE;
    for (uint64_t t = 0; t < tiles; t++)
        begin_tile(a, u, s->tiles + t, t * TILE);
    for (uint64_t first = seen / BLOCK * BLOCK; first <= last; first += BLOCK) {
        const uint64_t n = MIN((uint64_t)BLOCK, last + 1 - first), hidden = seen > first ? seen - first : 0;
        find(a, s, u->head, first, n, hidden);
        if (USES_TILES(a)) {
            const uint64_t stride = a->num_kv_heads * a->head_size;
            find_key_tiles(&s->key_tiles, s->keys, n, hidden, a->head_size, stride, a->page_size);
            spread_values(s->values, n, a->value_size, s->numbers);
        } else {
            convert(a, s, n);
        }
        for (uint64_t t = 0; t < tiles; t++) {
            work_tile(a, s, s->tiles + t, first, n);
            if ((first + n) % PART == 0 || first + n > last) {
                end_part(a, s->tiles + t);
                begin_part(a, s->tiles + t);
            }
        }
    }
    for (uint64_t t = 0; t < tiles; t++)
        end_tile(a, u, s->tiles + t, t * TILE);
}

static uint64_t tokens_a_unit(const struct prompt_attention *a)
{
    return MAX(1, ROWS / a->group);
}

static uint64_t num_phases(const void *args)
{
    (void)args;
    return 1;
}

static uint64_t num_tasks(const void *args, uint64_t phase)
{
    const struct prompt_attention *a = args;
    (void)phase;
    return parts_of(a->num_tokens, tokens_a_unit(a)) * a->num_kv_heads;
}

static void run(const void *args, uint64_t phase, uint64_t task)
{
    const struct prompt_attention *a = args;
    struct state s;
    /* Later tokens have more keys, and begin first. */
    const uint64_t last = num_tasks(a, phase) / a->num_kv_heads - 1;
    const uint64_t token = (last - task / a->num_kv_heads) * tokens_a_unit(a);
    const struct unit u = {task % a->num_kv_heads, token, MIN(tokens_a_unit(a), a->num_tokens - token) * a->group};
    if (USES_TILES(a))
        shape_tiles(2 * TILE_ROWS, TILE_ROWS);
    work(a, &s, &u);
    if (USES_TILES(a))
        RELEASE_TILES();
}

const struct kernel prompt_attention_kernel = {num_phases, num_tasks, run};

void prompt_attention(const struct prompt_attention *a)
{
    run_kernel(&prompt_attention_kernel, a, (uint64_t)a->num_threads);
}
