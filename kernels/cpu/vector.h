// Sixteen numbers at a time: one source for AVX-512, AVX2, NEON and plain SSE.
//
// Owns: vectors of sixteen as wide as the CPU's own or made of halves, loads and stores of float, bf16 and fp16 as fp32
// vectors, sums and maxima across a vector, exp. Refuses to know: what is computed with them.
//
//   AVX-512   F16                                     the compiler's own vector
//   AVX2      Halves<F8>                              two of them: left to itself the compiler keeps what is wider than
//   others    Halves<Halves<F4>>                      its registers in memory, several times slower
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

struct bf16 {
    uint16_t bits;
};
typedef _Float16 fp16;

static constexpr int LANES = 16;

#if defined(__AVX512F__)
static constexpr int WIDTH = 16;  // numbers of 32 bits in a register
#elif defined(__AVX2__)
static constexpr int WIDTH = 8;
#else
static constexpr int WIDTH = 4;
#endif

template <class V> struct Halves {
    V low, high;
};

// The vector type of N numbers.
template <class E, int N, bool Fits = (N <= WIDTH)> struct Vector;
template <class E, int N> struct Vector<E, N, true> {
    typedef E type __attribute__((vector_size(sizeof(E) * N)));
};
template <class E, int N> struct Vector<E, N, false> {
    typedef Halves<typename Vector<E, N / 2>::type> type;
};
template <int N> using Floats = typename Vector<float, N>::type;
template <int N> using Ints = typename Vector<int32_t, N>::type;
template <int N> using Words = typename Vector<uint32_t, N>::type;
typedef Floats<WIDTH> Own;  // the CPU's own vectors
typedef Ints<WIDTH> OwnInts;
typedef Words<WIDTH> OwnWords;
typedef Floats<LANES> F16;
#if defined(__AVX512F__)
typedef Ints<LANES> I16;
#endif

#define INLINE static inline __attribute__((always_inline))

// --- arithmetic of halves -------------------------------------------------------------------------------------------

#define OF_TWO(op)                                                                          \
    template <class V> INLINE auto operator op(const Halves<V> &a, const Halves<V> &b) {    \
        return Halves<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};          \
    }
#define OF_A_NUMBER(op)                                                                     \
    template <class V> INLINE Halves<V> operator op(const Halves<V> &a, float b) {          \
        return {a.low op b, a.high op b};                                                   \
    }                                                                                       \
    template <class V> INLINE Halves<V> operator op(float a, const Halves<V> &b) {          \
        return {a op b.low, a op b.high};                                                   \
    }
OF_TWO(+) OF_TWO(-) OF_TWO(*) OF_TWO(/) OF_TWO(<) OF_TWO(>)
OF_A_NUMBER(+) OF_A_NUMBER(-) OF_A_NUMBER(*) OF_A_NUMBER(/)
#undef OF_TWO
#undef OF_A_NUMBER
template <class V> INLINE Halves<V> operator-(const Halves<V> &a) { return {-a.low, -a.high}; }
template <class V, class B> INLINE Halves<V> &operator+=(Halves<V> &a, const B &b) { return a = a + b; }

INLINE Own splat_of(float x, Own *) { return Own{} + x; }
template <class V> INLINE Halves<V> splat_of(float x, Halves<V> *) {
    const V half = splat_of(x, (V *)nullptr);
    return {half, half};
}
INLINE F16 splat(float x) { return splat_of(x, (F16 *)nullptr); }

// a where `mask` is set, else b.
template <class M, class V> INLINE V select(const M &mask, const V &a, const V &b) { return mask ? a : b; }
template <class M, class V> INLINE Halves<V> select(const Halves<M> &mask, const Halves<V> &a, const Halves<V> &b) {
    return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
}

template <class V> INLINE V larger(const V &a, const V &b) { return select(a > b, a, b); }

// --- memory ---------------------------------------------------------------------------------------------------------

INLINE void load_to(Own &v, const float *p) { memcpy(&v, p, sizeof v); }
INLINE void load_to(Own &v, const bf16 *p) {
#if defined(__AVX512F__)
    v = (Own)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    v = (Own)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    typedef uint16_t Bits __attribute__((vector_size(2 * WIDTH)));
    Bits bits;
    memcpy(&bits, p, sizeof bits);
    v = (Own)(__builtin_convertvector(bits, OwnWords) << 16);
#endif
}
INLINE void load_to(Own &v, const fp16 *p) {
#if defined(__AVX512F__)
    v = (Own)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__) && defined(__AVX2__)
    v = (Own)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    for (int i = 0; i < WIDTH; i++) v[i] = (float)p[i];
