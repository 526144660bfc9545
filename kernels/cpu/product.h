// Products of rows with a packed matrix: y[m, n] = sum_k a[m, k] * w[n, k], summed in fp32.
//
// Owns: the packed form, and the product of a block of rows with a panel of 32 columns on whatever the CPU has: AMX
// tiles, AVX-512 bf16 dot products, or fused multiply-adds. The sum over k has one order whatever the number of rows,
// so a row's result does not depend on its batch.
//
//   panel of 32 columns, bf16:  [k / 2][column][2]   a line of the cache holds 16 columns and two k
//                        fp32:  [k][column]
//
// Panels follow each other, so a product reads its matrix once, front to back. Rows of up to one block take a panel as
// it comes from memory. More of them meet a panel block by block, with tiles:
//
//   first cache    the panel, up to 640 deep
//   second cache   all rows, which are loaded past the first one; the next panel, which is fetched meanwhile
//   tiles          block m x panel | block m + 1 x panel | ..
//   vectors                          bias, sum or gate of block m, and its rounding | .. of block m + 1
#pragma once

#include <algorithm>
#include <type_traits>

#include "layout.h"
#include "vector.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

static constexpr int PANEL = 32;  // columns
static constexpr int MOST_ROWS = 1024;  // that are multiplied with one panel after the other
static constexpr int PANEL_DEPTH = 640;  // of a part of a panel that stays in the first cache

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
// Tiles read memory behind the compiler's back: what was written to it until here has to be there.
static inline void written() { asm volatile("" ::: "memory"); }

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
    written();
    _tile_loadconfig(&shapes);
}

// How a block's rows and panel come to the core, and what else it does meanwhile, at each step of k.
struct FromMemory {  // a panel for the only rows there are: what four steps later reads is fetched
    static constexpr bool KEEPS_PANEL = false;
    inline void step(const bf16 *lines) const {
        for (int i = 0; i < 32; i++) __builtin_prefetch((const char *)(lines + 4 * 32 * PANEL) + i * 64);
    }
};
struct FromCache {
    static constexpr bool KEEPS_PANEL = false;
    inline void step(const bf16 *) const {}
};

// Rows that pass by a panel are loaded past the first cache, lest they drive it out.
template <bool Passing> static inline void load_upper_rows(const bf16 *from, long row_bytes) {
    if constexpr (Passing) _tile_stream_loadd(4, from, row_bytes);
    else _tile_loadd(4, from, row_bytes);
}
template <bool Passing> static inline void load_lower_rows(const bf16 *from, long row_bytes) {
    if constexpr (Passing) _tile_stream_loadd(5, from, row_bytes);
    else _tile_loadd(5, from, row_bytes);
}

template <class Meanwhile>
static inline void multiply_tiles(int rows, const bf16 *a, const Layout &layout, const bf16 *panel, long depth,
                                  float *out, bool more, Meanwhile &meanwhile) {
    constexpr bool PASSING = Meanwhile::KEEPS_PANEL;
    const long a_bytes = layout.row_step() * 2, out_bytes = PANEL * 4, line_bytes = PANEL * 4;
    const long to_lower = layout.row(TILE_ROWS), step = layout.depth_step();
    written();
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
            load_upper_rows<PASSING>(a, a_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, lines + 32, line_bytes);
            _tile_dpbf16ps(1, 4, 7);
            load_lower_rows<PASSING>(a + to_lower, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            meanwhile.step(lines);
            a += step;
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
        load_upper_rows<PASSING>(a, a_bytes);
        _tile_loadd(6, lines, line_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, lines + 32, line_bytes);
        _tile_dpbf16ps(1, 4, 7);
        meanwhile.step(lines);
        a += step;
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + 16, out_bytes);
}

// A thread's hold on the tiles while it multiplies. They are shaped anew when the number of rows changes.
class Tiles {
public:
    ~Tiles() {
        if (shaped_) _tile_release();
    }
    void shape(int rows) {
        if (shaped_ != rows) shape_tiles(shaped_ = rows);
    }

private:
    int shaped_ = 0;
};
#endif

// Products of single blocks, without anything between them.
class Multiplier {
public:
    explicit Multiplier(bool tiles) : tiles_(tiles) {}

