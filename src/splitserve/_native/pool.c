/* A pool of threads for kernels, and the division of a host's cores between the processes that have one.
 *
 * 1. The calling thread publishes a phase in one word: its number, its tasks, and the next task to take. Threads take
 *    tasks by adding one to the word. The caller takes tasks itself and never waits for a thread to arrive, only for
 *    tasks that were taken.
 * 2. So a thread without a core and without a task delays nothing. A thread may leave between two tasks, and the others
 *    take its share. A barrier (OpenMP) would wait for every thread instead.
 * 3. Processes of one host share a table of their cores. A process that computes owns its home cores. The cores of idle
 *    processes belong to those that compute, until their owner begins a step. Helpers check the table before each task.
 *
 * A second caller at the same time computes alone.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>

/* The word has the next task in its low bits, then the number of tasks, then the number of the phase. */
#define TASK_BITS 20
#define MAX_TASKS (1u << TASK_BITS)
#define MAX_THREADS 256
/* Rounds that a thread waits without sleeping: some 30 microseconds, and the time in which it fetches memory. Kernels of
 * a step follow each other sooner. */
#define SPINS 1000
/* Bytes that a waiting thread fetches before it checks for a task again. */
#define PIECE_BYTES 2048

#if defined(__x86_64__) || defined(__i386__)
#define pause_thread() __builtin_ia32_pause()
#else
#define pause_thread() ((void)0)
#endif

/* A process in the table of a host's cores: one cache line. The same structure for ctypes:
 * splitserve/engine/kernels/cores.py. */
struct core_share {
    _Atomic uint32_t home_cores; /* 0: no process */
    _Atomic uint32_t is_busy;
    uint32_t has_prompts; /* for Python alone */
    uint32_t unused[13];
};

static struct {
    const struct kernel *kernel;
    const void *args;
    uint64_t phase;
    uint64_t num_threads;
    _Alignas(64) _Atomic uint64_t word;
    _Alignas(64) _Atomic uint64_t done;
    _Alignas(64) _Atomic uint32_t num_sleeping;
    /* Memory to fetch, and the number of its pieces that were taken. */
    const char *_Atomic ahead;
    _Atomic uint64_t ahead_pieces;
    _Alignas(64) _Atomic uint64_t ahead_taken;
    atomic_flag is_used;
    pthread_mutex_t lock;
    pthread_cond_t published;
    uint64_t num_helpers;
    /* NULL: the process has all its threads to itself. */
    struct core_share *_Atomic shares;
    uint64_t num_shares, own_share, num_cores;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .published = PTHREAD_COND_INITIALIZER, .is_used = ATOMIC_FLAG_INIT};

static uint64_t next_task(uint64_t word)
{
    return word & (MAX_TASKS - 1);
}

static uint64_t tasks_of(uint64_t word)
{
    return word >> TASK_BITS & (MAX_TASKS - 1);
}

/* Threads that this process may use now: its home cores, and its share of the cores of idle processes. */
uint64_t threads_allowed(void)
{
    struct core_share *const shares = atomic_load(&pool.shares);
    if (!shares)
        return pool.num_threads;
    const uint64_t own = shares[pool.own_share].home_cores;
    uint64_t busy = own;
    for (uint64_t i = 0; i < pool.num_shares; i++)
        if (i != pool.own_share && atomic_load_explicit(&shares[i].is_busy, memory_order_relaxed))
            busy += shares[i].home_cores;
    return !busy || busy >= pool.num_cores ? own : own + (pool.num_cores - busy) * own / busy;
}

static int has_task(uint64_t word)
{
    return next_task(word) < tasks_of(word);
}

/* Take a task of the current phase and run it. Returns 0 if there is none. */
static int run_task(void)
{
    const uint64_t word = atomic_fetch_add(&pool.word, 1);
    if (!has_task(word))
        return 0;
    /* The phase is not replaced before this task is done. */
    pool.kernel->run(pool.args, pool.phase, next_task(word));
    return 1;
}

void fetch_while_waiting(const void *from, uint64_t bytes)
{
    atomic_store_explicit(&pool.ahead_pieces, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.ahead, from, memory_order_relaxed);
    atomic_store_explicit(&pool.ahead_taken, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.ahead_pieces, bytes / PIECE_BYTES, memory_order_relaxed);
}

/* One round of waiting. */
static void wait_a_little(void)
{
    const uint64_t num_pieces = atomic_load_explicit(&pool.ahead_pieces, memory_order_relaxed);
    if (atomic_load_explicit(&pool.ahead_taken, memory_order_relaxed) >= num_pieces) {
        pause_thread();
        return;
    }
    const uint64_t piece = atomic_fetch_add_explicit(&pool.ahead_taken, 1, memory_order_relaxed);
    const char *from = atomic_load_explicit(&pool.ahead, memory_order_relaxed) + piece * PIECE_BYTES;
    for (uint64_t i = 0; i < PIECE_BYTES; i += 64)
        __builtin_prefetch(from + i, 0, 2);
}

