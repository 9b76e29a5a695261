/* Attention of single new tokens over paged keys and values, as in decode steps: limited by memory bandwidth.
 *
 * 1. A request's visible keys are split into parts, so that few requests or few KV heads still occupy all threads.
 * 2. A unit of work is one part of one request. A task has a few units under some KV heads, or one unit under one head
 *    if there are few units, for all query heads that share them. So keys are read once, and in the order of memory.
 * 3. A task runs block by block, and each block head by head: scores, the running maximum, weights, weighted values
 *    (attend.h). Keys are in the lanes of vectors for the scores; numbers of a value are in the lanes for its sums.
 *    Meanwhile the next block of the task is prefetched for all heads (blocks.h).
 * 4. When all units are done the parts of each head are joined.
 *
 * Builds with an instruction for pairs multiply pairs, others floats, as in prompts.c.
 */
#include "blocks.h"
#include "pool.h"

/* Query heads of a pass, and its vectors of keys (scores) or of a value's numbers, for `heads` of them. The sums of a
 * pass fit the registers: 32 of 64 bytes, otherwise 16. GCC keeps some in memory if a pass has 12 sums of values, or if
 * the loop over two numbers or keys is unrolled. */
#define HEADS 4
#if VECTOR_BYTES == 64
#define KEY_VECTORS(heads) 4
#define VALUE_VECTORS(heads) 4
#define MAX_VECTORS 4
#else
#define KEY_VECTORS(heads) ((heads) == 4 ? 2 : (heads) == 1 ? 8 : 4)
#define VALUE_VECTORS(heads) ((heads) >= 3 ? 2 : (heads) == 1 ? 8 : 4)
#define MAX_VECTORS 8
#endif
/* Lines of the next block that are prefetched in a round of the loops over numbers of keys and over keys, and with the
 * weights of a query head. A block of two query heads fetches as much as it reads. */
#define SCORE_PACE(heads) MAX(1, KEY_VECTORS(heads) * LANES / 32)
#define ADD_PACE(heads) ((3 * VALUE_VECTORS(heads) * LANES + 63) / 64)
#define WEIGH_PACE 16

/* Units per thread from which a task has more than one KV head, and the largest number of keys' and values' numbers of
 * its heads together: two blocks of all heads must fit a core's cache. */
#define MANY_UNITS 4
#define MAX_ROW 1024
/* Maximum number of units of a task. */
#define MAX_UNITS 4

/* The queries of a KV head as operands. */
INLINE const operand *operands_of(const struct attention *a, struct state *s, const bf16 *queries)
{
#if NUMBERS == 2
    (void)a, (void)s;
    return (const operand *)queries;
#else
    for (size_t i = 0; i < a->group * a->head_size; i += LANES)
        store(s->queries + i, load_bf16(queries + i));
    return s->queries;
#endif
}

/* Score `vectors` vectors of keys from `place` on against `heads` query heads. The compiler knows both numbers. */
INLINE void score(const struct attention *a, struct state *s, const operand *queries, size_t head, size_t place,
                  int heads, int vectors)
{
    vfloat sums[HEADS * MAX_VECTORS];
    const size_t size = a->head_size / NUMBERS;
#pragma GCC unroll 16
    for (int i = 0; i < heads * vectors; i++)
        sums[i] = (vfloat){0};
    for (size_t d = 0; d < size; d += 2 / NUMBERS) {
        fetch(&s->ahead, SCORE_PACE(heads));
#pragma GCC unroll 1
        for (size_t n = d; n < d + 2 / NUMBERS; n++) {
            voperand query[HEADS];
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
                query[h] = splat_operand(queries + (head + h) * size, n);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) {
                const voperand keys = load_operands(s->keys + n * BLOCK + place + v * LANES);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++)
                    sums[h * vectors + v] = add(sums[h * vectors + v], query[h], keys);
            }
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            store(s->scores + (head + h) * BLOCK + place + v * LANES, sums[h * vectors + v]);
}

/* CASE(heads) for each number of heads up to HEADS. */
#define UP_TO_HEADS(CASE) CASE(1) CASE(2) CASE(3) CASE(4)

