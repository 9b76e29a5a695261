/* Blocks of keys and values of a task of attention.c, put into lanes, and the prefetch of the next block.
 *
 * CPUs do not predict the rows of one KV head, so a block is prefetched for all heads of the task, in the order of
 * memory. A CPU drops prefetches for which it has no free buffer, so the pace must be even (attention.c), and each line
 * is prefetched again a little later. They go into L1 if it is large enough to keep them until they are read.
 */
#ifndef SPLITSERVE_BLOCKS_H
#define SPLITSERVE_BLOCKS_H

#include "operands.h"

#include <unistd.h>

#define MAX_GROUP 16

/* Prefetches after which a line is prefetched again, in case it was dropped. A power of two. */
#define AGAIN 32
/* Minimum size of L1 in bytes for prefetches into it. That of Zen 4, 32 KB, evicts a block before it is read. Other CPUs
 * with 32 KB were not measured, but Zen 3, which is as fast with L2. */
#define LEAST_L1 (48 << 10)

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
    float scale, softcap;    /* scale is positive; softcap 0: none */
    int32_t num_threads;     /* 1: too little to be shared */
    int32_t uses_tiles;      /* compute with tile instructions (tile_attend.h) */
};

/* Keys [first, end) of a block, by their places in it, with addresses; other places repeat one of them. An address is
 * that of the task's first head. */
struct block {
    size_t first, end;
    const bf16 *keys[BLOCK], *values[BLOCK];
};

/* Memory of a block that is prefetched: pieces of adjacent lines, in order, and the rest of the current piece. */
struct ahead {
    const char *at, *end;
    size_t piece, num_pieces;
    /* The last AGAIN lines, and the place of the oldest. */
    const char *lines[AGAIN];
    size_t oldest;
    int to_l2;
    struct {
        const char *begin, *end;
    } pieces[2 * BLOCK];
};

/* Whether lines are prefetched into L2 instead of L1. If the size of L1 is unknown, they are not. */
static int fetches_to_l2(void)
{
#ifdef _SC_LEVEL1_DCACHE_SIZE
    static _Atomic long size = -1;
    if (size < 0)
        size = MAX(0, sysconf(_SC_LEVEL1_DCACHE_SIZE));
    return size > 0 && size < LEAST_L1;
#else
    return 0;
#endif
}

/* Prefetch `lines` lines of the next block. */
INLINE void fetch(struct ahead *a, int lines)
{
    for (int i = 0; i < lines; i++) {
        if (a->at >= a->end) {
            if (a->piece == a->num_pieces)
                return;
            a->at = a->pieces[a->piece].begin;
            a->end = a->pieces[a->piece++].end;
        }
        const char *const again = a->lines[a->oldest];
        a->lines[a->oldest] = a->at;
        a->oldest = (a->oldest + 1) % AGAIN;
        if (a->to_l2) {
            __builtin_prefetch(a->at, 0, 2);
            __builtin_prefetch(again, 0, 2);
        } else {
            __builtin_prefetch(a->at);
            __builtin_prefetch(again);
        }
        a->at += 64;
    }
}

static void add_piece(struct ahead *a, const bf16 *begin, size_t size)
{
    a->pieces[a->num_pieces].begin = (const char *)begin;
    a->pieces[a->num_pieces++].end = (const char *)(begin + size);
}

/* Find the next block for KV heads [head, head + num_heads): the keys of [first, end) that are in the block of `first`.
 */