static void sleep_after(uint64_t word)
{
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.num_sleeping, 1);
    if (atomic_load(&pool.word) >> TASK_BITS == word >> TASK_BITS)
        pthread_cond_wait(&pool.published, &pool.lock);
    atomic_fetch_sub(&pool.num_sleeping, 1);
    pthread_mutex_unlock(&pool.lock);
}

static void wake_helpers(void)
{
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(&pool.published);
    pthread_mutex_unlock(&pool.lock);
}

static void *help(void *index)
{
    const uint64_t thread = (uint64_t)(uintptr_t)index;
    uint64_t spins = 0;
    for (;;) {
        const uint64_t word = atomic_load(&pool.word);
        const int is_allowed = thread < threads_allowed();
        if (has_task(word) && is_allowed) {
            if (run_task())
                atomic_fetch_add(&pool.done, 1);
            spins = 0;
        } else if (is_allowed && spins++ < SPINS) {
            wait_a_little();
        } else {
            sleep_after(word);
            spins = 0;
        }
    }
    return NULL;
}

/* The threads of a parent process do not exist in its child. */
static void forget_helpers(void)
{
    pool.num_helpers = 0;
    pool.num_sleeping = 0;
    pool.shares = NULL;
    atomic_flag_clear(&pool.is_used);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.published, NULL);
}

/* Start helpers until there are `num_helpers`, or fewer if the system refuses. They block signals, which other threads
 * handle. */
static void start_helpers(uint64_t num_helpers)
{
    static int has_handler;
    if (!has_handler)
        has_handler = !pthread_atfork(NULL, NULL, forget_helpers);
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (pool.num_helpers < num_helpers) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(uintptr_t)(pool.num_helpers + 1)))
            break;
        pthread_detach(thread);
        pool.num_helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

static void run_alone(const struct kernel *kernel, const void *args, uint64_t phase, uint64_t num_tasks)
{
    for (uint64_t task = 0; task < num_tasks; task++)
        kernel->run(args, phase, task);
}

static void run_together(const struct kernel *kernel, const void *args, uint64_t phase, uint64_t num_tasks)
{
    pool.kernel = kernel;
    pool.args = args;
    pool.phase = phase;
    atomic_store(&pool.done, 0);
    const uint64_t number = (atomic_load(&pool.word) >> 2 * TASK_BITS) + 1;
    atomic_store(&pool.word, number << 2 * TASK_BITS | num_tasks << TASK_BITS);
    uint64_t own = 0, num_woken = 1;
    do {
        /* Also when another process has ended its step since the last task. */
        const uint64_t allowed = atomic_load(&pool.num_sleeping) ? threads_allowed() : num_woken;
        if (allowed > num_woken)
            wake_helpers();
        num_woken = allowed;
    } while (run_task() && ++own);
    for (uint64_t spins = 0; atomic_load(&pool.done) + own < num_tasks; spins++)
        if (spins < SPINS)
            wait_a_little();
        else
            sched_yield();
}

void run_kernel(const struct kernel *kernel, const void *args, uint64_t num_threads)
{
    const int is_mine = !atomic_flag_test_and_set(&pool.is_used);
    if (is_mine) {
        pool.num_threads = num_threads < MAX_THREADS ? num_threads : MAX_THREADS;
        if (pool.num_helpers + 1 < pool.num_threads)
            start_helpers(pool.num_threads - 1);
    }
    const uint64_t num_phases = kernel->num_phases(args);
    for (uint64_t phase = 0; phase < num_phases; phase++) {
        const uint64_t num_tasks = kernel->num_tasks(args, phase);
        if (num_tasks > 1 && num_tasks < MAX_TASKS && num_threads > 1 && is_mine)
            run_together(kernel, args, phase, num_tasks);
        else
            run_alone(kernel, args, phase, num_tasks);
    }
    if (is_mine)
        atomic_flag_clear(&pool.is_used);
}

/* Share cores with the other processes of a table with `num_shares` rows. `own`: the row of this process. `shares`
 * NULL: share no cores. Do not call this during a kernel. When it returns, no thread reads the previous table.
 */
void share_cores(struct core_share *shares, uint64_t num_shares, uint64_t own, uint64_t num_cores)
{
    atomic_store(&pool.shares, NULL);
    /* Helpers without a task fall asleep soon. */
    while (atomic_load(&pool.num_sleeping) < pool.num_helpers)
        sched_yield();
    pool.num_shares = num_shares;
    pool.own_share = own;
    pool.num_cores = num_cores < MAX_THREADS ? num_cores : MAX_THREADS;
    atomic_store(&pool.shares, shares);
}