    // out[rows][PANEL] (+)= a x panel; `rows` is at most BLOCK.
    void operator()(int rows, const bf16 *a, long stride, const bf16 *panel, long depth, float *out, bool more) {
#if HAS_AMX
        if (tiles_) {
            FromCache meanwhile;
            held_.shape(rows);
            return multiply_tiles(rows, a, Layout{stride}, panel, depth, out, more, meanwhile);
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

    bool tiles_;
#if HAS_AMX
    Tiles held_;
#endif
};

// Rows that stay in a core's second cache while the panels pass by.
static inline long rows_at_a_time(long depth) {
    const long rows = (768 << 10) / (depth * 2) / BLOCK * BLOCK;
    return std::clamp<long>(rows, BLOCK, MOST_ROWS);
}

#if HAS_AMX
// While tiles multiply, the rest of the core is free: it finishes the block before, and fetches the panel after.
template <class Finish> struct Pipeline {
    static constexpr bool KEEPS_PANEL = true;
    const Finish &finish;
    const float *sums = nullptr;  // of the block before: its rows [row, end)
    long row = 0, end = 0, column = 0;
    int rows_a_step = 0, lines_a_step = 0;
    const char *next = nullptr;

    inline void step(const bf16 *) {
        for (int i = 0; i < lines_a_step; i++, next += 64) __builtin_prefetch(next, 0, 2);
        for (int i = 0; i < rows_a_step && row < end; i++, row++, sums += PANEL) finish(row, column, sums);
    }
    // The block before is finished by now: a block has steps for all of its rows.
    void finish_next(long first, int count, long of, const float *from) {
        row = first, end = first + count, column = of, sums = from;
    }
    void finish_last() {
        for (; row < end; row++, sums += PANEL) finish(row, column, sums);
    }
};

// Rows [start, end), which stay in the second cache, by all panels. A panel too deep for the first cache is cut; the
// sums of its parts are kept in fp32, so a row's sum has the same order as in one piece.
template <class Finish>
static void multiply_many(Tiles &held, long start, long end, const bf16 *a, const Layout &layout, const bf16 *packed,
                          long first, long last, const Finish &finish) {
    alignas(64) static thread_local float sums[(MOST_ROWS + BLOCK) * PANEL];
    const long depth = layout.columns;
    const long parts = (depth + PANEL_DEPTH - 1) / PANEL_DEPTH, part = padded((depth + parts - 1) / parts, DEPTH);
    Pipeline<Finish> pipeline{finish};
    const long rows = std::max<long>(end - start, BLOCK);
    pipeline.lines_a_step = (int)((BLOCK * PANEL + rows - 1) / rows);
    for (long p = first; p < last; p++) {
        for (long k = 0; k < depth; k += part) {
            const long some = std::min(part, depth - k);
            const bf16 *panel = packed + (p * depth + k) * PANEL;
            pipeline.next = (const char *)(panel + some * PANEL);
            if (p + 1 == last && k + some == depth) pipeline.lines_a_step = 0;
            pipeline.rows_a_step = (int)((BLOCK * DEPTH + some - 1) / some);
            for (long m = start; m < end; m += BLOCK) {
                const int count = (int)std::min<long>(end - m, BLOCK);
                float *out = sums + (parts > 1 ? m - start : (m - start) % (2 * BLOCK)) * PANEL;
                held.shape(count);
                multiply_tiles(count, a + layout.at(m, k), layout, panel, some, out, k > 0, pipeline);
                if (k + some == depth) pipeline.finish_next(m, count, p * PANEL, out);
            }
        }
    }
    pipeline.finish_last();
}

// Rows of one block: each panel comes from memory, and is done with.
template <class Finish>
static void multiply_few(Tiles &held, int rows, const bf16 *a, const Layout &layout, const bf16 *packed, long first,
                         long last, const Finish &finish) {
    alignas(64) float sums[BLOCK * PANEL];
    FromMemory from_memory;
    held.shape(rows);
    for (long p = first; p < last; p++) {
        multiply_tiles(rows, a, layout, packed + p * PANEL * layout.columns, layout.columns, sums, false, from_memory);
        for (int r = 0; r < rows; r++) finish(r, p * PANEL, (const float *)sums + r * PANEL);
    }
}
#endif

// The product of `rows` rows with panels [first, last): calls finish(row, column, PANEL sums) once for each of both.
// Without tiles rows are plain.
template <class Finish>
static void multiply(bool tiles, long rows, const bf16 *a, const Layout &layout, const bf16 *packed, long first,
                     long last, const Finish &finish) {
    const long depth = layout.columns, most = rows_at_a_time(depth);
#if HAS_AMX
    if (tiles) {
        Tiles held;
        if (rows <= BLOCK) return multiply_few(held, (int)rows, a, layout, packed, first, last, finish);
        for (long start = 0; start < rows; start += most)
            multiply_many(held, start, std::min(start + most, rows), a, layout, packed, first, last, finish);
        return;
    }
#endif
    Multiplier block(false);
    alignas(64) float sums[BLOCK * PANEL];
    for (long start = 0; start < rows; start += most) {
        const long end = std::min(start + most, rows);
        for (long p = first; p < last; p++) {
            for (long m = start; m < end; m += BLOCK) {
                const int count = (int)std::min<long>(end - m, BLOCK);
                block(count, a + m * depth, depth, packed + p * PANEL * depth, depth, sums, false);
                for (int r = 0; r < count; r++) finish(m + r, p * PANEL, (const float *)sums + r * PANEL);
            }
        }
    }
}