INLINE void score_heads(const struct attention *a, struct state *s, const operand *queries, size_t head, int heads,
                        const struct block *b)
{
    size_t place = b->first / LANES * LANES;
    for (; place + KEY_VECTORS(heads) * LANES <= b->end; place += KEY_VECTORS(heads) * LANES)
        score(a, s, queries, head, place, heads, KEY_VECTORS(heads));
    for (; place < b->end; place += LANES)
        score(a, s, queries, head, place, heads, 1);
}

static void score_keys(const struct attention *a, struct state *s, const operand *queries, const struct block *b)
{
#define SCORE(heads) \
    case heads: \
        score_heads(a, s, queries, head, heads, b); \
        break;
    for (size_t head = 0; head < a->group; head += HEADS)
        switch (MIN(HEADS, a->group - head)) {
            UP_TO_HEADS(SCORE)
        }
}

/* Convert the scores of one head to weights 2^(score x factor - maximum). Returns the factor of earlier sums. */
static float weigh(const struct attention *a, struct state *s, size_t head, const struct block *b, float *maximum,
                   float *weight)
{
    float *scores = s->scores + head * BLOCK;
    fetch(&s->ahead, WEIGH_PACE);
    if (a->softcap != 0.0f)
        for (size_t i = 0; i < BLOCK; i += LANES)
            store(scores + i, limited(load(scores + i), a->scale, a->softcap));
    for (size_t i = 0; i < b->first; i++)
        scores[i] = NONE;
    for (size_t i = b->end; i < BLOCK; i++)
        scores[i] = NONE;
    const vfloat factor = splat(log2_scale(a->scale, a->softcap)), old = splat(*maximum);
    vfloat most = load(scores);
    for (size_t i = LANES; i < BLOCK; i += LANES)
        most = larger(most, load(scores + i));
    most = larger(old, splat(most_of(most)) * factor);
    const vfloat shift = shift_of(most), before = factor_of(old, most);
    vfloat sum = {0};
    for (size_t i = 0; i < BLOCK; i += LANES) {
        const vfloat w = exp2_of(fused(load(scores + i), factor, -shift));
        store_weights(s->weights + (head * BLOCK + i) / NUMBERS, w);
        sum += w;
    }
    *weight = fused(splat(*weight), before, splat(sum_of(sum)))[0];
    *maximum = most[0];
    return before[0];
}

static float *partial(const struct attention *a, uint64_t unit, uint64_t head, uint64_t g)
{
    return a->partials + ((unit * a->num_kv_heads + head) * a->group + g) * (a->value_size + 2);
}

/* Numbers from `d` on of the values of key `i`, or of two keys as pairs: `vectors` (1 or 2) vectors. */
INLINE void load_values(const struct block *b, size_t i, size_t d, int vectors, voperand *values)
{
#if NUMBERS == 2
    pair_up(b->values[i] + d, b->values[i + 1] + d, vectors, values);
#else
    for (int v = 0; v < vectors; v++)
        values[v] = load_bf16(b->values[i] + d + v * LANES);
#endif
}

/* Add weighted values, from `d` on in their rows, to `vectors` vectors from `to` on of the sums of some heads. The
 * compiler knows `heads` and `vectors`. */
