/* Steps between the linear layers of a decoder: norms, rotary positions, and storing new tokens in the pool.
 *
 * Few rows are one task.
 */
#include "pool.h"
#include "vectors.h"

#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* The same structures for ctypes: splitserve/engine/kernels/library.py. */
struct rms_norm {
    const bf16 *inputs;  /* [num_rows, size] */
    const float *weight; /* [size] */
    bf16 *residual;      /* [num_rows, size] or NULL: becomes residual + inputs, and is normed instead of inputs */
    bf16 *outputs;       /* [num_rows, size] */
    uint64_t num_rows, size;
    float epsilon;
    int32_t num_threads;
};

/* x / sqrt(mean(x^2) + epsilon) x weight; may be in place. */
static void norm_row(const bf16 *x, const float *weight, bf16 *out, size_t size, float epsilon)
{
    vfloat squares = {0};
    size_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vfloat v = load_bf16(x + i);
        squares += v * v;
    }
    float sum = sum_of(squares);
    for (size_t j = i; j < size; j++)
        sum += from_bf16(x[j]) * from_bf16(x[j]);
    const float scale = 1.0f / __builtin_sqrtf(sum / (float)size + epsilon);
    for (i = 0; i + LANES <= size; i += LANES)
        store_bf16(out + i, load_bf16(x + i) * scale * load(weight + i));
    for (; i < size; i++)
        store_bf16_first(out + i, splat(from_bf16(x[i]) * scale * weight[i]), 1);
}

static void add_row(bf16 *to, const bf16 *from, size_t size)
{
    size_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store_bf16(to + i, load_bf16(to + i) + load_bf16(from + i));
    for (; i < size; i++)
        store_bf16_first(to + i, splat(from_bf16(to[i]) + from_bf16(from[i])), 1);
}

static uint64_t one_phase(const void *args)
{
    (void)args;
    return 1;
}

static uint64_t norm_tasks(const void *args, uint64_t phase)
{
    const struct rms_norm *n = args;
    (void)phase;
    return tasks_for(n->num_rows, n->size);
}

static void run_norm(const void *args, uint64_t phase, uint64_t task)
{
    const struct rms_norm *n = args;
    const uint64_t rows = items_a_task(n->size);
    (void)phase;
    for (uint64_t row = task * rows; row < MIN(n->num_rows, (task + 1) * rows); row++) {
        const bf16 *x = n->inputs + row * n->size;
        if (n->residual) {
            add_row(n->residual + row * n->size, x, n->size);
            x = n->residual + row * n->size;
        }
        norm_row(x, n->weight, n->outputs + row * n->size, n->size, n->epsilon);
    }
}

const struct kernel rms_norm_kernel = {one_phase, norm_tasks, run_norm};

void rms_norm(const struct rms_norm *n)
{
    run_kernel(&rms_norm_kernel, n, (uint64_t)n->num_threads);
}

struct rotate {
    bf16 *states;             /* [num_rows, num_heads, head_size], rows `stride` apart: queries, then keys; in place */
    const bf16 *cos, *sin;    /* [num_rows, head_size] */
    const float *query_norm;  /* [head_size] or NULL */
    const float *key_norm;
    uint64_t stride, num_rows, num_query_heads, num_key_heads, head_size;
    float epsilon;            /* of the norms */
    int32_t num_threads;
};

/* Rotate both halves: (a, b) -> (a cos - b sin, b cos + a sin). half is a multiple of LANES. */
static void rotate_head(bf16 *head, const bf16 *cos, const bf16 *sin, size_t half)
{
    for (size_t i = 0; i < half; i += LANES) {
        const vfloat a = load_bf16(head + i), b = load_bf16(head + half + i);
        store_bf16(head + i, a * load_bf16(cos + i) - b * load_bf16(sin + i));
        store_bf16(head + half + i, b * load_bf16(cos + half + i) + a * load_bf16(sin + half + i));
    }
}

static uint64_t row_numbers(const struct rotate *r)
{
    return (r->num_query_heads + r->num_key_heads) * r->head_size;
}

static uint64_t rotate_tasks(const void *args, uint64_t phase)
{
    const struct rotate *r = args;
    (void)phase;
    return tasks_for(r->num_rows, row_numbers(r));
}

static void run_rotate(const void *args, uint64_t phase, uint64_t task)
{
    const struct rotate *r = args;
    const size_t size = r->head_size, num_heads = r->num_query_heads + r->num_key_heads;
    const uint64_t rows = items_a_task(row_numbers(r));
    (void)phase;
    for (uint64_t row = task * rows; row < MIN(r->num_rows, (task + 1) * rows); row++)
        for (size_t h = 0; h < num_heads; h++) {
            bf16 *head = r->states + row * r->stride + h * size;
            const float *norm = h < r->num_query_heads ? r->query_norm : r->key_norm;
            if (norm)
                norm_row(head, norm, head, size, r->epsilon);
            rotate_head(head, r->cos + row * size, r->sin + row * size, size / 2);
        }
}

const struct kernel rotate_kernel = {one_phase, rotate_tasks, run_rotate};

void rotate(const struct rotate *r)
{
    run_kernel(&rotate_kernel, r, (uint64_t)r->num_threads);
}

struct store_tokens {
    const bf16 *states;   /* [num_rows, size], rows `stride` apart */
    bf16 *pool;           /* [slots, size] */
    const int64_t *slots; /* [num_rows] */
    const int64_t *zeroed; /* [num_zeroed] slots to be cleared */
    uint64_t stride, num_rows, size, num_zeroed;
};

static uint64_t store_phases(const void *args)
{
    return ((const struct store_tokens *)args)->num_zeroed ? 2 : 1;
}

static uint64_t store_tasks(const void *args, uint64_t phase)
{
    const struct store_tokens *s = args;
    return phase ? 1 : tasks_for(s->num_rows, s->size);
}

static void run_store(const void *args, uint64_t phase, uint64_t task)
{
    const struct store_tokens *s = args;
    const uint64_t rows = items_a_task(s->size);
    if (phase) {
        for (uint64_t i = 0; i < s->num_zeroed; i++)
            memset(s->pool + (size_t)s->zeroed[i] * s->size, 0, s->size * sizeof(bf16));
        return;
    }
    for (uint64_t row = task * rows; row < MIN(s->num_rows, (task + 1) * rows); row++)
        memcpy(s->pool + (size_t)s->slots[row] * s->size, s->states + row * s->stride, s->size * sizeof(bf16));
}

const struct kernel store_tokens_kernel = {store_phases, store_tasks, run_store};

void store_tokens(const struct store_tokens *s)
{
    run_kernel(&store_tokens_kernel, s, 1);
}
