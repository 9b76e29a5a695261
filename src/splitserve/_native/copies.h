/* A row of the copy table (copies.py), as numpy packs it, and where it lies in this process. */
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

/* bases: where the regions begin. */
static inline const char *source(const struct copy *copy, const uint64_t *bases)
{
    return (const char *)(uintptr_t)(bases[copy->src_region] + copy->src_offset);
}

static inline char *target(const struct copy *copy, const uint64_t *bases)
{
    return (char *)(uintptr_t)(bases[copy->dst_region] + copy->dst_offset);
}

#endif
