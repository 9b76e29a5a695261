/* The chosen experts of a layer for all tokens of a step: gated MLPs over packed weights, weighted and added.
 *
 * 1. Choices are sorted by expert, and the rows of the tokens are copied in that order.
 * 2. Each expert in use computes its rows, by the linear layers of its kind.
 * 3. A token's results are added in the order of its choices, in float32.
 *
 * A row of a linear layer does not depend on the others, so the result of a token depends on that token only.
 */
#include "linear.h"

/* The same structure for ctypes: splitserve/engine/kernels/library.py. */
struct experts {
    const bf16 *inputs;          /* [num_tokens, size] */
    const int64_t *chosen;       /* [num_tokens, num_chosen]; other numbers than [0, num_experts): no expert */
    const float *weights;        /* [num_tokens, num_chosen] */
    bf16 *outputs;               /* [num_tokens, size] */
    const struct linear *gate_up; /* [num_experts], without the fields that a call sets */
    const struct linear *down;   /* [num_experts] */
    int64_t *firsts;             /* [num_experts + 1]: filled with the first row of each expert */
    int64_t *rows;               /* [num_tokens, num_chosen]: filled with the row of each choice, -1: no expert */
    bf16 *gathered, *gated, *results; /* [num_tokens x num_chosen] rows of size, inner_size, size */
    float *scratch;              /* for the largest number of rows: see struct linear */
    uint64_t num_tokens, num_chosen, num_experts, size, inner_size;
    int32_t num_threads;
};

static int has_expert(const struct experts *e, uint64_t choice)
{
    return e->chosen[choice] >= 0 && (uint64_t)e->chosen[choice] < e->num_experts;
}

/* Give each choice a row: expert after expert, and within an expert in the order of tokens. */
static void sort_choices(const struct experts *e)
{
    const uint64_t num_choices = e->num_tokens * e->num_chosen;
    memset(e->firsts, 0, (e->num_experts + 1) * sizeof *e->firsts);
    for (uint64_t i = 0; i < num_choices; i++)
        if (has_expert(e, i))
            e->firsts[e->chosen[i] + 1]++;
    for (uint64_t x = 0; x < e->num_experts; x++)
        e->firsts[x + 1] += e->firsts[x];
    /* Each expert's next free row; at the end the first row of the expert after it. */
    for (uint64_t i = 0; i < num_choices; i++)
        e->rows[i] = has_expert(e, i) ? e->firsts[e->chosen[i]]++ : -1;
    for (uint64_t x = e->num_experts; x > 0; x--)
        e->firsts[x] = e->firsts[x - 1];
    e->firsts[0] = 0;
}

static void compute(const struct experts *e, const struct linear *layer, const bf16 *inputs, uint64_t input_stride,
                    bf16 *outputs, uint64_t num_rows)
{
    struct linear call = *layer;
    call.inputs = inputs;
    call.input_stride = input_stride;
    call.outputs = outputs;
    call.num_rows = num_rows;
    call.num_threads = e->num_threads;
    call.scratch = e->scratch;
    run_kernel(&linear_kernel, &call, (uint64_t)e->num_threads);
}

static void add_results(const struct experts *e, uint64_t token)
{
    for (uint64_t i = 0; i < e->size; i += LANES) {
        const uint64_t n = MIN(LANES, e->size - i);
        vfloat sum = {0};
        for (uint64_t c = token * e->num_chosen; c < (token + 1) * e->num_chosen; c++) {
            if (e->rows[c] < 0)
                continue;
            bf16 result[LANES] = {0};
            memcpy(result, e->results + e->rows[c] * e->size + i, n * sizeof(bf16));
            sum += load_bf16(result) * e->weights[c];
        }
        store_bf16_first(e->outputs + token * e->size + i, sum, n);
    }
}

static uint64_t one_phase(const void *args)
{
    (void)args;
    return 1;
}

static uint64_t gather_tasks(const void *args, uint64_t phase)
{
    const struct experts *e = args;
    (void)phase;
    return tasks_for(e->num_tokens * e->num_chosen, e->size);
}

static void run_gather(const void *args, uint64_t phase, uint64_t task)
{
    const struct experts *e = args;
    const uint64_t part = items_a_task(e->size);
    (void)phase;
    for (uint64_t i = task * part; i < MIN(e->num_tokens * e->num_chosen, (task + 1) * part); i++)
        if (e->rows[i] >= 0)
            memcpy(e->gathered + e->rows[i] * e->size, e->inputs + i / e->num_chosen * e->size, e->size * sizeof(bf16));
}

static uint64_t add_tasks(const void *args, uint64_t phase)
{
    const struct experts *e = args;
    (void)phase;
    return tasks_for(e->num_tokens, e->size * e->num_chosen);
}

static void run_add(const void *args, uint64_t phase, uint64_t task)
{
    const struct experts *e = args;
    const uint64_t part = items_a_task(e->size * e->num_chosen);
    (void)phase;
    for (uint64_t token = task * part; token < MIN(e->num_tokens, (task + 1) * part); token++)
        add_results(e, token);
}

static const struct kernel gather_kernel = {one_phase, gather_tasks, run_gather};
static const struct kernel add_kernel = {one_phase, add_tasks, run_add};

void experts(const struct experts *e)
{
    sort_choices(e);
    run_kernel(&gather_kernel, e, (uint64_t)e->num_threads);
    for (uint64_t x = 0; x < e->num_experts; x++) {
        const uint64_t first = (uint64_t)e->firsts[x], num_rows = (uint64_t)e->firsts[x + 1] - first;
        if (!num_rows)
            continue;
        bf16 *gated = e->gated + first * e->inner_size;
        compute(e, &e->gate_up[x], e->gathered + first * e->size, e->size, gated, num_rows);
        compute(e, &e->down[x], gated, e->inner_size, e->results + first * e->size, num_rows);
    }
    run_kernel(&add_kernel, e, (uint64_t)e->num_threads);
}
