/* Many kernels in one call, one after the other, without Python between them: a call may read what the one before it
 * wrote. Threads that share the tasks of one kernel are still awake for the next.
 */
#include "pool.h"

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

void run_program(const struct program *p)
{
    for (uint64_t i = 0; i < p->num_calls; i++)
        run_kernel(p->calls[i].kernel, p->calls[i].args, (uint64_t)p->num_threads);
}
