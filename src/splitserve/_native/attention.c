/* Attention of single new tokens over paged keys and values, as in decode steps: limited by memory bandwidth.
 *
 * 1. A request's visible keys are split into parts, so that few requests or few KV heads still occupy all threads.
 * 2. A unit of work is one part of one request under one KV head, for all query heads that share it, so that keys are
 *    read once. It runs block by block: scores, the running maximum, weights, weighted values (attend.h). Keys are in
 *    the lanes of vectors for the scores; numbers of a value are in the lanes for its sums.
 * 3. When all units are done the parts of each head are joined.
 */
#include "attend.h"
#include "pool.h"

#define MAX_GROUP 16
/* Vectors of keys, or of a value's numbers, with sums for HEADS query heads that fit the registers. */
#if VECTOR_BYTES == 64
#define WIDE 4
#else
#define WIDE 2
#endif
#define HEADS 4

/* The same structure for ctypes: splitserve/engine/kernels/library.py. */
struct attention {
    const bf16 *queries;     /* [tokens, num_kv_heads x group, head_size], tokens `query_stride` apart */
    const bf16 *keys;        /* [pages, page_size, num_kv_heads, head_size] */
    const bf16 *values;      /* [pages, page_size, num_kv_heads, value_size] */
    bf16 *outputs;           /* [tokens, num_kv_heads x group, value_size] */
    float *partials;         /* [num_units, num_kv_heads, group, value_size + 2]: sums, their weight, the maximum */
    const int64_t *tokens;   /* [num_requests]: index of each in the step */
    const int64_t *pages;    /* [num_requests, pages_stride] */
    const int64_t *units;    /* [num_units, 3]: request, first key, end of keys, all of one part; a request's units are
                                adjacent */
    const int64_t *firsts;   /* [num_requests + 1]: a request's first unit */
    uint64_t query_stride, pages_stride, num_requests, num_units, num_kv_heads, group, head_size, value_size, page_size;
    float scale, softcap;    /* softcap 0: none */
    int32_t num_threads;     /* 1: too little to be shared */
};

/* Keys [first, end) of a block, by their places in it, with addresses; other places repeat one of them. */
struct block {
    size_t first, end;
    const bf16 *keys[BLOCK], *values[BLOCK];
};

struct state {
    /* [head_size / 2, BLOCK]: two numbers of each key. */
    uint32_t keys[MAX_HEAD_SIZE / 2 * BLOCK];
    float scores[MAX_GROUP * BLOCK];
    bf16 weights[MAX_GROUP * BLOCK];
    /* Used in turn: the next block's keys are prefetched while this one's values are summed. */
    struct block blocks[2];
};

/* Prefetch a row of numbers; rows are found by page numbers, which no CPU predicts. */
INLINE void fetch(const bf16 *row, size_t size)
{
    for (size_t i = 0; i < size; i += 64 / sizeof(bf16))
        __builtin_prefetch(row + i);
}

/* Find the keys of [first, end) that are in the block of `first`; none if end <= first. */
static void find(const struct attention *a, struct block *b, uint64_t request, uint64_t head, size_t first, size_t end)
{
    b->first = first % BLOCK;
    b->end = first < end ? MIN(b->first + end - first, BLOCK) : 0;
    const int64_t *page = a->pages + request * a->pages_stride + first / a->page_size;
    size_t place = first % a->page_size;
    for (size_t i = b->first; i < b->end; i++) {
        const size_t row = ((size_t)*page * a->page_size + place) * a->num_kv_heads + head;
        b->keys[i] = a->keys + row * a->head_size;
        b->values[i] = a->values + row * a->value_size;
        fetch(b->keys[i], a->head_size);
        if (++place == a->page_size) {
            place = 0;
            page++;
        }
    }
    if (!b->end)
        return;
    for (size_t i = 0; i < b->first; i++) {
        b->keys[i] = b->keys[b->first];
        b->values[i] = b->values[b->first];
    }
    for (size_t i = b->end; i < BLOCK; i++) {
        b->keys[i] = b->keys[b->end - 1];
        b->values[i] = b->values[b->end - 1];
    }
}

