// The small operations between products, a row at a time: normalisation, rotation with the store of keys and values.
//
// Owns: `normalise`, `rotate`. Arithmetic is fp32; a result is rounded where the checkpoints' reference rounds, or not
// at all in between. Widths are multiples of 16.
#pragma once

#include "layout.h"
#include "vector.h"

// out[d] = weight[d] * round(x[d] / sqrt(mean(x^2) + epsilon)); out may be x.
// `layout`: of `out`, whose row begins there.
template <class T>
static void normalise(const T *x, const T *weight, long width, float epsilon, T *out, const Layout &layout) {
    F16 squares[4] = {};  // a sum waits for itself: four take turns
    long at = 0;
    for (; at + 4 * LANES <= width; at += 4 * LANES)
        for (int i = 0; i < 4; i++) {
            const F16 v = load(x + at + i * LANES);
            squares[i] += v * v;
        }
    for (; at < width; at += LANES) {
        const F16 v = load(x + at);
        squares[0] += v * v;
    }
    const float mean = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)width;
    const float scale = 1.0f / sqrtf(mean + epsilon);
    for (long d = 0; d < width; d += LANES)
        store(out + layout.within(d), rounded<T>(load(x + d) * scale) * load(weight + d));
}

static inline float single(float x) { return x; }
static inline float single(fp16 x) { return (float)x; }
static inline float single(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// out[d] = x[d] * cos[d] + x[the other half's d] * sin[d], where the first half of sin is negated; out is not x.
template <class T> static void rotate(const T *x, const T *cosine, const T *sine, long dim, T *out) {
    const long half = dim / 2;
    if (half < LANES) {
        T cells[LANES];
        for (long d = 0; d < dim; d++) {
            const long other = d < half ? d + half : d - half;
            store(cells, splat(single(x[d]) * single(cosine[d]) + single(x[other]) * single(sine[d])));
            out[d] = cells[0];
        }
        return;
    }
    for (long start = 0; start < half; start += LANES) {
        const long d = start + LANES <= half ? start : half - LANES;  // the last one may overlap the one before
        F16 first = load(x + d), second = load(x + half + d);
        store(out + d, first * load(cosine + d) + second * load(sine + d));
        store(out + half + d, second * load(cosine + half + d) + first * load(sine + half + d));
    }
}
