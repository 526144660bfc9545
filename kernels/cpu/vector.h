// Sixteen numbers at a time, in the compiler's own vector types: one source for AVX-512, AVX2, NEON and plain SSE.
//
// Owns: loads and stores of float, bf16 and fp16 as fp32 vectors, sums and maxima across a vector, exp.
#pragma once

#include <cstdint>
#include <cstring>
#include <cmath>
#include <limits>
#if defined(__AVX512F__) || defined(__AVX512DQ__) || defined(__AVX512BF16__) || defined(__AMX_BF16__)
#include <immintrin.h>
#endif

typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t S16 __attribute__((vector_size(32)));
typedef _Float16 H16 __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};
typedef _Float16 fp16;

static constexpr int LANES = 16;

static inline F16 splat(float x) { return F16{} + x; }

static inline F16 load(const float *p) {
    F16 v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline F16 load(const bf16 *p) {
#if defined(__AVX512F__)
    return (F16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    S16 half;
    memcpy(&half, p, sizeof half);
    return (F16)(__builtin_convertvector(half, U16) << 16);
#endif
}

static inline F16 load(const fp16 *p) {
    H16 half;
    memcpy(&half, p, sizeof half);
    return __builtin_convertvector(half, F16);
}

static inline void store(float *p, F16 v) { memcpy(p, &v, sizeof v); }

// Round to nearest, ties to even; what is not a number stays so.
static inline void store(bf16 *p, F16 v) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &half, sizeof half);
#else
    U16 bits = (U16)v;
    U16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    U16 nan = (U16)(v != v);
    S16 half = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), S16);
    memcpy(p, &half, sizeof half);
#endif
}

static inline void store(fp16 *p, F16 v) {
    H16 half = __builtin_convertvector(v, H16);
    memcpy(p, &half, sizeof half);
}

// What a number becomes when it is stored as T and loaded again.
template <class T> static inline F16 rounded(F16 v) {
    T cell[LANES];
    store(cell, v);
    return load(cell);
}
template <> inline F16 rounded<float>(F16 v) { return v; }
#if defined(__AVX512BF16__)
template <> inline F16 rounded<bf16>(F16 v) {
    return (F16)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)), 16);
}
#endif

static inline F16 larger(F16 a, F16 b) { return a > b ? a : b; }

static inline float sum_of(F16 v) {
    typedef float F8 __attribute__((vector_size(32)));
    typedef float F4 __attribute__((vector_size(16)));
    F8 a[2];
    memcpy(a, &v, sizeof v);
    a[0] += a[1];
    F4 b[2];
    memcpy(b, a, sizeof b);
    b[0] += b[1];
    return (b[0][0] + b[0][2]) + (b[0][1] + b[0][3]);
}

static inline float largest_of(F16 v) {
    v = larger(v, __builtin_shuffle(v, I16{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = larger(v, __builtin_shuffle(v, I16{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = larger(v, __builtin_shuffle(v, I16{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    v = larger(v, __builtin_shuffle(v, I16{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
    return v[0];
}

// Sixteen vectors to one: lane i of the result is all lanes of v[i] joined. Halves are folded onto each other four times.
template <class Join> static inline F16 fold(F16 *v, Join join) {
    const I16 even8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const I16 odd8 = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
    const I16 even4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    const I16 odd4 = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
    const I16 even2 = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29};
    const I16 odd2 = {2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31};
    const I16 even1 = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const I16 odd1 = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    for (int i = 0; i < 8; i++)
        v[i] = join(__builtin_shuffle(v[2 * i], v[2 * i + 1], even8), __builtin_shuffle(v[2 * i], v[2 * i + 1], odd8));
    for (int i = 0; i < 4; i++)
        v[i] = join(__builtin_shuffle(v[2 * i], v[2 * i + 1], even4), __builtin_shuffle(v[2 * i], v[2 * i + 1], odd4));
    for (int i = 0; i < 2; i++)
        v[i] = join(__builtin_shuffle(v[2 * i], v[2 * i + 1], even2), __builtin_shuffle(v[2 * i], v[2 * i + 1], odd2));
    return join(__builtin_shuffle(v[0], v[1], even1), __builtin_shuffle(v[0], v[1], odd1));
}

static inline F16 sums_of(F16 *v) {
    return fold(v, [](F16 a, F16 b) { return a + b; });
}
static inline F16 largests_of(F16 *v) { return fold(v, larger); }

// 2^x within 2 units of the last place for x <= 0; 0 below -126 (so of minus infinity too).
static inline F16 exp2_of(F16 x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    F16 shifted = x + magic;
    F16 f = x - (shifted - magic);
    I16 n = (I16)shifted << 23;
    F16 p = f * 1.5403530e-4f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    F16 y = (F16)((I16)p + n);
    return x < -126.0f ? splat(0.0f) : y;
}

// 2^x for x <= 0, 1e-4 of it off at most: a twentieth of what rounding to bf16 adds. 0 for minus infinity.
static inline F16 exp2_for(const bf16 *, F16 x) {
#if defined(__AVX512DQ__)
    const F16 f = (F16)_mm512_reduce_ps((__m512)x, 1);  // x - floor(x)
    F16 p = f * 7.8024519e-2f + 2.2606716e-1f;
    p = p * f + 6.9583354e-1f;
    p = p * f + 9.9992522e-1f;
    return (F16)_mm512_scalef_ps((__m512)p, (__m512)x);  // p * 2^floor(x)
#else
    return exp2_of(x);
#endif
}
static inline F16 exp2_for(const float *, F16 x) { return exp2_of(x); }

static constexpr float LOG2E = 1.4426950408889634f;

// z / (1 + exp(-z)); of the exponential only the side that cannot overflow is used.
static inline F16 silu(F16 z) {
    F16 magnitude = z < 0.0f ? z : -z;
    F16 e = exp2_of(magnitude * LOG2E);
    return z * (z < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}
