/* Many kernels in one call, so that threads are woken once for all of them.
 *
 * All threads of a team run the same list of calls. A kernel's function `..._share` computes this thread's share, and
 * returns when all threads are done: a call may read what the one before it wrote.
 */
#include <stdint.h>

/* The same structures for ctypes: splitserve/engine/native/library.py. */
struct call {
    void (*share)(const void *args);
    const void *args; /* the structure of that kernel */
};

struct program {
    const struct call *calls; /* [num_calls] */
    uint64_t num_calls;
    int32_t num_threads;
};

void run_program(const struct program *p)
{
#pragma omp parallel num_threads(p->num_threads)
    for (uint64_t i = 0; i < p->num_calls; i++)
        p->calls[i].share(p->calls[i].args);
}
