// Products of rows with a packed matrix: y[m, n] = sum_k a[m, k] * w[n, k], summed in fp32.
//
// Owns: the packed form, and the product of a block of rows with a panel of 32 columns on whatever the CPU has: AMX
// tiles, AVX-512 bf16 dot products, or fused multiply-adds. The sum over k has one order whatever the number of rows,
// so a row's result does not depend on its batch.
//
//   panel of 32 columns, bf16:  [k / 2][column][2]   a line of the cache holds 16 columns and two k
//                        fp32:  [k][column]
//
// Panels follow each other, so a product reads its matrix once, front to back.
#pragma once

#include "vector.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

static constexpr int PANEL = 32;  // columns
static constexpr int DEPTH = 32;  // bf16 matrices have a multiple of so many k

static inline long padded(long n, long unit) { return (n + unit - 1) / unit * unit; }

// The system lends the tiles to a process that asks.
static bool amx_granted() {
#if HAS_AMX
    static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
    return granted;
#else
    return false;
#endif
}

// Packs `rows` rows of w, `depth` numbers each, as columns of the product; missing columns are zero.
static void pack_columns(const bf16 *w, long stride, long rows, long depth, bf16 *panel) {
    const long pairs = depth / 2;
    for (long n = 0; n < PANEL; n++) {
        uint32_t *column = (uint32_t *)panel + n;
        const bf16 *row = w + n * stride;
        for (long k = 0; k < pairs; k++) {
            uint32_t pair = 0;
            if (n < rows) memcpy(&pair, row + 2 * k, sizeof pair);
            column[k * PANEL] = pair;
        }
    }
}

// One step of k for each kind of number: a[k] times a line of the panel.
struct Pairs {
    typedef bf16 Number;
    static constexpr int STEP = 2;
    static inline void add(F16 &sum0, F16 &sum1, const bf16 *a, const bf16 *line) {
        uint32_t pair;
        memcpy(&pair, a, sizeof pair);
#if defined(__AVX512BF16__)
        __m512bh both = (__m512bh)_mm512_set1_epi32((int)pair);
        sum0 = (F16)_mm512_dpbf16_ps((__m512)sum0, both, (__m512bh)_mm512_loadu_si512(line));
        sum1 = (F16)_mm512_dpbf16_ps((__m512)sum1, both, (__m512bh)_mm512_loadu_si512(line + 32));
#else
        uint32_t low_bits = pair << 16, high_bits = pair & 0xffff0000u;
        float low, high;
        memcpy(&low, &low_bits, sizeof low);
        memcpy(&high, &high_bits, sizeof high);
        U16 w0, w1;
        memcpy(&w0, line, sizeof w0);
        memcpy(&w1, line + 32, sizeof w1);
        sum0 += (F16)(w0 << 16) * low;
        sum0 += (F16)(w0 & 0xffff0000u) * high;
        sum1 += (F16)(w1 << 16) * low;
        sum1 += (F16)(w1 & 0xffff0000u) * high;
#endif
    }
};

struct Singles {
    typedef float Number;
    static constexpr int STEP = 1;
    static inline void add(F16 &sum0, F16 &sum1, const float *a, const float *line) {
        sum0 += load(line) * *a;
        sum1 += load(line + LANES) * *a;
    }
};

#if defined(__AVX512F__)
static constexpr int ROWS = 12;  // rows at a time: 24 sums and what they are made from fit into 32 registers
#else
static constexpr int ROWS = 2;
#endif

template <class Kind, int M>
static void multiply_rows(const typename Kind::Number *a, long stride, const typename Kind::Number *panel, long depth,
                          float *out, bool more) {
    F16 sums[M][2];
    for (int m = 0; m < M; m++)
        for (int h = 0; h < 2; h++) sums[m][h] = more ? load(out + m * PANEL + h * LANES) : splat(0.0f);
    for (long k = 0; k < depth; k += Kind::STEP) {
        const typename Kind::Number *line = panel + k * PANEL;
        if (M < ROWS) {  // few rows: the panel is read from memory, once
            __builtin_prefetch((const char *)line + 2048);
            __builtin_prefetch((const char *)line + 2048 + 64);
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) Kind::add(sums[m][0], sums[m][1], a + m * stride + k, line);
    }
    for (int m = 0; m < M; m++)
        for (int h = 0; h < 2; h++) store(out + m * PANEL + h * LANES, sums[m][h]);
}

template <class Kind, int M>
static void multiply_last(int rows, const typename Kind::Number *a, long stride, const typename Kind::Number *panel,
                          long depth, float *out, bool more) {
    if constexpr (M > 0) {
        if (rows == M) return multiply_rows<Kind, M>(a, stride, panel, depth, out, more);
        multiply_last<Kind, M - 1>(rows, a, stride, panel, depth, out, more);
    }
}

static constexpr int BLOCK = 32;  // rows of a block, at most

