/* Steps between the linear layers of a decoder: norms, rotary positions, and storing new tokens in the pool.
 *
 * Functions `..._share` are called by all threads of a team (program.c), or by one thread alone.
 */
#include "vectors.h"

/* The same structures for ctypes: splitserve/engine/native/library.py. */
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

void rms_norm_share(const struct rms_norm *n)
{
#pragma omp for schedule(static)
    for (uint64_t row = 0; row < n->num_rows; row++) {
        const bf16 *x = n->inputs + row * n->size;
        if (n->residual) {
            add_row(n->residual + row * n->size, x, n->size);
            x = n->residual + row * n->size;
        }
        norm_row(x, n->weight, n->outputs + row * n->size, n->size, n->epsilon);
    }
}

void rms_norm(const struct rms_norm *n)
{
#pragma omp parallel num_threads(n->num_threads) if (n->num_rows * n->size > 1 << 15)
    rms_norm_share(n);
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

void rotate_share(const struct rotate *r)
{
    const size_t size = r->head_size, num_heads = r->num_query_heads + r->num_key_heads;
#pragma omp for schedule(static)
    for (uint64_t row = 0; row < r->num_rows; row++)
        for (size_t h = 0; h < num_heads; h++) {
            bf16 *head = r->states + row * r->stride + h * size;
            const float *norm = h < r->num_query_heads ? r->query_norm : r->key_norm;
            if (norm)
                norm_row(head, norm, head, size, r->epsilon);
            rotate_head(head, r->cos + row * size, r->sin + row * size, size / 2);
        }
}

void rotate(const struct rotate *r)
{
    const size_t num_heads = r->num_query_heads + r->num_key_heads;
#pragma omp parallel num_threads(r->num_threads) if (r->num_rows * num_heads * r->head_size > 1 << 15)
    rotate_share(r);
}

struct store_tokens {
    const bf16 *states;   /* [num_rows, size], rows `stride` apart */
    bf16 *pool;           /* [slots, size] */
    const int64_t *slots; /* [num_rows] */
    const int64_t *zeroed; /* [num_zeroed] slots to be cleared */
    uint64_t stride, num_rows, size, num_zeroed;
};

void store_tokens_share(const struct store_tokens *s)
{
#pragma omp for schedule(static)
    for (uint64_t row = 0; row < s->num_rows; row++)
        memcpy(s->pool + (size_t)s->slots[row] * s->size, s->states + row * s->stride, s->size * sizeof(bf16));
#pragma omp for schedule(static)
    for (uint64_t i = 0; i < s->num_zeroed; i++)
        memset(s->pool + (size_t)s->zeroed[i] * s->size, 0, s->size * sizeof(bf16));
}
