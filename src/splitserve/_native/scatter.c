/* Copies of many pieces of memory in one call, without the cost of a loop in Python.
 *
 * Plain C without Python's headers; loaded through ctypes, which releases Python's lock during the call.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "copies.h"

/* Pieces ahead of which the first bytes are prefetched: their addresses are translated before the copy reaches them. */
#define PIECES_AHEAD 8
/* Bytes to prefetch ahead of the current one, across the end of a piece into the next. One line of a page less than a
 * page, because the processor does not prefetch across the ends of pages by itself. */
#define BYTES_AHEAD 4032
/* Shorter pieces are written through the cache. */
#define MIN_STREAMED 1024

#ifdef __x86_64__
#define AVX __attribute__((target("avx")))
#define AVX512 __attribute__((target("avx512f")))

/* Write one cache line past the cache, in stores of the width in the name. to: start of a line. */
static inline void line_16(char *to, const char *from)
{
    const __m128i *line = (const __m128i *)from;
    __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
    __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)to + 1, b);
    _mm_stream_si128((__m128i *)to + 2, c);
    _mm_stream_si128((__m128i *)to + 3, d);
}

AVX static inline void line_32(char *to, const char *from)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)from), b = _mm256_loadu_si256((const __m256i *)from + 1);
    _mm256_stream_si256((__m256i *)to, a);
    _mm256_stream_si256((__m256i *)to + 1, b);
}

AVX512 static inline void line_64(char *to, const char *from)
{
    _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512((const __m512i *)from));
}

/* Copy `length` bytes, whole lines: the target's old bytes are not read, and no other data is evicted from the cache.
 * next: the address read after this. One store per line is up to half as fast again as four.
 */
#define STREAM(TARGET, NAME, COPY_LINE)                                                                                \
    TARGET static void NAME(char *to, const char *from, size_t length, const char *next)                               \
    {                                                                                                                  \
        size_t ahead = length < BYTES_AHEAD ? length : BYTES_AHEAD;                                                    \
        for (; length; length -= 64, to += 64, from += 64) {                                                           \
            __builtin_prefetch(length > ahead ? from + ahead : next + (ahead - length), 0, 3);                         \
            COPY_LINE(to, from);                                                                                       \
        }                                                                                                              \
    }
STREAM(, stream_16, line_16)
STREAM(AVX, stream_32, line_32)
STREAM(AVX512, stream_64, line_64)

typedef void streamer(char *, const char *, size_t, const char *);

/* The function with stores of that many bytes. */
static streamer *streamer_of(int store_bytes)
{
    return store_bytes >= 64 ? stream_64 : store_bytes >= 32 ? stream_32 : stream_16;
}
#endif

/* The widest stores past the cache of this processor, in bytes; 0: none supported here. */
int scatter_store_bytes(void)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f"))
        return 64;
    return __builtin_cpu_supports("avx") ? 32 : 16;
#else
    return 0;
#endif
}

/* Progress of a copy of many pieces. */
struct position {
    uint64_t piece;  /* the first that is not done */
    uint64_t offset; /* bytes of it that are done */
};

/* next: the address read after this. */
static void copy_piece(char *to, const char *from, size_t length, const char *next, int store_bytes)
{
#ifdef __x86_64__
    if (store_bytes && length >= MIN_STREAMED) {
        size_t head = -(uintptr_t)to & 63;
        size_t lines = (length - head) & ~(size_t)63;
        memcpy(to, from, head);
        streamer_of(store_bytes)(to + head, from + head, lines, next);
        memcpy(to + head + lines, from + head + lines, length - head - lines);
        return;
    }
#endif
    memcpy(to, from, length);
}

/* Make the copied bytes visible before the next reader is notified. */
static void fence(void)
{
#ifdef __x86_64__
    _mm_sfence();
#endif
}

/* Run n copies in order, at most `max_bytes` in this call. from, to: start addresses of the source and target regions.
 * `at` is where to begin, and is advanced; all is done when at->piece is n. No source overlaps a target. store_bytes:
 * 0, or scatter_store_bytes() or less if all bytes together are many more than a cache holds.
 */
void scatter_copy(const struct copy *copies, uint64_t n, const uint64_t *from, const uint64_t *to, struct position *at,
                  uint64_t max_bytes, int store_bytes)
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
                   source(&copies[i + 1 < n ? i + 1 : i], from), store_bytes);
        max_bytes -= now;
        if (now < length) {
            offset += now;
            break;
        }
    }
    at->piece = i;
    at->offset = offset;
    fence();
}

/* Run n copies at once, unless they have more than max_bytes. Returns their bytes, or ~i without copying if copy i is
 * the first with a target outside its region. to, lengths: of the num_regions target regions. store_bytes: as for
 * scatter_copy, if there are streaming_bytes or more.
 */
int64_t scatter_few(const struct copy *copies, uint64_t n, const uint64_t *from, const uint64_t *to,
                    const uint64_t *lengths, uint64_t num_regions, uint64_t max_bytes, uint64_t streaming_bytes,
                    int store_bytes)
{
    int64_t bytes = bytes_inside(copies, n, lengths, num_regions, 1);
    struct position at = {0, 0};
    if (bytes >= 0 && (uint64_t)bytes <= max_bytes)
        scatter_copy(copies, n, from, to, &at, max_bytes, (uint64_t)bytes >= streaming_bytes ? store_bytes : 0);
    return bytes;
}

/* Advance `at` as scatter_copy does, but copy nothing: another caller copies the bytes between. */
void scatter_skip(const struct copy *copies, uint64_t n, struct position *at, uint64_t max_bytes)
{
    for (; at->piece < n; at->piece++, at->offset = 0) {
        uint64_t length = copies[at->piece].length - at->offset;
        if (max_bytes < length) {
            at->offset += max_bytes;
            return;
        }
        max_bytes -= length;
    }
}

/* A row of an iovec table (iovec.py). */
struct piece {
    uint64_t base;
    uint64_t length;
};

/* Copy n pieces into one buffer, one after the other, or out of it if `out` is set; nothing overlaps. store_bytes: as
 * for scatter_copy. With 0 the buffer is in the cache for its next reader.
 */
void scatter_pieces(const struct piece *pieces, uint64_t n, char *buffer, int out, int store_bytes)
{
    for (uint64_t i = 0; i < n; i++, buffer += pieces[i - 1].length) {
        char *piece = (char *)(uintptr_t)pieces[i].base;
        if (i + PIECES_AHEAD < n)
            __builtin_prefetch((const char *)(uintptr_t)pieces[i + PIECES_AHEAD].base, 0, 0);
        copy_piece(out ? piece : buffer, out ? buffer : piece, (size_t)pieces[i].length,
                   out ? buffer + pieces[i].length : (const char *)(uintptr_t)pieces[i + 1 < n ? i + 1 : i].base,
                   store_bytes);
    }
    fence();
}
