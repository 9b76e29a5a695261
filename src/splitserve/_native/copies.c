/* Tables of copies: checked, joined, split, numbered and sorted, in one pass each.
 *
 * Plain C without Python's headers; loaded through ctypes, which releases Python's lock during the call.
 */
#include <stdint.h>

#include "copies.h"

/* See bytes_inside. */
int64_t copies_inside(const struct copy *copies, uint64_t n, const uint64_t *lengths, uint64_t num_regions,
                      int is_target)
{
    return bytes_inside(copies, n, lengths, num_regions, is_target);
}

/* Bytes of n copies. */
uint64_t copies_bytes(const struct copy *copies, uint64_t n)
{
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < n; i++)
        bytes += copies[i].length;
    return bytes;
}

/* Write the target addresses, source addresses and lengths of n copies to out [3, n]. Returns all bits set in any. */
uint64_t copies_addresses(const struct copy *copies, uint64_t n, const uint64_t *from, const uint64_t *to, uint64_t *out)
{
    uint64_t bits = 0;
    for (uint64_t i = 0; i < n; i++) {
        out[i] = (uint64_t)(uintptr_t)target(&copies[i], to);
        out[n + i] = (uint64_t)(uintptr_t)source(&copies[i], from);
        out[2 * n + i] = copies[i].length;
        bits |= out[i] | out[n + i] | out[2 * n + i];
    }
    return bits;
}

static int goes_on(const struct copy *after, const struct copy *before)
{
    return after->src_region == before->src_region && after->dst_region == before->dst_region &&
           after->src_offset == before->src_offset + before->length &&
           after->dst_offset == before->dst_offset + before->length;
}

/* Write n copies to `out`; each that continues the one before is joined to it. Returns the number of rows in `out`. */
uint64_t copies_coalesce(const struct copy *copies, uint64_t n, struct copy *out)
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

/* Split n copies, in order, into pieces of at most max_bytes, none of them empty, and group the pieces into parts. A
 * new part begins after max_pieces pieces, and with the first piece at or behind each multiple of max_bytes of all
 * bytes. pieces: room for n, and one more per max_bytes of all. firsts: first piece of each part, with room for one
 * more than pieces. Returns the number of parts; the entry of firsts behind the last part is the number of pieces.
 */
uint64_t copies_parts(const struct copy *copies, uint64_t n, uint64_t max_bytes, uint64_t max_pieces,
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

/* Find the block of `size` bytes that each source, or target, of n copies is. firsts: number of each region's first
 * block. Returns 0 if a copy is no such block. size: at least 1.
 */
int copies_blocks(const struct copy *copies, uint64_t n, uint64_t size, const uint64_t *firsts, uint64_t num_regions,
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

/* Address bits that one pass sorts by, and low bits that are ignored: within a page order does not matter. */
#define DIGIT_BITS 11
#define PAGE_BITS 12

static uint64_t source_page(const struct copy *copy, const uint64_t *from)
{
    return (uint64_t)(uintptr_t)source(copy, from) >> PAGE_BITS;
}

/* Sort n copies by the pages of their sources; copies of one page keep their order. `first` and `second` have room for
 * n rows each. Returns where the sorted rows are: copies itself, first or second. Whole rows are moved, because the
 * next reader reads them in sequence.
 */
const struct copy *copies_sort(const struct copy *copies, uint64_t n, const uint64_t *from, struct copy *first,
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
