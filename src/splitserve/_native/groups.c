/* Linear layers over weights of 4 or 8 bits with a scale for each output and each group of adjacent inputs, as
 * quantized checkpoints have them.
 *
 * A weight is code x scale + offset. Without offsets, the code of zero is the middle of all codes, 8 or 128. In FP8,
 * a code is a number in E4M3.
 *
 * A panel holds the weights of two vectors of outputs, group after group: codes in 32-bit words, scales, offsets if
 * there are any. A word has eight inputs of one output, four of 8 bits: those with even numbers in its low half, the
 * others in its high half. So a shift of both halves gives the codes of a pair of adjacent inputs. bfloat16 holds the
 * numbers of all codes exactly: those of 4 bits are in a table. Scales and offsets are float16 if that is exact for all
 * of the layer, else float32.
 *
 * The sum of a group is multiplied by its scale, and the group's sum of activations by its offset. All sums are
 * float32, in one order, whatever the number of rows and threads: the result of a row depends on that row only.
 */
#include "linear.h"

#include "pairs.h"

/* Vectors of outputs in a panel. */
#define VECTORS 2
/* Rows with sums that fit the registers. */
#define TILE_ROWS (SUMS / VECTORS)
/* Adjacent panels for one row. */
#define WIDE 4
/* Words between those in use and those that are fetched from memory. */
#define AHEAD 512

INLINE uint64_t inputs_a_word(int kind)
{
    return kind == GROUPS4 ? 8 : 4;
}

INLINE uint64_t num_groups(const struct linear *l)
{
    return l->num_inputs / l->group;
}

/* Words of one group of a panel. */
INLINE uint64_t group_words(const struct linear *l, int kind)
{
    const uint64_t numbers = (l->has_offsets ? 2 : 1) * VECTORS * LANES;
    return l->group / inputs_a_word(kind) * VECTORS * LANES + (l->has_halves ? numbers / 2 : numbers);
}

/* The numbers of the codes of 8 bits at bit `shift`, minus `zero`: a code in the last bits of 2^23 is a float. */
INLINE vfloat from_byte(vuint words, int shift, float zero)
{
    return (vfloat)((words >> shift & 0xff) | 0x4b000000) - (0x1p23f + zero);
}

#if HAS_PAIRS
/* A word per lane has a pair of bfloat16 numbers. */
typedef vuint vpair;

/* The numbers of the codes 0 to 15, twice: a lookup ignores the bits above the lowest five. */
INLINE vuint table_of(float zero, float factor)
{
    uint16_t numbers[32];
    for (int code = 0; code < 32; code++) {
        const float number = ((float)(code & 15) - zero) * factor;
        uint32_t bits;
        memcpy(&bits, &number, sizeof bits);
        numbers[code] = (uint16_t)(bits >> 16);
    }
    vuint table;
    memcpy(&table, numbers, sizeof table);
    return table;
}

INLINE vpair from_nibbles(vuint words, int place, vuint table, float zero)
{
    (void)zero;
    const __m512i codes = _mm512_srli_epi16((__m512i)words, 4 * place);
    return (vpair)_mm512_permutexvar_epi16(codes, (__m512i)table);
}

INLINE vpair from_bytes(vuint words, int place, float zero)
{
    const vuint first = (vuint)from_byte(words, 8 * place, zero), second = (vuint)from_byte(words, 16 + 8 * place, zero);
    return first >> 16 | (second & 0xffff0000u);
}

/* The numbers of E4M3 codes. */
INLINE vpair from_fp8(vuint words, int place)
{
    const __m512i shifted = place ? (__m512i)words : _mm512_slli_epi16((__m512i)words, 8);
    const __m512i bits = _mm512_srli_epi16(_mm512_and_si512(shifted, _mm512_set1_epi16(0x7f00)), 4);
    const __m512i sign = _mm512_and_si512(shifted, _mm512_set1_epi16((short)0x8000));
    const __m512i normal = _mm512_add_epi16(bits, _mm512_set1_epi16(0x3c00));
    /* Multiples of 2^-9 have the exponent 0 in E4M3. The instruction for pairs treats numbers with exponent 0 as 0. */
    const __m512i multiples = (__m512i)table_of(0.0f, 0x1p-9f);
    const __mmask32 small = _mm512_cmplt_epu16_mask(bits, _mm512_set1_epi16(0x80));
    const __m512i found = _mm512_mask_permutexvar_epi16(normal, small, _mm512_srli_epi16(bits, 4), multiples);
    return (vpair)_mm512_or_si512(found, sign);
}