/* Transpose LANES vectors: lane j of vector i becomes lane i of vector j. */
INLINE void transpose(vuint *rows)
{
    vuint lane;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        lane[i] = (uint32_t)i;
#pragma GCC unroll 4
    for (uint32_t step = 1; step < LANES; step *= 2) {
        const vuint is_odd = (vuint)((lane & step) != 0);
        const vuint low = (is_odd & ((lane ^ step) + LANES)) | (~is_odd & lane);
        const vuint high = (is_odd & (lane + LANES)) | (~is_odd & (lane ^ step));
#pragma GCC unroll 16
        for (uint32_t i = 0; i < LANES; i++)
            if (!(i & step)) {
                const vuint a = rows[i], b = rows[i + step];
                rows[i] = __builtin_shuffle(a, b, low);
                rows[i + step] = __builtin_shuffle(a, b, high);
            }
    }
}

/* Put `words` words of LANES keys, from word `first` on, into their lanes. */
INLINE void put_keys(struct state *s, const bf16 *const *keys, size_t place, size_t first, size_t words)
{
    vuint rows[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        rows[i] = (vuint){0};
        memcpy(&rows[i], keys[i] + 2 * first, words * sizeof(uint32_t));
    }
    transpose(rows);
#pragma GCC unroll 16
    for (size_t i = 0; i < words; i++)
        memcpy(s->keys + (first + i) * BLOCK + place, &rows[i], sizeof rows[i]);
}

/* Transpose the keys of a block, and prefetch its values. The head size is a multiple of LANES. */
static void spread_keys(const struct attention *a, struct state *s, const struct block *b)
{
    const size_t words = a->head_size / 2;
    for (size_t place = b->first / LANES * LANES; place < b->end; place += LANES) {
        const bf16 *const *keys = b->keys + place;
        size_t first = 0;
        for (; first + LANES <= words; first += LANES)
            put_keys(s, keys, place, first, LANES);
        if (first < words)
            put_keys(s, keys, place, first, LANES / 2);
        for (size_t i = 0; i < LANES; i++)
            fetch(b->values[place + i], a->value_size);
    }
}