#endif
}
template <class V, class T> INLINE void load_to(Halves<V> &v, const T *p) {
    load_to(v.low, p);
    load_to(v.high, p + sizeof v.low / sizeof(float));
}
template <class T> INLINE F16 load(const T *p) {
    F16 v;
    load_to(v, p);
    return v;
}

// The first (part 0) or the second numbers of pairs of bf16.
INLINE void load_pairs(Own &v, const bf16 *p, int part) {
    OwnWords pairs;
    memcpy(&pairs, p, sizeof pairs);
    v = (Own)(part ? pairs & 0xffff0000u : pairs << 16);
}
template <class V> INLINE void load_pairs(Halves<V> &v, const bf16 *p, int part) {
    load_pairs(v.low, p, part);
    load_pairs(v.high, p + sizeof v.low / 2, part);
}

INLINE void store_from(float *p, const Own &v) { memcpy(p, &v, sizeof v); }
// Round to nearest, ties to even; what is not a number stays so.
INLINE void store_from(bf16 *p, const Own &v) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &half, sizeof half);
#else
    const OwnWords bits = (OwnWords)v, nan = (OwnWords)(v != v);
    const OwnWords rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const OwnWords cells = (rounded & ~nan) | (nan & 0x7fc0);
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)cells, (__m256i)cells), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
#else
    typedef uint16_t Bits __attribute__((vector_size(2 * WIDTH)));
    const Bits half = __builtin_convertvector(cells, Bits);
    memcpy(p, &half, sizeof half);
#endif
#endif
}
INLINE void store_from(fp16 *p, const Own &v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && defined(__AVX2__)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < WIDTH; i++) p[i] = (fp16)v[i];
#endif
}
template <class V, class T> INLINE void store_from(T *p, const Halves<V> &v) {
    store_from(p, v.low);
    store_from(p + sizeof v.low / sizeof(float), v.high);
}
template <class T> INLINE void store(T *p, const F16 &v) { store_from(p, v); }

// What a number becomes when it is stored as T and loaded again.
template <class T> INLINE F16 rounded(const F16 &v) {
    T cell[LANES];
    store(cell, v);
    return load(cell);
}
template <> inline __attribute__((always_inline)) F16 rounded<float>(const F16 &v) { return v; }
#if defined(__AVX512BF16__)
template <> inline __attribute__((always_inline)) F16 rounded<bf16>(const F16 &v) {
    return (F16)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)), 16);
}
#endif

// --- across a vector ------------------------------------------------------------------------------------------------

typedef float F4 __attribute__((vector_size(16)));
typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef int32_t I8 __attribute__((vector_size(32)));

struct Sum {
    template <class V> __attribute__((always_inline)) V operator()(const V &a, const V &b) const { return a + b; }
};
struct Largest {
    template <class V> __attribute__((always_inline)) V operator()(const V &a, const V &b) const { return larger(a, b); }
};

// All lanes joined to one number: halves are folded onto each other.
template <class Join> INLINE float across(const F4 &v, Join join) {
    const F4 two = join(v, __builtin_shuffle(v, I4{2, 3, 0, 1}));
    return join(two, __builtin_shuffle(two, I4{1, 0, 3, 2}))[0];
}
#if defined(__AVX2__)
template <class Join> INLINE float across(const F8 &v, Join join) {
    return across(join((F4)_mm256_castps256_ps128((__m256)v), (F4)_mm256_extractf128_ps((__m256)v, 1)), join);
}
#endif
#if defined(__AVX512F__)
template <class Join> INLINE float across(const F16 &v, Join join) {
    const F8 high = (F8)_mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1));
    return across(join((F8)_mm512_castps512_ps256((__m512)v), high), join);
}
#endif
template <class V, class Join> INLINE float across(const Halves<V> &v, Join join) {
    return across(join(v.low, v.high), join);
}
INLINE float sum_of(const F16 &v) { return across(v, Sum{}); }
INLINE float largest_of(const F16 &v) { return across(v, Largest{}); }