INLINE vfloat add_pair(vfloat sum, vpair weights, vuint activations)
{
    return add_products(sum, weights, activations);
}
#else
typedef struct {
    vfloat first, second;
} vpair;

INLINE vuint table_of(float zero, float factor)
{
    (void)zero;
    (void)factor;
    return (vuint){0};
}

INLINE vfloat from_nibble(vuint words, int shift, float zero)
{
    return __builtin_convertvector((vint)(words >> shift & 15), vfloat) - zero;
}

INLINE vpair from_nibbles(vuint words, int place, vuint table, float zero)
{
    (void)table;
    return (vpair){from_nibble(words, 4 * place, zero), from_nibble(words, 16 + 4 * place, zero)};
}

INLINE vpair from_bytes(vuint words, int place, float zero)
{
    return (vpair){from_byte(words, 8 * place, zero), from_byte(words, 16 + 8 * place, zero)};
}

INLINE vfloat from_e4m3(vuint codes)
{
    return (vfloat)((codes & 0x80) << 24 | (codes & 0x7f) << 20) * 0x1p120f;
}

INLINE vpair from_fp8(vuint words, int place)
{
    return (vpair){from_e4m3(words >> (8 * place)), from_e4m3(words >> (16 + 8 * place))};
}

INLINE vfloat add_pair(vfloat sum, vpair weights, vuint activations)
{
    sum += weights.first * (vfloat)(activations << 16);
    return sum + weights.second * (vfloat)(activations & 0xffff0000u);
}
#endif

/* The code of the number 0. */
INLINE float zero_of(const struct linear *l, int kind)
{
    if (l->has_offsets)
        return 0.0f;
    return kind == GROUPS4 ? 8.0f : 128.0f;
}

INLINE vpair pair_at(vuint words, int kind, int place, vuint table, float zero)
{
    if (kind == GROUPS4)
        return from_nibbles(words, place, table, zero);
    return kind == GROUPS8 ? from_bytes(words, place, zero) : from_fp8(words, place);
}

/* Add to the sums of `rows` rows the products of one word per lane, pair by pair, for two vectors of outputs. */
INLINE void add_words(const struct linear *l, int kind, int rows, const uint32_t *w, const bf16 *inputs, vuint table,
                      vfloat *sums)
{
    const int places = kind == GROUPS4 ? 4 : 2;
    const float zero = zero_of(l, kind);
    vuint words[VECTORS];
    memcpy(words, w, sizeof words);
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++)
        __builtin_prefetch(w + AHEAD + v * LANES);
#pragma GCC unroll 4
    for (int place = 0; place < places; place++) {
        vpair weights[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++)
            weights[v] = pair_at(words[v], kind, place, table, zero);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const vuint activations = splat_pair(inputs + r * l->input_stride + 2 * place);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                sums[r * VECTORS + v] = add_pair(sums[r * VECTORS + v], weights[v], activations);
        }
    }
}

/* Vector `v` of the scales and offsets of a group. They are finite. */
INLINE vfloat factors_at(const struct linear *l, const uint32_t *w, int v)
{
    if (!l->has_halves)
        return load((const float *)w + v * LANES);
    vhalf halves;
    memcpy(&halves, (const uint16_t *)w + v * LANES, sizeof halves);
#if HAS_WIDE_WORDS
    return (vfloat)_mm512_cvtph_ps((__m256i)halves);
#else
    const vuint bits = __builtin_convertvector(halves, vuint);
    return (vfloat)((bits & 0x8000) << 16 | (bits & 0x7fff) << 13) * 0x1p112f;
#endif
}

/* Add the sums of a group, with its scales and offsets, to the totals of `rows` rows. row_sums: sums of the
 * group's activations, rows `num_groups` apart. */
INLINE void add_group(const struct linear *l, int rows, const uint32_t *factors, const float *row_sums,
                      const vfloat *sums, vfloat *totals)
{
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) {
        const vfloat scale = factors_at(l, factors, v);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
            totals[r * VECTORS + v] += sums[r * VECTORS + v] * scale;
        if (l->has_offsets) {
            const vfloat offset = factors_at(l, factors, VECTORS + v);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++)
                totals[r * VECTORS + v] += offset * row_sums[r * num_groups(l)];
        }
    }
}

/* `rows` rows against `panels` adjacent panels; both numbers and the kind are known to the compiler. row_sums: those of
 * the first row. */