/* Score `vectors` vectors of keys from `place` on against `heads` query heads. The compiler knows both numbers. */
INLINE void score(const struct attention *a, struct state *s, const bf16 *queries, size_t head, size_t place, int heads,
                  int vectors)
{
    vfloat sums[HEADS * WIDE];
#pragma GCC unroll 16
    for (int i = 0; i < heads * vectors; i++)
        sums[i] = (vfloat){0};
    for (size_t d = 0; d < a->head_size / 2; d++) {
        vuint keys[WIDE];
        memcpy(keys, s->keys + d * BLOCK + place, (size_t)vectors * sizeof *keys);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            const vuint query = splat_pair(queries + (head + h) * a->head_size + 2 * d);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sums[h * vectors + v] = add_products(sums[h * vectors + v], query, keys[v]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            store(s->scores + (head + h) * BLOCK + place + v * LANES, sums[h * vectors + v] * a->scale);
}

/* CASE(heads) for each number of heads up to HEADS. */
#define UP_TO_HEADS(CASE) CASE(1) CASE(2) CASE(3) CASE(4)

INLINE void score_heads(const struct attention *a, struct state *s, const bf16 *queries, size_t head, int heads,
                        const struct block *b)
{
    size_t place = b->first / LANES * LANES;
    for (; place + WIDE * LANES <= b->end; place += WIDE * LANES)
        score(a, s, queries, head, place, heads, WIDE);
    for (; place < b->end; place += LANES)
        score(a, s, queries, head, place, heads, 1);
}

static void score_keys(const struct attention *a, struct state *s, const bf16 *queries, const struct block *b)
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

/* Convert the scores of one head to weights e^(score - maximum). Returns the factor of earlier sums. */
static float weigh(const struct attention *a, struct state *s, size_t head, const struct block *b, float *maximum,
                   float *weight)
{
    float *scores = s->scores + head * BLOCK;
    if (a->softcap != 0.0f)
        for (size_t i = 0; i < BLOCK; i += LANES)
            store(scores + i, limited(load(scores + i), a->softcap));
    for (size_t i = 0; i < b->first; i++)
        scores[i] = NONE;
    for (size_t i = b->end; i < BLOCK; i++)
        scores[i] = NONE;
    vfloat most = splat(*maximum);
    for (size_t i = 0; i < BLOCK; i += LANES)
        most = larger(most, load(scores + i));
    most = splat(most_of(most));
    const vfloat shift = shift_of(most), before = factor_of(splat(*maximum), most);
    vfloat sum = {0};
    for (size_t i = 0; i < BLOCK; i += LANES) {
        const vfloat w = exp_of(load(scores + i) - shift);
        store_pairs(s->weights + head * BLOCK + i, w);
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

/* Add weighted values to `vectors` vectors of the sums of some heads; both numbers are known to the compiler. */
INLINE void add_part(const struct state *s, const struct block *b, float *const *sums, const float *before, size_t head,
                     int heads, size_t d, int vectors)
{
    vfloat sum[HEADS][WIDE];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sum[h][v] = load(sums[head + h] + d + v * LANES) * before[head + h];
    for (size_t i = b->first / 2 * 2; i < b->end; i += 2) {
        vuint pairs[WIDE];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v += 2)
            pair_up(b->values[i] + d + v * LANES, b->values[i + 1] + d + v * LANES, MIN(2, vectors - v), pairs + v);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            const vuint weight = splat_pair(s->weights + (head + h) * BLOCK + i);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sum[h][v] = add_products(sum[h][v], weight, pairs[v]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            store(sums[head + h] + d + v * LANES, sum[h][v]);
}

INLINE void add_heads(const struct attention *a, const struct state *s, const struct block *b, float *const *sums,
                      const float *before, size_t head, int heads)
{
    size_t d = 0;
    for (; d + WIDE * LANES <= a->value_size; d += WIDE * LANES)
        add_part(s, b, sums, before, head, heads, d, WIDE);
    for (; d < a->value_size; d += LANES)
        add_part(s, b, sums, before, head, heads, d, 1);
}

static void add_values(const struct attention *a, const struct state *s, const struct block *b, float *const *sums,
                       const float *before)
{
#define ADD(heads) \
    case heads: \
        add_heads(a, s, b, sums, before, head, heads); \
        break;
    for (size_t head = 0; head < a->group; head += HEADS)
        switch (MIN(HEADS, a->group - head)) {
            UP_TO_HEADS(ADD)
        }
}

static void work(const struct attention *a, struct state *s, uint64_t unit, uint64_t head)
{
    const int64_t *u = a->units + unit * 3;
    const uint64_t request = (uint64_t)u[0];
    const size_t first = (size_t)u[1], end = (size_t)u[2];
    const bf16 *queries = a->queries + (uint64_t)a->tokens[request] * a->query_stride + head * a->group * a->head_size;
    float *sums[MAX_GROUP], before[MAX_GROUP];
    for (uint64_t g = 0; g < a->group; g++) {
        sums[g] = partial(a, unit, head, g);
        memset(sums[g], 0, (a->value_size + 1) * sizeof(float));
        sums[g][a->value_size + 1] = NONE;
    }
    struct block *now = s->blocks, *next = s->blocks + 1;
    find(a, now, request, head, first, end);
    for (size_t position = (first / BLOCK + 1) * BLOCK; now->end; position += BLOCK) {
        spread_keys(a, s, now);
        score_keys(a, s, queries, now);
        for (uint64_t g = 0; g < a->group; g++) {
            float *weight = sums[g] + a->value_size;
            before[g] = weigh(a, s, g, now, weight + 1, weight);
        }
        find(a, next, request, head, position, end);
        add_values(a, s, now, sums, before);
        struct block *done = now;
        now = next;
        next = done;
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
        store_bf16(out + d, load(sums + d) * factor);
}

static uint64_t num_phases(const void *args)
{
    (void)args;
    return 2;
}

/* A request that is too small to be shared has one task: all of it. */
static uint64_t num_tasks(const void *args, uint64_t phase)
{
    const struct attention *a = args;
    return a->num_threads == 1 ? 1 : (phase ? a->num_requests : a->num_units) * a->num_kv_heads;
}

static void run(const void *args, uint64_t phase, uint64_t task)
{
    const struct attention *a = args;
    const uint64_t all = (phase ? a->num_requests : a->num_units) * a->num_kv_heads;
    const uint64_t end = a->num_threads == 1 ? all : task + 1;
    struct state s;
    for (; task < end; task++) {
        const uint64_t i = task / a->num_kv_heads, head = task % a->num_kv_heads;
        if (!phase)
            work(a, &s, i, head);
        for (uint64_t g = 0; phase && g < a->group; g++)
            join(a, i, head, g);
    }
}

const struct kernel attention_kernel = {num_phases, num_tasks, run};

void decode_attention(const struct attention *a)
{
    run_kernel(&attention_kernel, a, (uint64_t)a->num_threads);
}
