/* A row of the copy table (copies.py) in numpy's packing, and its addresses in this process. */
#ifndef SPLITSERVE_COPIES_H
#define SPLITSERVE_COPIES_H

#include <stdint.h>

struct __attribute__((packed)) copy {
    uint32_t src_region;
    uint64_t src_offset;
    uint32_t dst_region;
    uint64_t dst_offset;
    uint64_t length;
};

/* bases: start addresses of the regions. */
static inline const char *source(const struct copy *copy, const uint64_t *bases)
{
    return (const char *)(uintptr_t)(bases[copy->src_region] + copy->src_offset);
}

static inline char *target(const struct copy *copy, const uint64_t *bases)
{
    return (char *)(uintptr_t)(bases[copy->dst_region] + copy->dst_offset);
}

/* Bytes of n copies; ~i, which is negative, if copy i is the first with a source or target outside its region.
 * lengths: of the regions. They are real memory: a table that would add up to 2^63 is longer than any. */
static inline int64_t bytes_inside(const struct copy *copies, uint64_t n, const uint64_t *lengths, uint64_t num_regions,
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

#endif
