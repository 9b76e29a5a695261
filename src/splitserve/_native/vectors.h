/* Vectors of floats as GCC and clang support them on every CPU, and the few operations on them that C lacks.
 *
 * Numbers of 16 bits are bfloat16 (`bf16`). In builds with FLOAT16 they are float16 everywhere instead.
 *
 * The width comes from the instruction set a file is compiled for; the same source serves all of them.
 */
#ifndef SPLITSERVE_VECTORS_H
#define SPLITSERVE_VECTORS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(VECTOR_BYTES)
/* Set by the build: a width beyond the CPU's works, too, as several of its vectors. */
#elif defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
/* Floats in a vector. */
#define LANES (VECTOR_BYTES / 4)

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__FMA__) || defined(__F16C__)
#include <immintrin.h>
#endif
#if VECTOR_BYTES == 64 && defined(__AVX512F__) && defined(__AVX512DQ__)
/* Operations that GCC does not generate by itself. */
#define HAS_WIDE_WORDS 1
#else
#define HAS_WIDE_WORDS 0
#endif

typedef float vfloat __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vuint __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vint __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vhalf __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint16_t bf16;

#define INLINE static inline __attribute__((always_inline))

/* The number of parts that hold `all`. */
INLINE uint64_t parts_of(uint64_t all, uint64_t part)
{
    return (all + part - 1) / part;
}

