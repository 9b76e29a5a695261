/* Many pieces of memory from here to there, in one call: what a loop in Python would spend, goes into the bytes.
 *
 * Plain C without Python's headers; loaded through ctypes, which lets Python's lock go for the time of the call.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "copies.h"

/* Pieces ahead whose first bytes are asked for, so that their address translations are at hand when their turn comes. */
#define PIECES_AHEAD 8
/* Bytes ahead of the one being read, over the end of a piece into the next: but for a line a page, over whose ends the
 * processor does not look ahead by itself. */
#define BYTES_AHEAD 4032
/* What is shorter goes through the cache. */
#define MIN_STREAMED 1024

#ifdef __x86_64__
#define AVX __attribute__((target("avx")))
#define AVX512 __attribute__((target("avx512f")))

/* One line of the cache past the cache, in stores as wide as the name says. to: where a line begins. */
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

/* `length` bytes, whole lines: the target's old bytes are not read, and nothing else is driven out. next: is read after
 * this. One store for a line is up to half as fast again as four.
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

/* By stores of so many bytes. */
static streamer *streamer_of(int store_bytes)
{
    return store_bytes >= 64 ? stream_64 : store_bytes >= 32 ? stream_32 : stream_16;
}
#endif

/* The widest stores past the cache that this processor has, in bytes; 0: none that are known here. */
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

/* How far a copy of many pieces has come. */
struct position {
    uint64_t piece;  /* the first that is not done */
    uint64_t offset; /* bytes of it that are done */
};

/* next: is read after this. */
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

/* Whoever is told next that the bytes are there must find them there. */
static void fence(void)
{
#ifdef __x86_64__
    _mm_sfence();
#endif
}

/* Bytes of n copies, or, where the source or target of copy i is the first that is not inside its region, ~i (which is
 * negative). lengths: of the regions. They are real memory: a table that would add up to 2^63 is longer than any. */
int64_t scatter_inside(const struct copy *copies, uint64_t n, const uint64_t *lengths, uint64_t num_regions,
                       int is_target)
{
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t region = is_target ? copies[i].dst_region : copies[i].src_region;
        uint64_t offset = is_target ? copies[i].dst_offset : copies[i].src_offset;
        if (region >= num_regions || offset > lengths[region] || copies[i].length > lengths[region] - offset)
            return ~(int64_t)i;
        bytes += copies[i].length;
    }
    return (int64_t)bytes;
}

/* Bytes of n copies. */
uint64_t scatter_bytes(const struct copy *copies, uint64_t n)
{
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < n; i++)
        bytes += copies[i].length;
    return bytes;
}

static int goes_on(const struct copy *after, const struct copy *before)
{
    return after->src_region == before->src_region && after->dst_region == before->dst_region &&
           after->src_offset == before->src_offset + before->length &&
           after->dst_offset == before->dst_offset + before->length;
}

/* n copies into `out`, each that goes on where the one before ended as a part of it. Returns how many there are then. */
uint64_t scatter_coalesce(const struct copy *copies, uint64_t n, struct copy *out)
{
    uint64_t count = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (count && goes_on(&copies[i], &out[count - 1]))
            out[count - 1].length += copies[i].length;
        else
            out[count++] = copies[i];
    }
    return count;
}

/* The same bytes of n copies in the same order, in pieces of at most max_bytes, none of them empty, and these in parts: a
 * new one begins where a multiple of max_bytes of the whole lies before a piece and not before the one ahead of it, and
 * after each max_pieces pieces. pieces: room for n and one more for each max_bytes in all. firsts: of each part, as much
 * room. Returns how many parts there are; firsts of the one behind the last is the number of pieces.
 */
uint64_t scatter_parts(const struct copy *copies, uint64_t n, uint64_t max_bytes, uint64_t max_pieces,
                       struct copy *pieces, uint64_t *firsts)
{
    uint64_t count = 0, parts = 0, bytes = 0, next = 0;
    for (uint64_t i = 0; i < n; i++) {
        struct copy rest = copies[i];
        while (rest.length) {
            uint64_t length = rest.length < max_bytes ? rest.length : max_bytes;
            if (bytes >= next || count % max_pieces == 0) {
                firsts[parts++] = count;
                next = (bytes / max_bytes + 1) * max_bytes;
            }
            pieces[count] = rest;
            pieces[count++].length = length;
            bytes += length;
            rest.src_offset += length;
            rest.dst_offset += length;
            rest.length -= length;
        }
    }
    firsts[parts] = count;
    return parts;
}

/* Which block of `size` bytes each source, or target, of n copies is. firsts: number of each region's first block.
 * Returns 0 where a copy is no such block. size: at least 1.
 */
int scatter_blocks(const struct copy *copies, uint64_t n, uint64_t size, const uint64_t *firsts, uint64_t num_regions,
                   int is_target, int32_t *blocks)
{
    for (uint64_t i = 0; i < n; i++) {
        uint64_t region = is_target ? copies[i].dst_region : copies[i].src_region;
        uint64_t offset = is_target ? copies[i].dst_offset : copies[i].src_offset;
        uint64_t block = offset / size;
        if (copies[i].length != size || region >= num_regions || block * size != offset)
            return 0;
        blocks[i] = (int32_t)(firsts[region] + block);
    }
    return 1;
}

/* Bits of an address that one pass sorts by, and those that no pass looks at: within a page order does not matter. */
#define DIGIT_BITS 11
#define PAGE_BITS 12

static uint64_t source_page(const struct copy *copy, const uint64_t *from)
{
    return (uint64_t)(uintptr_t)source(copy, from) >> PAGE_BITS;
}

/* n copies by the pages of their sources; what is in one page stays as it was. `first` and `second` have room for n rows
 * each. Returns where the rows are then: copies itself, first or second. Whole rows are moved, because whoever reads
 * them next reads them one after the other.
 */
const struct copy *scatter_sort(const struct copy *copies, uint64_t n, const uint64_t *from, struct copy *first,
                                struct copy *second)
{
    uint64_t least = ~(uint64_t)0, most = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t page = source_page(&copies[i], from);
        least = page < least ? page : least;
        most = page > most ? page : most;
    }
    for (int shift = 0; shift < 64 && n && (most - least) >> shift; shift += DIGIT_BITS) {
        uint64_t places[(1 << DIGIT_BITS) + 1] = {0};
        for (uint64_t i = 0; i < n; i++)
            places[1 + ((source_page(&copies[i], from) - least) >> shift & ((1 << DIGIT_BITS) - 1))]++;
        for (int digit = 0; digit < 1 << DIGIT_BITS; digit++)
            places[digit + 1] += places[digit];
        for (uint64_t i = 0; i < n; i++) {
            uint64_t page = source_page(&copies[i], from) - least;
            first[places[page >> shift & ((1 << DIGIT_BITS) - 1)]++] = copies[i];
        }
        copies = first;
        first = second;
        second = (struct copy *)copies;
    }
    return copies;
}

/* Carry out n copies in their order, at most `max_bytes` in this call. from, to: where our and their regions begin.
 * `at` says where to begin and is moved on; all is done when at->piece is n. No source overlaps a target.
 * store_bytes: 0, or where the bytes in all are many more than a cache holds scatter_store_bytes() or less.
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

/* Move `at` on as scatter_copy does, and copy nothing: what lies between is somebody's to copy. */
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

/* n pieces into one buffer, one after the other, or out of it where `out` is set; nothing overlaps. store_bytes: as for
 * scatter_copy. A buffer that goes through the cache is there when it is read next.
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
