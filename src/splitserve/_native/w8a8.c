/* Linear layers in integers: int8 weights, and activations that are quantized to int8 row by row.
 *
 * 1. A row is quantized by itself: its largest magnitude becomes 127.
 * 2. Products are summed in 32 bits, without rounding up to 133,000 inputs, so their order does not matter.
 * 3. The result is a sum times the scale of its row times the scale of its output.
 *
 * A panel holds the weights of two vectors of outputs in 32-bit words: a word has four inputs of one output, the first
 * in its lowest bits, zeros behind the last. CPUs multiply pairs of 16-bit numbers and add the two products in one
 * instruction; so a vector of words is split into the pairs of inputs 0, 2 and 1, 3, and activations are in such pairs.
 * Tile instructions (tiles.c) multiply words of activations instead.
 */
#include "linear.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

/* GCC delays sums of integers until it has many products, and spills those. This makes it compute a sum now. */
#if defined(__AVX512F__)
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#elif defined(__SSE2__) && (defined(__AVX2__) || VECTOR_BYTES == 16)
#define IN_REGISTER(v) __asm__("" : "+x"(v))
#else
#define IN_REGISTER(v)
#endif

typedef int16_t vshort __attribute__((vector_size(VECTOR_BYTES)));

/* Vectors of outputs in a panel. */
#define VECTORS 2
/* Rows with sums that fit the registers. */
#define TILE_ROWS (SUMS / VECTORS)
/* Inputs that are rounded at a time: the int8 in a row of a tile register. */
#define PART 64

/* Add to the sum of each lane the products of both halves of w and a. */
INLINE vint add_pairs(vint sums, vint w, vint a)
{
#if VECTOR_BYTES == 64 && defined(__AVX512VNNI__)
    return (vint)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)w, (__m512i)a);
#else
#if VECTOR_BYTES == 64 && defined(__AVX512BW__)
    sums += (vint)_mm512_madd_epi16((__m512i)w, (__m512i)a);
#elif VECTOR_BYTES == 32 && defined(__AVX2__)
    sums += (vint)_mm256_madd_epi16((__m256i)w, (__m256i)a);
#elif VECTOR_BYTES == 16 && defined(__SSE2__)
    sums += (vint)_mm_madd_epi16((__m128i)w, (__m128i)a);
#else
    sums += (w << 16 >> 16) * (a << 16 >> 16) + (w >> 16) * (a >> 16);
#endif
    IN_REGISTER(sums);
    return sums;
#endif
}

INLINE uint64_t num_words(const struct linear *l)
{
    return (l->num_inputs + 3) / 4;
}

/* Words of a quantized row. With tiles they are whole tiles: zeros behind the last input. */
INLINE uint64_t row_words(const struct linear *l)
{
    return l->uses_tiles ? parts_of(l->num_inputs, PART) * PART / 4 : 2 * num_words(l);
}

/* Rows that are quantized and multiplied at a time. */
INLINE uint64_t step_of(const struct linear *l)
{
    return l->uses_tiles ? TILED_ROWS : (uint64_t)alike_rows(l, TILE_ROWS);
}

/* The largest magnitude; NaN if there is one: without their sign, bfloat16 are in the order of their bits. */
static float largest(const bf16 *row, uint64_t n)
{
    int16_t most = 0;
    for (uint64_t k = 0; k < n; k++) {
        const int16_t magnitude = (int16_t)(row[k] & 0x7fff);
        most = magnitude > most ? magnitude : most;
    }
    return from_bf16((bf16)most);
}

/* Quantize the rows of a tile to pairs of 16-bit numbers, word after word, and within a word row after row. With tile
 * instructions: to int8, row after row. */
