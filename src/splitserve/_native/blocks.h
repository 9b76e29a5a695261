/* Blocks of keys and values of a decode step (attention.c): found in the pages, fetched ahead, and put into the lanes of
 * vectors. */
#ifndef SPLITSERVE_BLOCKS_H
#define SPLITSERVE_BLOCKS_H

#include "tile_attend.h"

#define MAX_GROUP 16

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
    float scale, softcap;    /* softcap 0: none */
    int32_t num_threads;     /* 1: too little to be shared */
    int32_t uses_tiles;      /* compute with tile instructions (tile_attend.h) */
};

/* Keys [first, end) of a block, by their places in it, with addresses; other places repeat one of them. An address is
 * that of the task's first head. */
struct block {
    size_t first, end;
    const bf16 *keys[BLOCK], *values[BLOCK];
};

struct state {
    /* [head_size / 2, BLOCK]: two numbers of each key. With tiles then [BLOCK / 2, value_size]: values of two keys. */
    _Alignas(64) uint32_t keys[MAX_HEAD_SIZE / 2 * BLOCK];
    _Alignas(64) float scores[MAX_GROUP * BLOCK];
    _Alignas(64) bf16 weights[MAX_GROUP * BLOCK];
    struct block now, next;
    /* Place in `next` that is prefetched next: a row, and numbers before it in the row of `row_size`. */
    size_t row, offset, row_size;
};

/* Prefetch `lines` lines of keys and as many of values of the next block. */
INLINE void fetch(struct state *s, int lines)
{
    for (int i = 0; i < lines && s->row < s->next.end; i++) {
        __builtin_prefetch(s->next.keys[s->row] + s->offset, 0, 2);
        __builtin_prefetch(s->next.values[s->row] + s->offset, 0, 2);
        s->offset += 64 / sizeof(bf16);
        if (s->offset >= s->row_size) {
            s->offset = 0;
            s->row++;
        }
    }
}

/* Find the next block: the keys of [first, end) that are in the block of `first`; none if end <= first. */
INLINE void find(const struct attention *a, struct state *s, uint64_t request, uint64_t head, size_t first, size_t end)
{
    struct block *const b = &s->next;
    s->row = first % BLOCK;
    s->offset = 0;
    b->first = first % BLOCK;
    b->end = first < end ? MIN(b->first + end - first, BLOCK) : 0;
    const int64_t *page = a->pages + request * a->pages_stride + first / a->page_size;
    size_t place = first % a->page_size;
    for (size_t i = b->first; i < b->end; i++) {
        const size_t row = ((size_t)*page * a->page_size + place) * a->num_kv_heads + head;
        b->keys[i] = a->keys + row * a->head_size;
        b->values[i] = a->values + row * a->value_size;
        if (++place == a->page_size) {
            place = 0;
            page++;
        }
    }
    if (!b->end)
        return;
    for (size_t i = 0; i < b->first; i++) {
        b->keys[i] = b->keys[b->first];
        b->values[i] = b->values[b->first];
    }
    for (size_t i = b->end; i < BLOCK; i++) {
        b->keys[i] = b->keys[b->end - 1];
        b->values[i] = b->values[b->end - 1];
    }
}

/* Put `words` words of LANES keys, from word `first` on, into their lanes. */
INLINE void put_keys(struct state *s, const bf16 *const *keys, size_t offset, size_t place, size_t first, size_t words)
{
    vuint rows[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        rows[i] = (vuint){0};
        memcpy(&rows[i], keys[i] + offset + 2 * first, words * sizeof(uint32_t));
    }
    transpose(rows);
#pragma GCC unroll 16
    for (size_t i = 0; i < words; i++)
        memcpy(s->keys + (first + i) * BLOCK + place, &rows[i], sizeof rows[i]);
}

/* Transpose the keys of a block at `offset` in their rows. The head size is a multiple of LANES. */
INLINE void spread_keys(const struct attention *a, struct state *s, const struct block *b, size_t offset)
{
    const size_t words = a->head_size / 2;
    for (size_t place = b->first / LANES * LANES; place < b->end; place += LANES) {
        const bf16 *const *keys = b->keys + place;
        size_t first = 0;
        for (; first + LANES <= words; first += LANES) {
            fetch(s, USES_TILES(a) ? LANES / 2 : 0);
            put_keys(s, keys, offset, place, first, LANES);
        }
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
        uint32_t *const to = s->keys + i / 2 * size;
        vuint pairs[2];
        size_t d = 0;
        for (; d + 2 * LANES <= size; d += 2 * LANES) {
            fetch(s, 1);
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
