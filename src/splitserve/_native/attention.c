/* Attention of single new tokens over paged keys and values, as in decode steps: limited by memory bandwidth.
 *
 * 1. A request's visible keys are split into parts, so that few requests or few KV heads still occupy all threads.
 * 2. A unit of work is one part of one request under one KV head, for all query heads that share it, so that keys are
 *    read once. It runs block by block: scores, the running maximum, weights, weighted values. Its sums are not divided
 *    yet.
 * 3. When all units are done the parts of each head are joined.
 *
 * The split of a request depends on its length only, so its result does not depend on other requests.
 */
#include "vectors.h"

#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* Keys that are scored together; a page may be larger or smaller. */
#define BLOCK 64
/* splitserve/engine/native/library.py rejects larger ones. */
#define MAX_HEAD_SIZE 256
#define MAX_GROUP 16

/* The same structure for ctypes: splitserve/engine/native/library.py. */
struct attention {
    const bf16 *queries;     /* [tokens, num_kv_heads x group, head_size], tokens `query_stride` apart */
    const bf16 *keys;        /* [pages, page_size, num_kv_heads, head_size] */
    const bf16 *values;      /* [pages, page_size, num_kv_heads, value_size] */
    bf16 *outputs;           /* [tokens, num_kv_heads x group, value_size] */
    float *partials;         /* [num_units, num_kv_heads, group, value_size + 2]: sums, their weight, the maximum */
    const int64_t *tokens;   /* [num_requests]: index of each in the step */
    const int64_t *pages;    /* [num_requests, pages_stride] */
    const int64_t *units;    /* [num_units, 3]: request, first key, end of keys; units of a request are adjacent */
    const int64_t *firsts;   /* [num_requests + 1]: a request's first unit */
    uint64_t query_stride, pages_stride, num_requests, num_units, num_kv_heads, group, head_size, value_size, page_size;
    float scale, softcap;    /* softcap 0: none */
    int32_t num_threads;
};

/* Addresses of some consecutive keys and their values. */
struct block {
    size_t n;
    const bf16 *keys[BLOCK], *values[BLOCK];
};

struct state {
    float queries[MAX_GROUP * MAX_HEAD_SIZE];
    float scores[MAX_GROUP * BLOCK];
    /* Used in turn: the next block's keys are prefetched while this one's values are summed. */
    struct block blocks[2];
};

/* Prefetch a row of numbers; rows are found by page numbers, which no CPU predicts. */
INLINE void fetch(const bf16 *row, size_t size)
{
    for (size_t i = 0; i < size; i += 64 / sizeof(bf16))
        __builtin_prefetch(row + i);
}

/* Find up to BLOCK keys from `first` on; none from `end` on. */
static void find(const struct attention *a, struct block *b, uint64_t request, uint64_t head, size_t first, size_t end)
{
    const int64_t *page = a->pages + request * a->pages_stride + first / a->page_size;
    size_t place = first % a->page_size;
    b->n = first < end ? MIN(end - first, BLOCK) : 0;
    for (size_t i = 0; i < b->n; i++) {
        const size_t row = ((size_t)*page * a->page_size + place) * a->num_kv_heads + head;
        b->keys[i] = a->keys + row * a->head_size;
        b->values[i] = a->values + row * a->value_size;
        fetch(b->keys[i], a->head_size);
        if (++place == a->page_size) {
            place = 0;
            page++;
        }
    }
}

/* Compute the sums of four vectors. */
INLINE void sums_of(const vfloat *v, float *sums)
{
    for (int i = 0; i < 4; i++)
        sums[i] = sum_of(v[i]);
}