#if HAS_AMX
struct TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3 hold sums (two blocks of 16 rows by two of 16 columns), 4 and 5 rows, 6 and 7 columns.
static void shape_tiles(int rows) {
    alignas(64) TileShapes shapes;
    const int upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : 1;
    const int heights[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int t = 0; t < 8; t++) {
        shapes.bytes[t] = 64;
        shapes.rows[t] = (uint8_t)heights[t];
    }
    _tile_loadconfig(&shapes);
}

// What a step of k will read four steps later. A panel that is read once comes from memory.
template <bool Once> static inline void prefetch_lines(const bf16 *lines) {
    if constexpr (Once)
        for (int i = 0; i < 32; i++) __builtin_prefetch((const char *)(lines + 4 * 32 * PANEL) + i * 64);
}

template <bool Once>
static void multiply_tiles(int rows, const bf16 *a, long stride, const bf16 *panel, long depth, float *out, bool more) {
    const long a_bytes = stride * 2, out_bytes = PANEL * 4, line_bytes = PANEL * 4;
    if (rows > 16) {
        if (more) {
            _tile_loadd(0, out, out_bytes);
            _tile_loadd(1, out + 16, out_bytes);
            _tile_loadd(2, out + 16 * PANEL, out_bytes);
            _tile_loadd(3, out + 16 * PANEL + 16, out_bytes);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (long k = 0; k < depth; k += 32) {
            const bf16 *lines = panel + k * PANEL;
            _tile_loadd(6, lines, line_bytes);
            _tile_loadd(4, a + k, a_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, lines + 32, line_bytes);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a + 16 * stride + k, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            prefetch_lines<Once>(lines);
        }
        _tile_stored(0, out, out_bytes);
        _tile_stored(1, out + 16, out_bytes);
        _tile_stored(2, out + 16 * PANEL, out_bytes);
        _tile_stored(3, out + 16 * PANEL + 16, out_bytes);
        return;
    }
    if (more) {
        _tile_loadd(0, out, out_bytes);
        _tile_loadd(1, out + 16, out_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    for (long k = 0; k < depth; k += 32) {
        const bf16 *lines = panel + k * PANEL;
        _tile_loadd(4, a + k, a_bytes);
        _tile_loadd(6, lines, line_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, lines + 32, line_bytes);
        _tile_dpbf16ps(1, 4, 7);
        prefetch_lines<Once>(lines);
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + 16, out_bytes);
}
#endif

// A thread's hold on the tiles while it multiplies. They are shaped anew when the number of rows changes.
class Multiplier {
public:
    Multiplier(bool tiles, bool once) : tiles_(tiles), once_(once) {}
    ~Multiplier() {
#if HAS_AMX
        if (shaped_) _tile_release();
#endif
    }

    // out[rows][PANEL] (+)= a x panel; `rows` is at most BLOCK.
    void operator()(int rows, const bf16 *a, long stride, const bf16 *panel, long depth, float *out, bool more) {
#if HAS_AMX
        if (tiles_) {
            if (shaped_ != rows) shape_tiles(rows), shaped_ = rows;
            return (once_ ? multiply_tiles<true> : multiply_tiles<false>)(rows, a, stride, panel, depth, out, more);
        }
#endif
        by_rows<Pairs>(rows, a, stride, panel, depth, out, more);
    }

    void operator()(int rows, const float *a, long stride, const float *panel, long depth, float *out, bool more) {
        by_rows<Singles>(rows, a, stride, panel, depth, out, more);
    }

private:
    template <class Kind>
    static void by_rows(int rows, const typename Kind::Number *a, long stride, const typename Kind::Number *panel,
                        long depth, float *out, bool more) {
        for (; rows >= ROWS; rows -= ROWS, a += ROWS * stride, out += ROWS * PANEL)
            multiply_rows<Kind, ROWS>(a, stride, panel, depth, out, more);
        multiply_last<Kind, ROWS - 1>(rows, a, stride, panel, depth, out, more);
    }

    bool tiles_, once_;
    int shaped_ = 0;
};

// Rows that stay in a core's second cache while the panels pass by.
static inline long rows_at_a_time(long depth) {
    long rows = (768 << 10) / (depth * 2) / BLOCK * BLOCK;
    return rows < BLOCK ? BLOCK : rows;
}

// The product of `rows` rows with panels [first, last): calls finish(row, number of rows, column, block of sums).
template <class Finish>
static void multiply(bool tiles, long rows, const bf16 *a, long stride, const bf16 *packed, long depth, long first,
                     long last, Finish finish) {
    Multiplier block(tiles, rows <= BLOCK);
    alignas(64) float sums[BLOCK * PANEL];
    const long most = rows_at_a_time(depth);
    for (long start = 0; start < rows; start += most) {
        const long end = start + most < rows ? start + most : rows;
        for (long p = first; p < last; p++) {
            const bf16 *panel = packed + p * PANEL * depth;
            for (long m = start; m < end; m += BLOCK) {
                const int count = (int)(end - m < BLOCK ? end - m : BLOCK);
                block(count, a + m * stride, stride, panel, depth, sums, false);
                finish(m, count, p * PANEL, (const float *)sums);
            }
        }
    }
}