// As many vectors as they have lanes to one: lane i of the result is all lanes of v[i] joined. Pairs of vectors are
// folded onto each other, and again.
#if defined(__AVX512F__)
template <class Join> INLINE F16 fold(F16 *v, Join join) {
    const I16 even8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const I16 odd8 = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
    const I16 even4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    const I16 odd4 = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
    const I16 even2 = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29};
    const I16 odd2 = {2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31};
    const I16 even1 = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const I16 odd1 = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    const auto pairs = [&](int count, const I16 &even, const I16 &odd) __attribute__((always_inline)) {
        for (int i = 0; i < count; i++)
            v[i] = join(__builtin_shuffle(v[2 * i], v[2 * i + 1], even), __builtin_shuffle(v[2 * i], v[2 * i + 1], odd));
    };
    pairs(8, even8, odd8);
    pairs(4, even4, odd4);
    pairs(2, even2, odd2);
    pairs(1, even1, odd1);
    return v[0];
}
#else
template <class Join> INLINE F4 fold_few(const F4 *v, Join join) {
    F4 two[2];
    for (int i = 0; i < 2; i++)
        two[i] = join(__builtin_shuffle(v[2 * i], v[2 * i + 1], I4{0, 1, 4, 5}),
                      __builtin_shuffle(v[2 * i], v[2 * i + 1], I4{2, 3, 6, 7}));
    return join(__builtin_shuffle(two[0], two[1], I4{0, 2, 4, 6}), __builtin_shuffle(two[0], two[1], I4{1, 3, 5, 7}));
}
#if defined(__AVX2__)
// Within quarters of a pair of vectors first: that is one instruction each.
template <class Join> INLINE F8 fold_few(const F8 *v, Join join) {
    F8 four[4], two[2];
    for (int i = 0; i < 4; i++)
        four[i] = join(__builtin_shuffle(v[2 * i], v[2 * i + 1], I8{0, 1, 8, 9, 4, 5, 12, 13}),
                       __builtin_shuffle(v[2 * i], v[2 * i + 1], I8{2, 3, 10, 11, 6, 7, 14, 15}));
    for (int i = 0; i < 2; i++)
        two[i] = join(__builtin_shuffle(four[2 * i], four[2 * i + 1], I8{0, 2, 8, 10, 4, 6, 12, 14}),
                      __builtin_shuffle(four[2 * i], four[2 * i + 1], I8{1, 3, 9, 11, 5, 7, 13, 15}));
    return join(__builtin_shuffle(two[0], two[1], I8{0, 1, 2, 3, 8, 9, 10, 11}),
                __builtin_shuffle(two[0], two[1], I8{4, 5, 6, 7, 12, 13, 14, 15}));
}
#endif
template <class Join> INLINE const Own &narrowed(const Own &v, Join) { return v; }
template <class V, class Join> INLINE Own narrowed(const Halves<V> &v, Join join) {
    return narrowed(join(v.low, v.high), join);
}
template <class Join> INLINE void fold_to(Own &out, const Own *v, Join join) {
    out = fold_few(v, join);
}
template <class V, class Join> INLINE void fold_to(Halves<V> &out, const Own *v, Join join) {
    fold_to(out.low, v, join);
    fold_to(out.high, v + sizeof out.low / sizeof(float), join);
}
template <class Join> INLINE F16 fold(const F16 *v, Join join) {
    Own narrow[LANES];
    for (int i = 0; i < LANES; i++) narrow[i] = narrowed(v[i], join);
    F16 out;
    fold_to(out, narrow, join);
    return out;
}
#endif
INLINE F16 sums_of(F16 *v) { return fold(v, Sum{}); }
INLINE F16 largests_of(F16 *v) { return fold(v, Largest{}); }

// The first `count` lanes of v; the others are `rest`.
template <class V> INLINE V first_of(const V &v, int count, float rest) {
    OwnInts lane;
    for (int i = 0; i < WIDTH; i++) lane[i] = i;
    return select(lane < count, v, V{} + rest);
}
template <class V> INLINE Halves<V> first_of(const Halves<V> &v, int count, float rest) {
    return {first_of(v.low, count, rest), first_of(v.high, count - (int)(sizeof v.low / sizeof(float)), rest)};
}

// --- exponentials ---------------------------------------------------------------------------------------------------

// 2^x within 2 units of the last place for x <= 0; 0 below -126 (so of minus infinity too).
template <class V> INLINE V exp2_of(const V &x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const V shifted = x + magic;
    const V f = x - (shifted - magic);
    const OwnInts n = (OwnInts)shifted << 23;
    V p = f * 1.5403530e-4f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    const V y = (V)((OwnInts)p + n);
    return select(x < -126.0f, V{}, y);
}
template <class V> INLINE Halves<V> exp2_of(const Halves<V> &x) { return {exp2_of(x.low), exp2_of(x.high)}; }

// 2^x for x <= 0, 1e-4 of it off at most: a twentieth of what rounding to bf16 adds. 0 for minus infinity.
INLINE F16 exp2_for(const bf16 *, const F16 &x) {
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
INLINE F16 exp2_for(const float *, const F16 &x) { return exp2_of(x); }

static constexpr float LOG2E = 1.4426950408889634f;

// z / (1 + exp(-z)); of the exponential only the side that cannot overflow is used.
template <class V> INLINE V silu(const V &z) {
    const V e = exp2_of(select(z < 0.0f, z, -z) * LOG2E);
    return z * select(z < 0.0f, e, V{} + 1.0f) / (1.0f + e);
}
template <class V> INLINE Halves<V> silu(const Halves<V> &z) { return {silu(z.low), silu(z.high)}; }
