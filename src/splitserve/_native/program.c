/* Many kernels in one call, one after the other, without Python between them: a call may read what the one before it
 * wrote. Threads that share the tasks of one kernel are still awake for the next.
 */
#include "linear.h"

/* Bytes of the next linear layer's weights that threads without a task fetch. Measured with L2 caches of 2 MB: 256 KB
 * gain nothing, 2 MB no more. */
#define AHEAD_BYTES (1024 * 1024)

/* The same structures for ctypes: splitserve/engine/kernels/library.py. */
struct call {
    const struct kernel *kernel;
    const void *args; /* the structure of that kernel */
};

struct program {
    const struct call *calls; /* [num_calls] */
    uint64_t num_calls;
    int32_t num_threads;
};

static uint64_t weight_bytes(const struct linear *l)
{
    const uint64_t bits = l->kind == GROUPS4 ? 4 : l->kind == BF16 || l->kind == PAIRS ? 16 : 8;
    const int is_gated = l->epilogue == SILU_MUL || l->epilogue == GELU_MUL;
    return l->num_inputs * l->num_outputs * (is_gated ? 2 : 1) * bits / 8;
}

/* Memory is the limit of decode steps, so it is read during the short kernels between linear layers, too. */
static void fetch_next_weights(const struct program *p, uint64_t next)
{
    if (next == p->num_calls) {
        fetch_while_waiting(NULL, 0);
        return;
    }
    const struct linear *l = p->calls[next].args;
    fetch_while_waiting(l->panels, MIN(AHEAD_BYTES, weight_bytes(l)));
}

void run_program(const struct program *p)
{
    uint64_t next = 0; /* the next linear layer */
    for (uint64_t i = 0; i < p->num_calls; i++) {
        if (next <= i) {
            for (next = i + 1; next < p->num_calls && p->calls[next].kernel != &linear_kernel;)
                next++;
            fetch_next_weights(p, next);
        }
        run_kernel(p->calls[i].kernel, p->calls[i].args, (uint64_t)p->num_threads);
    }
}
