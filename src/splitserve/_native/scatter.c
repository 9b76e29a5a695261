/* Many pieces of memory from here to there, in one call: what a loop in Python would spend, goes into the bytes.
 *
 * Plain C without Python's headers; loaded through ctypes, which lets Python's lock go for the time of the call.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* Pieces ahead whose first bytes are asked for, so that their address translations are at hand when their turn comes. */
#define PIECES_AHEAD 8
/* Bytes ahead of the one being read, over the end of a piece into the next. */
#define BYTES_AHEAD 512

#ifdef __SSE2__
/* Past the cache: the target's old bytes are not read, and nothing else is driven out. `next` is read after this. */
static void stream(char *to, const char *from, size_t length, const char *next)
{
    for (; length >= 64; length -= 64, to += 64, from += 64) {
        __builtin_prefetch(length > BYTES_AHEAD ? from + BYTES_AHEAD : next + (BYTES_AHEAD - length), 0, 0);
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32)), d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
    memcpy(to, from, length);
}
#endif

/* How far a copy of many pieces has come. */
struct position {
    uint64_t piece;  /* the first that is not done */
    uint64_t offset; /* bytes of it that are done */
};

static void copy_piece(char *to, const char *from, size_t length, const char *next, int streaming)
{
#ifdef __SSE2__
    if (streaming && length >= 2 * BYTES_AHEAD) {
        /* Whole lines of the cache, or the stores would not go past it. */
        size_t head = -(uintptr_t)to & 63;
        memcpy(to, from, head);
        stream(to + head, from + head, length - head, next);
        return;
    }
#endif
    memcpy(to, from, length);
}

/* A row of the copy table (copies.py), as numpy packs it. */
struct __attribute__((packed)) copy {
    uint32_t src_region;
    uint64_t src_offset;
    uint32_t dst_region;
    uint64_t dst_offset;
    uint64_t length;
};

/* The first of n copies whose source, or target, is not inside its region; n where all are. lengths: of the regions. */
uint64_t scatter_outside(const struct copy *copies, uint64_t n, const uint64_t *lengths, uint64_t num_regions,
                         int is_target)
{
    for (uint64_t i = 0; i < n; i++) {
        uint64_t region = is_target ? copies[i].dst_region : copies[i].src_region;
        uint64_t offset = is_target ? copies[i].dst_offset : copies[i].src_offset;
        if (region >= num_regions || offset > lengths[region] || copies[i].length > lengths[region] - offset)
            return i;
    }
    return n;
}

static const char *source(const struct copy *copy, const uint64_t *bases)
{
    return (const char *)(uintptr_t)(bases[copy->src_region] + copy->src_offset);
}

static char *target(const struct copy *copy, const uint64_t *bases)
{
    return (char *)(uintptr_t)(bases[copy->dst_region] + copy->dst_offset);
}

/* Carry out n copies in their order, at most `max_bytes` in this call. from, to: where our and their regions begin.
 * `at` says where to begin and is moved on; all is done when at->piece is n. No source overlaps a target.
 * streaming: the bytes in all are many more than a cache holds.
 */
void scatter_copy(const struct copy *copies, uint64_t n, const uint64_t *from, const uint64_t *to, struct position *at,
                  uint64_t max_bytes, int streaming)
{
    uint64_t i = at->piece, offset = at->offset;
    for (; i < n; i++, offset = 0) {
        uint64_t length = copies[i].length - offset;
        uint64_t now = length < max_bytes ? length : max_bytes;
        if (i + PIECES_AHEAD < n) {
            __builtin_prefetch(target(&copies[i + PIECES_AHEAD], to), 0, 0);
            __builtin_prefetch(source(&copies[i + PIECES_AHEAD], from), 0, 0);
        }
        copy_piece(target(&copies[i], to) + offset, source(&copies[i], from) + offset, (size_t)now,
                   source(&copies[i + 1 < n ? i + 1 : i], from), streaming);
        max_bytes -= now;
        if (now < length) {
            offset += now;
            break;
        }
    }
    at->piece = i;
    at->offset = offset;
#ifdef __SSE2__
    /* Whoever is told next that the bytes are there must find them there. */
    _mm_sfence();
#endif
}