INLINE void tile(const struct linear *l, int kind, int rows, int panels, uint64_t row, uint64_t panel,
                 const float *row_sums)
{
    const uint64_t stride = group_words(l, kind), panel_words = num_groups(l) * stride;
    const uint64_t words = l->group / inputs_a_word(kind);
    const uint32_t *w = l->panels + panel * panel_words;
    const bf16 *inputs = l->inputs + row * l->input_stride;
    const vuint table = table_of(zero_of(l, GROUPS4), 1.0f);
    vfloat totals[SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * panels * VECTORS; i++)
        totals[i] = (vfloat){0};
    for (uint64_t g = 0; g < num_groups(l); g++, w += stride) {
        vfloat sums[SUMS];
#pragma GCC unroll 32
        for (int i = 0; i < rows * panels * VECTORS; i++)
            sums[i] = (vfloat){0};
        for (uint64_t k = 0; k < words; k++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                add_words(l, kind, rows, w + p * panel_words + k * VECTORS * LANES,
                          inputs + g * l->group + k * inputs_a_word(kind), table, sums + p * rows * VECTORS);
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            add_group(l, rows, w + p * panel_words + words * VECTORS * LANES, row_sums + g,
                      sums + p * rows * VECTORS, totals + p * rows * VECTORS);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            finish(l, VECTORS, row + r, panel + p, totals + (p * rows + r) * VECTORS);
}

#define TILE(kind, rows) \
    case rows: \
        tile(l, kind, rows, 1, row, panel, row_sums); \
        break;
#define GROUPS4_TILE(rows) TILE(GROUPS4, rows)
#define GROUPS8_TILE(rows) TILE(GROUPS8, rows)
#define FP8_TILE(rows) TILE(FP8, rows)

static void tile_of(const struct linear *l, int rows, uint64_t row, uint64_t panel, const float *row_sums)
{
    if (l->kind == GROUPS4)
        switch (rows) {
            TILES_OF_TWO_VECTORS(GROUPS4_TILE)
        }
    else if (l->kind == GROUPS8)
        switch (rows) {
            TILES_OF_TWO_VECTORS(GROUPS8_TILE)
        }
    else
        switch (rows) {
            TILES_OF_TWO_VECTORS(FP8_TILE)
        }
}

/* One row leaves registers free for several panels at once. Returns the panels done; 0 if one panel at a time is as
 * fast. */
static uint64_t wide_tile(const struct linear *l, uint64_t rows, uint64_t row, uint64_t panel, uint64_t end,
                          const float *row_sums)
{
    if (rows != 1 || panel + WIDE > end)
        return 0;
    if (l->kind == GROUPS4)
        tile(l, GROUPS4, 1, WIDE, row, panel, row_sums);
    else if (l->kind == GROUPS8)
        tile(l, GROUPS8, 1, WIDE, row, panel, row_sums);
    else
        tile(l, FP8, 1, WIDE, row, panel, row_sums);
    return WIDE;
}

/* Compute the sum of each group of a row's activations. */
static void sum_groups(const struct linear *l, uint64_t row, float *sums)
{
    const bf16 *inputs = l->inputs + row * l->input_stride;
    for (uint64_t g = 0; g < num_groups(l); g++) {
        vfloat sum = (vfloat){0};
        for (uint64_t k = g * l->group; k < (g + 1) * l->group; k += LANES)
            sum += load_bf16(inputs + k);
        sums[g] = sum_of(sum);
    }
}

/* Rows [first, last), which stay in the cache, against panels [begin, end). */
static void multiply(const struct linear *l, uint64_t first, uint64_t last, uint64_t begin, uint64_t end, uint64_t step)
{
    const uint64_t groups = num_groups(l);
    float row_sums[(last - first) * groups];
    if (l->has_offsets)
        for (uint64_t row = first; row < last; row++)
            sum_groups(l, row, row_sums + (row - first) * groups);
    for (uint64_t panel = begin; panel < end;) {
        const uint64_t done = wide_tile(l, last - first, first, panel, end, row_sums);
        if (!done)
            for (uint64_t row = first; row < last; row += step)
                tile_of(l, (int)MIN(step, last - row), row, panel, row_sums + (row - first) * groups);
        panel += done ? done : 1;
    }
}

static void run(const void *args, uint64_t phase, uint64_t task)
{
    const struct part p = part_of_task(args, task);
    (void)phase;
    multiply(args, p.first, p.last, p.begin, p.end, p.step);
}

const struct kernel groups_kernel = {divided_phases, divided_tasks, run};