static void quantize_tile(const struct linear *l, uint64_t first, int rows, int32_t *to, float *scales)
{
    for (int r = 0; r < rows; r++) {
        const bf16 *from = l->inputs + (first + r) * l->input_stride;
        const float most = largest(from, l->num_inputs);
        /* A row of zeros stays zero, and a row with infinity or NaN gets a scale of infinity or NaN. */
        const float factor = most >= 1e-30f && most < __builtin_inff() ? 127.0f / most : 0.0f;
        scales[r] = most / 127.0f;
        for (uint64_t k = 0; k < l->num_inputs; k += PART) {
            const uint64_t n = MIN(PART, l->num_inputs - k);
            int32_t whole[PART] = {0};
            for (uint64_t i = 0; i < n; i++)
                whole[i] = __builtin_irintf(from_bf16(from[k + i]) * factor);
            if (l->uses_tiles) {
                int8_t *row = (int8_t *)(to + r * row_words(l)) + k;
                for (uint64_t i = 0; i < PART; i++)
                    row[i] = (int8_t)whole[i];
                continue;
            }
            for (uint64_t i = 0; i < n; i += 4)
                for (uint64_t odd = 0; odd < 2; odd++)
                    to[((k + i) / 2 + odd) * rows + r] = (whole[i + odd] & 0xffff) | whole[i + odd + 2] << 16;
        }
    }
}

/* `rows` rows against one panel; their number is known to the compiler. */
INLINE void tile(const struct linear *l, int rows, uint64_t row, uint64_t panel, const int32_t *a, const float *scales)
{
    const uint32_t *w = l->panels + panel * num_words(l) * VECTORS * LANES;
    vint sums[SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * VECTORS; i++)
        sums[i] = (vint){0};
    for (uint64_t k = 0; k < num_words(l); k++) {
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            vint weights[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                vshort words;
                memcpy(&words, w + (k * VECTORS + v) * LANES, sizeof words);
                weights[v] = (vint)(odd ? words >> 8 : words << 8 >> 8);
            }
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                const vint activations = a[(k * 2 + odd) * rows + r] - (vint){0};
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++)
                    sums[r * VECTORS + v] = add_pairs(sums[r * VECTORS + v], weights[v], activations);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        vfloat values[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++)
            values[v] = __builtin_convertvector(sums[r * VECTORS + v], vfloat) * scales[r];
        finish(l, VECTORS, row + r, panel, values);
    }
}

#define TILE(rows) \
    case rows: \
        tile(l, rows, row, panel, a, scales); \
        break;

static void tile_of(const struct linear *l, int rows, uint64_t row, uint64_t panel, const int32_t *a,
                    const float *scales)
{
    switch (rows) {
        TILES_OF_TWO_VECTORS(TILE)
    }
}

/* A chunk's rows against panels [begin, end), in blocks of rows that stay in the cache. */
static void multiply(const struct linear *l, uint64_t chunk, int num_rows, uint64_t begin, uint64_t end,
                     const int32_t *pairs, const float *scales)
{
    const int step = (int)step_of(l), words = (int)row_words(l), block = MAX(step, BLOCK_WORDS / words / step * step);
    for (int top = 0; top < num_rows; top += block) {
        const int bottom = MIN(num_rows, top + block);
        if (l->uses_tiles) {
            const struct tiled_rows rows = {pairs + (size_t)top * words, scales + top, (uint64_t)words * 4, chunk + top,
                                            (uint64_t)(bottom - top)};
            multiply_tiles(l, &rows, begin, end);
            continue;
        }
        for (uint64_t panel = begin; panel < end; panel++)
            for (int r = top; r < bottom; r += step)
                tile_of(l, MIN(step, num_rows - r), chunk + r, panel, pairs + (size_t)r * words, scales + r);
    }
}

static uint64_t num_tasks(const void *args, uint64_t phase)
{
    const struct linear *l = args;
    return chunk_tasks(l, phase, step_of(l), VECTORS * LANES);
}

static void run(const void *args, uint64_t phase, uint64_t task)
{
    const struct linear *l = args;
    const uint64_t chunk = phase / 2 * CHUNK_ROWS, rows = chunk_rows(l, chunk);
    float *scales = l->scratch;
    int32_t *pairs = (int32_t *)(l->scratch + CHUNK_ROWS);
    if (phase % 2) {
        const uint64_t panels = chunk_panels(l, rows, VECTORS * LANES);
        multiply(l, chunk, (int)rows, task * panels, MIN(l->num_panels, (task + 1) * panels), pairs, scales);
        return;
    }
    const uint64_t step = step_of(l), part = items_a_task(step * l->num_inputs) * step;
    for (uint64_t r = task * part; r < MIN(rows, (task + 1) * part); r += step)
        quantize_tile(l, chunk + r, (int)MIN(step, rows - r), pairs + r * row_words(l), scales + r);
}

const struct kernel w8a8_kernel = {chunk_phases, num_tasks, run};