static void find(const struct attention *a, struct ahead *to, struct block *b, uint64_t request, uint64_t head,
                 uint64_t num_heads, size_t first, size_t end)
{
    const size_t key_row = a->num_kv_heads * a->head_size, value_row = a->num_kv_heads * a->value_size;
    /* Rows of all heads are adjacent in a page. */
    const int is_whole = num_heads == a->num_kv_heads;
    to->at = to->end = NULL;
    to->piece = to->num_pieces = 0;
    b->first = first % BLOCK;
    b->end = MIN(b->first + end - first, BLOCK);
    const int64_t *page = a->pages + request * a->pages_stride + first / a->page_size;
    size_t place = first % a->page_size;
    for (size_t i = b->first; i < b->end; page++, place = 0) {
        const size_t n = MIN(a->page_size - place, b->end - i), row = (size_t)*page * a->page_size + place;
        const bf16 *keys = a->keys + row * key_row + head * a->head_size;
        const bf16 *values = a->values + row * value_row + head * a->value_size;
        for (size_t j = 0; j < n; j += is_whole ? n : 1) {
            const size_t rows = is_whole ? n : 1;
            add_piece(to, keys + j * key_row, rows * num_heads * a->head_size);
            add_piece(to, values + j * value_row, rows * num_heads * a->value_size);
        }
        for (size_t j = 0; j < n; j++, i++) {
            b->keys[i] = keys + j * key_row;
            b->values[i] = values + j * value_row;
        }
    }
    for (size_t i = 0; i < b->first; i++) {
        b->keys[i] = b->keys[b->first];
        b->values[i] = b->values[b->first];
    }
    for (size_t i = b->end; i < BLOCK; i++) {
        b->keys[i] = b->keys[b->end - 1];
        b->values[i] = b->values[b->end - 1];
    }
}

/* Lines of the next block that are prefetched with LANES keys of a head, and with two vectors of pairs of values. */
#define PUT_PACE MAX(1, LANES * LANES / 32)
#define PAIR_PACE 3

struct state {
    /* [head_size / NUMBERS, BLOCK]. With tiles then [BLOCK / 2, value_size]: values of two keys. */
    _Alignas(64) operand keys[MAX_HEAD_SIZE / NUMBERS * BLOCK];
    _Alignas(64) float scores[MAX_GROUP * BLOCK];
    /* [group, BLOCK / NUMBERS] */
    _Alignas(64) operand weights[MAX_GROUP * BLOCK / NUMBERS];
#if NUMBERS == 1
    /* [group, head_size] */
    _Alignas(64) float queries[MAX_GROUP * MAX_HEAD_SIZE];
#endif
    struct block blocks[2];
    struct ahead ahead;
};

/* Put `words` words of LANES keys, from word `first` on, into their lanes. */
INLINE void put_keys(struct state *s, const bf16 *const *keys, size_t offset, size_t place, size_t first, size_t words)
{
    vuint rows[LANES];
    fetch(&s->ahead, PUT_PACE);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        rows[i] = (vuint){0};
        memcpy(&rows[i], keys[i] + offset + 2 * first, words * sizeof(uint32_t));
    }
    transpose(rows);
#pragma GCC unroll 16
    for (size_t i = 0; i < words; i++) {
#if NUMBERS == 2
        memcpy(s->keys + (first + i) * BLOCK + place, &rows[i], sizeof rows[i]);
#else
        store(s->keys + 2 * (first + i) * BLOCK + place, low_of(rows[i]));
        store(s->keys + (2 * (first + i) + 1) * BLOCK + place, high_of(rows[i]));
#endif
    }
}

/* Transpose the keys of a block at `offset` in their rows. The head size is a multiple of LANES. */
static void spread_keys(const struct attention *a, struct state *s, const struct block *b, size_t offset)
{
    const size_t words = a->head_size / 2;
    for (size_t place = b->first / LANES * LANES; place < b->end; place += LANES) {
        const bf16 *const *keys = b->keys + place;
        size_t first = 0;
        for (; first + LANES <= words; first += LANES)
            put_keys(s, keys, offset, place, first, LANES);
        if (first < words)
            put_keys(s, keys, offset, place, first, LANES / 2);
    }
}

/* Pair the values of keys, in whole tiles. */
INLINE void pair_values(const struct attention *a, struct state *s, const struct block *b, size_t offset)
{
    const size_t size = a->value_size;
    for (size_t i = b->first / TILE_INPUTS * TILE_INPUTS; i < whole_tiles(b->end); i += 2) {
        const bf16 *const first = b->values[i] + offset, *const second = b->values[i + 1] + offset;
        uint32_t *const to = (uint32_t *)s->keys + i / 2 * size;
        vuint pairs[2];
        size_t d = 0;
        for (; d + 2 * LANES <= size; d += 2 * LANES) {
            fetch(&s->ahead, PAIR_PACE);
            pair_up(first + d, second + d, 2, pairs);
            memcpy(to + d, pairs, sizeof pairs);
        }
        if (d < size) {
            pair_up(first + d, second + d, 1, pairs);
            memcpy(to + d, pairs, sizeof pairs[0]);
        }
    }
}

#endif
