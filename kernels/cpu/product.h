// Products of rows with a packed matrix: y[m, n] = sum_k a[m, k] * w[n, k], summed in fp32.
//
// Owns: the packed form, and the product of a block of rows with a panel of 32 columns on whatever the CPU has: AMX
// tiles, AVX-512 bf16 dot products, or fused multiply-adds of rows in fp32. The sum over k has one order whatever the
// number of rows, so a row's result does not depend on its batch.
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
#include <vector>

#include "layout.h"
#include "vector.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__)
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

// How a row and a line of the panel are multiplied: a step of k has `PARTS` things to add, one after the other.
#if defined(__AVX512BF16__)
struct Pairs {  // of bf16, by the dot products of the CPU
    typedef bf16 Number;
    typedef bf16 Cell;
    static constexpr int STEP = 2, PARTS = 1;
    INLINE auto line(const bf16 *cells, int) { return (__m512bh)_mm512_loadu_si512(cells); }
    INLINE void add(F16 &sum, const bf16 *a, int, const __m512bh &line) {
        uint32_t pair;
        memcpy(&pair, a, sizeof pair);
        sum = (F16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)pair), line);
    }
};
#else
struct Pairs {  // rows of fp32 by columns of bf16
    typedef float Number;
    typedef bf16 Cell;
    static constexpr int STEP = 2, PARTS = 2;
    INLINE F16 line(const bf16 *cells, int part) {
        F16 line;
        load_pairs(line, cells, part);
        return line;
    }
    INLINE void add(F16 &sum, const float *a, int part, const F16 &line) { sum += line * a[part]; }
};
#endif

struct Singles {
    typedef float Number;
    typedef float Cell;
    static constexpr int STEP = 1, PARTS = 1;
    INLINE F16 line(const float *cells, int) { return load(cells); }
    INLINE void add(F16 &sum, const float *a, int, const F16 &line) { sum += line * *a; }
};

// Sums that fit into the registers, with what they are made from: rows at a time by halves of a panel.
#if defined(__AVX512F__)
static constexpr int ROWS = 12, FEW_ROWS = 12;
#elif defined(__AVX2__)
static constexpr int ROWS = 6, FEW_ROWS = 2;
#else
static constexpr int ROWS = 3, FEW_ROWS = 1;
#endif

template <class Kind, int M, int HALVES>
INLINE void multiply_halves(const typename Kind::Number *a, long stride, const typename Kind::Cell *panel, long depth,
                            float *out, bool more) {
    F16 sums[M][HALVES];
    for (int m = 0; m < M; m++)
        for (int h = 0; h < HALVES; h++) sums[m][h] = more ? load(out + m * PANEL + h * LANES) : splat(0.0f);
    for (long k = 0; k < depth; k += Kind::STEP) {
        const typename Kind::Cell *line = panel + k * PANEL;
        if (M < ROWS) {  // few rows: the panel is read from memory, once
            __builtin_prefetch((const char *)line + 2048);
            __builtin_prefetch((const char *)line + 2048 + 64);
        }
#pragma GCC unroll 2
        for (int part = 0; part < Kind::PARTS; part++) {
            decltype(Kind::line(line, part)) columns[HALVES];
#pragma GCC unroll 2
            for (int h = 0; h < HALVES; h++) columns[h] = Kind::line(line + h * LANES * Kind::STEP, part);
#pragma GCC unroll 16
            for (int m = 0; m < M; m++)
#pragma GCC unroll 2
                for (int h = 0; h < HALVES; h++) Kind::add(sums[m][h], a + m * stride + k, part, columns[h]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int h = 0; h < HALVES; h++) store(out + m * PANEL + h * LANES, sums[m][h]);
}

// Both halves of a panel at once for few rows, which read it from memory in one go; one after the other for more.
template <class Kind, int M>
static void multiply_rows(const typename Kind::Number *a, long stride, const typename Kind::Cell *panel, long depth,
                          float *out, bool more) {
    if constexpr (M <= FEW_ROWS) {
        multiply_halves<Kind, M, 2>(a, stride, panel, depth, out, more);
    } else {
        multiply_halves<Kind, M, 1>(a, stride, panel, depth, out, more);
        multiply_halves<Kind, M, 1>(a, stride, panel + LANES * Kind::STEP, depth, out + LANES, more);
    }
}

template <class Kind, int M>
static void multiply_last(int rows, const typename Kind::Number *a, long stride, const typename Kind::Cell *panel,
                          long depth, float *out, bool more) {
    if constexpr (M > 0) {
        if (rows == M) return multiply_rows<Kind, M>(a, stride, panel, depth, out, more);
        multiply_last<Kind, M - 1>(rows, a, stride, panel, depth, out, more);
    }
}

static constexpr int BLOCK = HAS_AMX ? 32 : 48;  // rows of a block, at most

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
    void operator()(int rows, const Pairs::Number *a, long stride, const bf16 *panel, long depth, float *out,
                    bool more) {
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
    static void by_rows(int rows, const typename Kind::Number *a, long stride, const typename Kind::Cell *panel,
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

// Rows that stay in a core's second cache while the panels pass by. CPUs without bf16 have small ones.
static inline long rows_at_a_time(long depth) {
    const long bytes = sizeof(Pairs::Number) == 2 ? 768 << 10 : 256 << 10;
    const long rows = bytes / (depth * (long)sizeof(Pairs::Number)) / BLOCK * BLOCK;
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

// Rows as `Pairs` takes them: themselves, or in fp32 until this thread asks again.
#if defined(__AVX512BF16__)
static inline const bf16 *numbers_of(const bf16 *a, long) { return a; }
#else
static inline const float *numbers_of(const bf16 *a, long count) {
    static thread_local std::vector<float> numbers;
    if ((long)numbers.size() < count) numbers.resize(count);
    for (long i = 0; i < count; i += LANES) store(numbers.data() + i, load(a + i));
    return numbers.data();
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
        const auto numbers = numbers_of(a + start * depth, (end - start) * depth);
        for (long p = first; p < last; p++) {
            for (long m = start; m < end; m += BLOCK) {
                const int count = (int)std::min<long>(end - m, BLOCK);
                block(count, numbers + (m - start) * depth, depth, packed + p * PANEL * depth, depth, sums, false);
                for (int r = 0; r < count; r++) finish(m + r, p * PANEL, (const float *)sums + r * PANEL);
            }
        }
    }
}