INLINE vfloat load(const float *from)
{
    vfloat v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* One vector at a time: GCC copies an array of vectors through the stack in parts, and a load waits for these. */
INLINE vuint load_words(const uint32_t *from)
{
    vuint v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vfloat v)
{
    memcpy(to, &v, sizeof v);
}

INLINE vfloat splat(float x)
{
    return x - (vfloat){0};
}

#if defined(FLOAT16)

INLINE float from_bf16(bf16 x)
{
    return _cvtsh_ss(x);
}

INLINE vfloat widened(vhalf halves)
{
#if VECTOR_BYTES == 64
    return (vfloat)_mm512_cvtph_ps((__m256i)halves);
#else
    return (vfloat)_mm256_cvtph_ps((__m128i)halves);
#endif
}

/* Round to the nearest float16, ties to even; NaN stays NaN. */
INLINE vhalf narrowed(vfloat v)
{
#if VECTOR_BYTES == 64
    return (vhalf)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#else
    return (vhalf)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#endif
}

INLINE vuint rounded(vfloat v)
{
    return __builtin_convertvector(narrowed(v), vuint);
}

/* The rounded number as a float. */
INLINE vfloat rounded_off(vfloat v)
{
    return widened(narrowed(v));
}

/* Pack two vectors of numbers that are exact in 16 bits, in the order of a panel (linear.c). */
INLINE vuint words_of(vfloat first, vfloat second)
{
    const vhalf both[2] = {narrowed(first), narrowed(second)};
    vuint words;
    memcpy(&words, both, sizeof words);
    return words;
}

/* The numbers in the low and high halves of words. */
INLINE vfloat low_of(vuint words)
{
    return widened(__builtin_convertvector(words, vhalf));
}

INLINE vfloat high_of(vuint words)
{
    return widened(__builtin_convertvector(words >> 16, vhalf));
}

#else

INLINE float from_bf16(bf16 x)
{
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

INLINE vfloat widened(vhalf halves)
{
#if VECTOR_BYTES == 32 && defined(__AVX2__)
    /* GCC converts such a vector in halves. */
    return (vfloat)((vuint)_mm256_cvtepu16_epi32((__m128i)halves) << 16);
#else
    return (vfloat)(__builtin_convertvector(halves, vuint) << 16);
#endif
}

/* Round to the nearest bfloat16, ties to even, as torch does; NaN stays NaN. */
INLINE vuint rounded(vfloat v)
{
    vuint bits = (vuint)v;
    vuint near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vuint nan = (vuint)(v != v);
    return (nan & 0x7fc0) | (~nan & near);
}

/* The same. On CPUs with an instruction for it, subnormal numbers become zero, as in products of pairs (pairs.h). */
INLINE vhalf narrowed(vfloat v)
{
#if VECTOR_BYTES == 64 && defined(__AVX512BF16__)
    return (vhalf)_mm512_cvtneps_pbh((__m512)v);
#else
    return __builtin_convertvector(rounded(v), vhalf);
#endif
}

/* The rounded number as a float. */
INLINE vfloat rounded_off(vfloat v)
{
    return (vfloat)(rounded(v) << 16);
}

INLINE vuint words_of(vfloat low, vfloat high)
{
    return (vuint)low >> 16 | (vuint)high;
}

INLINE vfloat low_of(vuint words)
{
    return (vfloat)(words << 16);
}

INLINE vfloat high_of(vuint words)
{
    return (vfloat)(words & 0xffff0000u);
}

#endif

INLINE vfloat load_bf16(const bf16 *from)
{
    vhalf halves;
    memcpy(&halves, from, sizeof halves);
    return widened(halves);
}

INLINE void store_bf16(bf16 *to, vfloat v)
{
    vhalf halves = narrowed(v);
    memcpy(to, &halves, sizeof halves);
}

/* Store the first n lanes, n <= LANES. */
INLINE void store_bf16_first(bf16 *to, vfloat v, size_t n)
{
    vhalf halves = narrowed(v);
    memcpy(to, &halves, n * sizeof(bf16));
}

/* Add halves until one number is left. */
INLINE float sum_of(vfloat v)
{
#if VECTOR_BYTES == 64
    typedef float eight __attribute__((vector_size(32)));
    eight halves[2];
    memcpy(halves, &v, sizeof v);
    const eight half = halves[0] + halves[1];
#elif VECTOR_BYTES == 32
    const vfloat half = v;
#endif
#if VECTOR_BYTES >= 32
    typedef float four __attribute__((vector_size(16)));
    four quarters[2];
    memcpy(quarters, &half, sizeof quarters);
    const four last = quarters[0] + quarters[1];
#else
    const vfloat last = v;
#endif
    return (last[0] + last[2]) + (last[1] + last[3]);
}

/* The largest of a vector. */
INLINE float most_of(vfloat v)
{
#if HAS_WIDE_WORDS
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
#pragma GCC unroll 16
    for (int i = 1; i < LANES; i++)
        most = v[i] > most ? v[i] : most;
    return most;
#endif
}

/* Transpose LANES vectors: lane j of vector i becomes lane i of vector j. */
INLINE void transpose(vuint *rows)
{
#if HAS_WIDE_WORDS
    /* Words within quarters of four rows, which is faster than permutations of whole vectors; then the quarters. */
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        const __m512i *const r = (const __m512i *)rows + i;
        const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
        const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
        rows[i] = (vuint)_mm512_unpacklo_epi64(a, c);
        rows[i + 1] = (vuint)_mm512_unpackhi_epi64(a, c);
        rows[i + 2] = (vuint)_mm512_unpacklo_epi64(b, d);
        rows[i + 3] = (vuint)_mm512_unpackhi_epi64(b, d);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i *const r = (const __m512i *)rows + i;
        const __m512i a = _mm512_shuffle_i32x4(r[0], r[4], 0x88), b = _mm512_shuffle_i32x4(r[0], r[4], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(r[8], r[12], 0x88), d = _mm512_shuffle_i32x4(r[8], r[12], 0xdd);
        rows[i] = (vuint)_mm512_shuffle_i32x4(a, c, 0x88);
        rows[i + 4] = (vuint)_mm512_shuffle_i32x4(b, d, 0x88);
        rows[i + 8] = (vuint)_mm512_shuffle_i32x4(a, c, 0xdd);
        rows[i + 12] = (vuint)_mm512_shuffle_i32x4(b, d, 0xdd);
    }
#else
    vuint lane;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        lane[i] = (uint32_t)i;
#pragma GCC unroll 4
    for (uint32_t step = 1; step < LANES; step *= 2) {
        const vuint is_odd = (vuint)((lane & step) != 0);
        const vuint low = (is_odd & ((lane ^ step) + LANES)) | (~is_odd & lane);
        const vuint high = (is_odd & (lane + LANES)) | (~is_odd & (lane ^ step));
#pragma GCC unroll 16
        for (uint32_t i = 0; i < LANES; i++)
            if (!(i & step)) {
                const vuint a = rows[i], b = rows[i + step];
                rows[i] = __builtin_shuffle(a, b, low);
                rows[i + step] = __builtin_shuffle(a, b, high);
            }
    }
#endif
}

/* The larger number per lane; b if one of them is NaN. */
INLINE vfloat larger(vfloat a, vfloat b)
{
#if HAS_WIDE_WORDS
    return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);
#else
    vuint first = (vuint)(a > b);
    return (vfloat)(((vuint)a & first) | ((vuint)b & ~first));
#endif
}

/* a x b + c. In a sum of two products the compiler could fuse either one. This function fixes which one is fused. */
INLINE vfloat fused(vfloat a, vfloat b, vfloat c)
{
#if VECTOR_BYTES == 64 && defined(__AVX512F__)
    return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VECTOR_BYTES >= 32 && defined(__FMA__)
    __m256 x[VECTOR_BYTES / 32], y[VECTOR_BYTES / 32], sums[VECTOR_BYTES / 32];
    memcpy(x, &a, sizeof a);
    memcpy(y, &b, sizeof b);
    memcpy(sums, &c, sizeof c);
#pragma GCC unroll 2
    for (int i = 0; i < VECTOR_BYTES / 32; i++)
        sums[i] = _mm256_fmadd_ps(x[i], y[i], sums[i]);
    vfloat sum;
    memcpy(&sum, sums, sizeof sum);
    return sum;
#else
    return a * b + c;
#endif
}

/* x / y for 1 <= y < 1e38. */
INLINE vfloat quotient(vfloat x, vfloat y)
{
#if HAS_WIDE_WORDS
    /* Division takes several times as long. The estimate has 14 bits, one step doubles them. */
    const vfloat estimate = (vfloat)_mm512_rcp14_ps((__m512)y);
    return x * (estimate * (2.0f - y * estimate));
#else
    return x / y;
#endif
}

#if HAS_WIDE_WORDS

/* 2^x, with a relative error below 3e-6; 0 far below 0, infinite far above. */
INLINE vfloat exp2_of(vfloat x)
{
    /* x minus the next lower integer; 0 if x is infinite. */
    const vfloat r = (vfloat)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
    vfloat p = r * 1.3426718145e-2f + 5.2242419829e-2f;
    p = p * r + 2.4128023019e-1f;
    p = p * r + 6.9304484169e-1f;
    p = p * r + 1.0f;
    /* scalef rounds x down to the same integer. */
    return (vfloat)_mm512_scalef_ps((__m512)p, (__m512)x);
}

#else

/* 2^x, with a relative error below 2e-7; 0 below -126, 2^127 above 127, 2^-126 for NaN. */
INLINE vfloat exp2_of(vfloat x)
{
    const vuint vanishes = (vuint)(x < splat(-126.0f));
    x = -larger(-larger(x, splat(-126.0f)), splat(-127.0f));
    /* Adding 1.5 x 2^23 rounds to an integer, in the low bits. */
    const vfloat shifted = x + 12582912.0f, r = x - (shifted - 12582912.0f);
    vfloat p = r * 1.3276471993e-3f + 9.6755413345e-3f;
    p = p * r + 5.5507132735e-2f;
    p = p * r + 2.4022119724e-1f;
    p = p * r + 6.9314696706e-1f;
    p = p * r + 1.0f;
    return (vfloat)((vuint)(p * (vfloat)(((vint)shifted - 0x4b400000 + 127) << 23)) & ~vanishes);
}

#endif

#define LOG2_E 1.44269504f

/* e^x, with a relative error below 3e-6 + 6e-8 |x|. */
INLINE vfloat exp_of(vfloat x)
{
    return exp2_of(x * LOG2_E);
}

#endif