/* Score four keys against some heads: each part of a key is widened once for all of them. */
INLINE void score_four(const struct attention *a, struct state *s, size_t i, const bf16 *const *k, size_t g, int heads)
{
    const size_t size = a->head_size;
    vfloat sums[2][4] = {{{0}}};
    for (size_t d = 0; d < size; d += LANES) {
        vfloat parts[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            parts[j] = load_bf16(k[j] + d);
#pragma GCC unroll 2
        for (int h = 0; h < heads; h++) {
            const vfloat q = load(s->queries + (g + h) * size + d);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                sums[h][j] += q * parts[j];
        }
    }
#pragma GCC unroll 2
    for (int h = 0; h < heads; h++)
        sums_of(sums[h], s->scores + (g + h) * BLOCK + i);
}

/* BLOCK is a multiple of four: scores behind the last key are never read. */
static void score_keys(const struct attention *a, struct state *s, const struct block *b)
{
    for (size_t i = 0; i < b->n; i += 4) {
        const bf16 *k[4];
        for (size_t j = 0; j < 4; j++) {
            k[j] = b->keys[MIN(i + j, b->n - 1)];
            fetch(b->values[MIN(i + j, b->n - 1)], a->value_size);
        }
        size_t g = 0;
        for (; g + 2 <= a->group; g += 2)
            score_four(a, s, i, k, g, 2);
        if (g < a->group)
            score_four(a, s, i, k, g, 1);
    }
}

/* Convert scores to weights e^(score - maximum). Returns the factor of earlier sums under the new maximum. */
static float weigh(const struct attention *a, float *scores, size_t n, float *maximum, float *weight)
{
    float most = *maximum;
    if (a->softcap != 0.0f)
        for (size_t i = 0; i < n; i++)
            scores[i] = __builtin_tanhf(scores[i] / a->softcap) * a->softcap;
    for (size_t i = 0; i < n; i++)
        most = scores[i] > most ? scores[i] : most;
    const float before = *maximum == -__builtin_inff() ? 0.0f : __builtin_expf(*maximum - most);
    for (size_t i = n; i < BLOCK; i++)
        scores[i] = -__builtin_inff();
    vfloat sum = {0};
    for (size_t i = 0; i < BLOCK; i += LANES) {
        const vfloat w = exp_of(load(scores + i) - most);
        store(scores + i, w);
        sum += w;
    }
    *weight = *weight * before + sum_of(sum);
    *maximum = most;
    return before;
}

static float *partial(const struct attention *a, uint64_t unit, uint64_t head, uint64_t g)
{
    return a->partials + ((unit * a->num_kv_heads + head) * a->group + g) * (a->value_size + 2);
}

/* Add weighted values to the sums of some heads, two vectors at a time (or one, at the end of an odd number). */
INLINE void add_part(const struct state *s, const struct block *b, float *const *sums, const float *before, size_t g,
                     int heads, size_t d, int vectors)
{
    vfloat sum[4][2];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            sum[h][v] = load(sums[g + h] + d + v * LANES) * before[g + h];
    for (size_t i = 0; i < b->n; i++) {
        vfloat parts[2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            parts[v] = load_bf16(b->values[i] + d + v * LANES);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            const vfloat weight = splat(s->scores[(g + h) * BLOCK + i]);
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sum[h][v] += weight * parts[v];
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            store(sums[g + h] + d + v * LANES, sum[h][v]);
}

INLINE void add_heads(const struct attention *a, const struct state *s, const struct block *b, float *const *sums,
                      const float *before, size_t g, int heads)
{
    size_t d = 0;
    for (; d + 2 * LANES <= a->value_size; d += 2 * LANES)
        add_part(s, b, sums, before, g, heads, d, 2);
    if (d < a->value_size)
        add_part(s, b, sums, before, g, heads, d, 1);
}

static void add_values(const struct attention *a, const struct state *s, const struct block *b, float *const *sums,
                       const float *before)
{
    size_t g = 0;
    for (; g + 4 <= a->group; g += 4)
        add_heads(a, s, b, sums, before, g, 4);
    switch (a->group - g) {
    case 3:
        add_heads(a, s, b, sums, before, g, 3);
        break;
    case 2:
        add_heads(a, s, b, sums, before, g, 2);
        break;
    case 1:
        add_heads(a, s, b, sums, before, g, 1);
        break;
    }
}

static void work(const struct attention *a, struct state *s, uint64_t unit, uint64_t head)
{
    const int64_t *u = a->units + unit * 3;
    const uint64_t request = (uint64_t)u[0];
    const size_t size = a->head_size;
    const bf16 *q = a->queries + (uint64_t)a->tokens[request] * a->query_stride + head * a->group * size;
    for (size_t i = 0; i < a->group * size; i += LANES)
        store(s->queries + i, load_bf16(q + i) * a->scale);
    float *sums[MAX_GROUP], before[MAX_GROUP];
    for (uint64_t g = 0; g < a->group; g++) {
        sums[g] = partial(a, unit, head, g);
        memset(sums[g], 0, (a->value_size + 1) * sizeof(float));
        sums[g][a->value_size + 1] = -__builtin_inff();
    }
    struct block *now = s->blocks, *next = s->blocks + 1;
    find(a, now, request, head, (size_t)u[1], (size_t)u[2]);
    for (size_t first = (size_t)u[1] + BLOCK; now->n; first += BLOCK) {
        score_keys(a, s, now);
        for (uint64_t g = 0; g < a->group; g++) {
            float *weight = sums[g] + a->value_size;
            before[g] = weigh(a, s->scores + g * BLOCK, now->n, weight + 1, weight);
        }
        find(a, next, request, head, first, (size_t)u[2]);
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
    float most = -__builtin_inff(), weight = 0.0f;
    for (uint64_t u = first; u < end; u++) {
        const float m = partial(a, u, head, g)[size + 1];
        most = m > most ? m : most;
    }
    for (uint64_t u = first; u < end; u++)
        weight += partial(a, u, head, g)[size] * __builtin_expf(partial(a, u, head, g)[size + 1] - most);
    for (size_t d = 0; d < size; d += LANES) {
        vfloat sum = {0};
        for (uint64_t u = first; u < end; u++)
            sum += load(partial(a, u, head, g) + d) * __builtin_expf(partial(a, u, head, g)[size + 1] - most);
        store_bf16(out + d, sum / weight);
    }
}

/* Called by all threads of a team (program.c). */
void decode_attention_share(const struct attention *a)
{
    struct state s;
#pragma omp for collapse(2) schedule(dynamic)
    for (uint64_t unit = 0; unit < a->num_units; unit++)
        for (uint64_t head = 0; head < a->num_kv_heads; head++)
            work(a, &s, unit, head);
#pragma omp for collapse(2) schedule(static)
    for (uint64_t request = 0; request < a->num_requests; request++)
        for (uint64_t head = 0; head < a->num_kv_heads; head++)
            for (uint64_t g = 0; g < a->group; g++)
                join(a, request, head, g);
}

void decode_attention(const struct attention *a)
{
#pragma omp parallel num_threads(a->num_threads)
    decode_attention_share(a);
}
