/* Threads that share the tasks of kernels. */
#ifndef SPLITSERVE_POOL_H
#define SPLITSERVE_POOL_H

#include <stdint.h>

/* A kernel has phases, which run one after the other. A phase has tasks, which any threads run in any order. `args`:
 * the structure with the kernel's arguments. */
struct kernel {
    uint64_t (*num_phases)(const void *args);
    uint64_t (*num_tasks)(const void *args, uint64_t phase);
    void (*run)(const void *args, uint64_t phase, uint64_t task);
};

/* Items of `numbers` numbers each in one task: enough that a task is worth its cost. */
static inline uint64_t items_a_task(uint64_t numbers)
{
    return numbers >= 1 << 15 ? 1 : (1 << 15) / numbers;
}

static inline uint64_t tasks_for(uint64_t num_items, uint64_t numbers)
{
    return (num_items + items_a_task(numbers) - 1) / items_a_task(numbers);
}

/* Run a kernel with at most `num_threads` threads, the calling one among them. */
void run_kernel(const struct kernel *kernel, const void *args, uint64_t num_threads);

/* Memory that the next kernels read, NULL for none: threads that wait for a task fetch it into their caches. */
void fetch_while_waiting(const void *from, uint64_t bytes);

#endif