INLINE void add_part(struct state *s, const struct block *b, float *const *sums, const float *before, size_t head,
                     int heads, size_t d, size_t to, int vectors)
{
    vfloat sum[HEADS][MAX_VECTORS];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sum[h][v] = load(sums[head + h] + to + v * LANES) * before[head + h];
    for (size_t i = b->first / 2 * 2; i < b->end; i += 2) {
        fetch(&s->ahead, ADD_PACE(heads));
#pragma GCC unroll 1
        for (size_t n = i; n < i + 2; n += NUMBERS) {
            voperand weights[HEADS], values[2];
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
                weights[h] = splat_operand(s->weights + ((head + h) * BLOCK + n) / NUMBERS, 0);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) {
                if (v % 2 == 0)
                    load_values(b, n, d + v * LANES, MIN(2, vectors - v), values);
#pragma GCC unroll 4
                for (int h = 0; h < heads; h++)
                    sum[h][v] = add(sum[h][v], weights[h], values[v % 2]);
            }
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            store(sums[head + h] + to + v * LANES, sum[h][v]);
}

INLINE void add_heads(const struct attention *a, struct state *s, const struct block *b, size_t offset,
                      float *const *sums, const float *before, size_t head, int heads)
{
    size_t d = 0;
    for (; d + VALUE_VECTORS(heads) * LANES <= a->value_size; d += VALUE_VECTORS(heads) * LANES)
        add_part(s, b, sums, before, head, heads, offset + d, d, VALUE_VECTORS(heads));
    for (; d < a->value_size; d += LANES)
        add_part(s, b, sums, before, head, heads, offset + d, d, 1);
}

static void add_values(const struct attention *a, struct state *s, const struct block *b, size_t offset,
                       float *const *sums, const float *before)
{
#define ADD(heads) \
    case heads: \
        add_heads(a, s, b, offset, sums, before, head, heads); \
        break;
    for (size_t head = 0; head < a->group; head += HEADS)
        switch (MIN(HEADS, a->group - head)) {
            UP_TO_HEADS(ADD)
        }
}

/* Process a block for the `i`-th KV head of a task. `queries` and `all_sums` are those of its first. */
static void work_head(const struct attention *a, struct state *s, const struct block *b, const bf16 *queries,
                      float *all_sums, uint64_t i)
{
    float *sums[MAX_GROUP], before[MAX_GROUP];
    queries += i * a->group * a->head_size;
    spread_keys(a, s, b, i * a->head_size);
    if (USES_TILES(a))
        score_heads_by_tiles(queries, a->head_size, (const uint32_t *)s->keys, b->first, b->end, s->scores);
    else
        score_keys(a, s, operands_of(a, s, queries), b);
    for (uint64_t g = 0; g < a->group; g++) {
        sums[g] = all_sums + (i * a->group + g) * (a->value_size + 2);
        float *weight = sums[g] + a->value_size;
        before[g] = weigh(a, s, g, b, weight + 1, weight);
    }
    if (USES_TILES(a)) {
        pair_values(a, s, b, i * a->value_size);
        add_values_by_tiles((const bf16 *)s->weights, (const uint32_t *)s->keys, a->group, a->value_size, b->first,
                            b->end, before, sums[0], a->value_size + 2);
    } else {
        add_values(a, s, b, i * a->value_size, sums, before);
    }
}

/* Prepare the sums of a unit for KV heads [head, head + num_heads). */
static float *clear(const struct attention *a, uint64_t unit, uint64_t head, uint64_t num_heads)
{
    float *const sums = partial(a, unit, head, 0);
    const size_t size = a->value_size + 2;
    for (uint64_t i = 0; i < num_heads * a->group; i++) {
        memset(sums + i * size, 0, (size - 1) * sizeof(float));
        sums[i * size + size - 1] = NONE;
    }
    return sums;
}

/* Process units [unit, last) for KV heads [head, head + num_heads). During a block, the next one is prefetched. */
static void work(const struct attention *a, struct state *s, uint64_t unit, uint64_t last, uint64_t head,
                 uint64_t num_heads)
{
    const int64_t *u = a->units + unit * 3;
    int now = 0;
    s->ahead.oldest = 0;
    s->ahead.to_l2 = fetches_to_l2();
    for (int i = 0; i < AGAIN; i++)
        s->ahead.lines[i] = (const char *)a->queries;
    find(a, &s->ahead, &s->blocks[now], (uint64_t)u[0], head, num_heads, (size_t)u[1], (size_t)u[2]);
    fetch(&s->ahead, INT32_MAX);
    for (; unit < last; unit++, u += 3) {
        const uint64_t request = (uint64_t)u[0];
        const size_t end = (size_t)u[2];
        const bf16 *queries =
            a->queries + (uint64_t)a->tokens[request] * a->query_stride + head * a->group * a->head_size;
        float *sums = clear(a, unit, head, num_heads);
        for (size_t position = (size_t)u[1]; position < end;) {
            position = (position / BLOCK + 1) * BLOCK;
            if (position < end)
                find(a, &s->ahead, &s->blocks[!now], request, head, num_heads, position, end);
            else if (unit + 1 < last)
                find(a, &s->ahead, &s->blocks[!now], (uint64_t)u[3], head, num_heads, (size_t)u[4], (size_t)u[5]);
            for (uint64_t i = 0; i < num_heads; i++)
                work_head(a, s, &s->blocks[now], queries, sums, i);
            now = !now;
        }
    }
}

/* Join the parts of one head of one request, each with its own maximum, to one output. */
static void join(const struct attention *a, uint64_t request, uint64_t head, uint64_t g)
{
    const size_t size = a->value_size;
    const uint64_t first = (uint64_t)a->firsts[request], end = (uint64_t)a->firsts[request + 1];
    bf16 *out = a->outputs + (((uint64_t)a->tokens[request] * a->num_kv_heads + head) * a->group + g) * size;
    struct joined all = {splat(NONE), {0}};
    float *sums = partial(a, first, head, g);
    for (uint64_t u = first; u < end; u++) {
        const float *part = partial(a, u, head, g);
        vfloat before, after;
        join_part(&all, splat(part[size + 1]), splat(part[size]), &before, &after);
        for (size_t d = 0; d < size; d += LANES) {
            const vfloat sum = u == first ? (vfloat){0} : load(sums + d);
            store(sums + d, fused(sum, before, load(part + d) * after));
        }
    }
    const vfloat factor = 1.0f / all.weight;
    for (size_t d = 0; d < size; d += LANES)
        store_bf16(out + d, output_of(load(sums + d), factor));
}

static uint64_t num_phases(const void *args)
{
    (void)args;
    return 2;
}

/* KV heads of a task. */
static uint64_t heads_a_task(const struct attention *a)
{
    if (a->num_threads > 1 && a->num_units < MANY_UNITS * (uint64_t)a->num_threads)
        return 1;
    return MIN(a->num_kv_heads, MAX(1, MAX_ROW / (a->head_size + a->value_size)));
}

/* Units, then requests, of a task. */
static uint64_t items_of_task(const struct attention *a, uint64_t phase)
{
    return phase ? 1 : MAX(1, MIN(MAX_UNITS, a->num_units / (MANY_UNITS * (uint64_t)a->num_threads)));
}

static uint64_t all_tasks(const struct attention *a, uint64_t phase)
{
    const uint64_t heads = phase ? 1 : heads_a_task(a);
    return parts_of(phase ? a->num_requests : a->num_units, items_of_task(a, phase)) * parts_of(a->num_kv_heads, heads);
}

/* A request that is too small to be shared has one task: all of it. */
static uint64_t num_tasks(const void *args, uint64_t phase)
{
    const struct attention *a = args;
    return a->num_threads == 1 ? 1 : all_tasks(a, phase);
}

static void run(const void *args, uint64_t phase, uint64_t task)
{
    const struct attention *a = args;
    const uint64_t end = a->num_threads == 1 ? all_tasks(a, phase) : task + 1;
    const uint64_t heads = phase ? 1 : heads_a_task(a), of_each = parts_of(a->num_kv_heads, heads);
    const uint64_t items = items_of_task(a, phase);
    struct state s;
    if (USES_TILES(a))
        shape_for_heads(a->group);
    for (; task < end; task++) {
        const uint64_t i = task / of_each * items, head = task % of_each * heads;
        if (!phase)
            work(a, &s, i, MIN(a->num_units, i + items), head, MIN(heads, a->num_kv_heads - head));
        for (uint64_t g = 0; phase && g < a->group; g++)
            join(a, i, head, g);
    }
    if (USES_TILES(a))
        RELEASE_TILES();
}

const struct kernel attention_kernel = {num_phases, num_tasks, run};

void decode_attention(const struct attention *a)
{
    run_kernel(&attention_kernel, a, (uint64_t)a->num_threads);
}
