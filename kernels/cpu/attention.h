// Causal attention over keys and values that lie in blocks of the paged pool, read where they lie.
//
// Owns: two ways of it. A row alone (a sequence that decodes) reads each key and value once, for all query heads that
// share them. A chunk's rows share keys and values too: those are packed once, and blocks of rows multiply with them.
// Both keep a running maximum, so scores never exist for a whole context. What lies behind a sequence's context is not
// read. A row's result does not depend on the other rows of the step.
//
//   pool[block][layer][kv_head][key, value][token][feature], contiguous
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "product.h"
#include "rows.h"

static constexpr int SEGMENT = 256;       // tokens between two looks at the maximum, at most
static constexpr long SEGMENT_KIB = 128;  // of keys and values; as much again is on its way meanwhile
static constexpr int KEYS = 128;          // keys that a block of rows meets at a time
static constexpr int WIDEST = 256;        // features of a head

template <class T> struct Cache {
    T *pool;
    long layers, kv_heads, block_size, dim;

    T *key(long block, long layer, long head, long offset) const {
        return pool + ((((block * layers + layer) * kv_heads + head) * 2) * block_size + offset) * dim;
    }
    long to_value() const { return block_size * dim; }
};

// One row that attends alone: its query heads [heads][dim], and its sequence's blocks.
template <class T> struct Alone {
    const T *q;
    T *out;
    const int64_t *table;
    long context;
};

// scores[g][j] = q[g] . key[j] for 16 keys. Queries, which every key meets, are in fp32.
template <class T, int G> static void score(const float *q, long dim, const T *const *keys, float *scores) {
    F16 partial[G][LANES];
    for (int j = 0; j < LANES; j++) {
        const T *key = keys[j];
        F16 sums[G];
        for (int g = 0; g < G; g++) sums[g] = splat(0.0f);
        for (long d = 0; d < dim; d += LANES) {
            F16 k = load(key + d);
            for (int g = 0; g < G; g++) sums[g] += k * load(q + g * dim + d);
        }
        for (int g = 0; g < G; g++) partial[g][j] = sums[g];
    }
    for (int g = 0; g < G; g++) store(scores + g * SEGMENT, sums_of(partial[g]));
}

// out[g] (+)= weights[g][j] * value[j], for features [first, first + 16 * W).
template <class T, int G, int W>
static void gather_features(const float *weights, const T *const *keys, long to_value, long first, long count,
                            long dim, float *out) {
    F16 sums[G][W];
    for (int g = 0; g < G; g++)
        for (int w = 0; w < W; w++) sums[g][w] = load(out + g * dim + first + w * LANES);
    for (long j = 0; j < count; j++) {
        const T *value = keys[j] + to_value + first;
        F16 v[W];
        for (int w = 0; w < W; w++) v[w] = load(value + w * LANES);
        for (int g = 0; g < G; g++) {
            const float weight = weights[g * SEGMENT + j];
            for (int w = 0; w < W; w++) sums[g][w] += v[w] * weight;
        }
    }
    for (int g = 0; g < G; g++)
        for (int w = 0; w < W; w++) store(out + g * dim + first + w * LANES, sums[g][w]);
}

template <class T, int G>
static void gather(const float *weights, const T *const *keys, long to_value, long count, long dim, float *out) {
    long first = 0;
    for (; first + 4 * LANES <= dim; first += 4 * LANES)
        gather_features<T, G, 4>(weights, keys, to_value, first, count, dim, out);
    for (; first < dim; first += LANES)
        gather_features<T, G, 1>(weights, keys, to_value, first, count, dim, out);
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// bf16 with dot products of pairs: of features in the scores, of tokens in the gathering of values.
template <int G> static void score(const bf16 *q, long dim, const bf16 *const *keys, float *scores) {
    F16 partial[G][LANES];
    for (int j = 0; j < LANES; j++) {
        const bf16 *key = keys[j];
        __m512 sums[G];
        for (int g = 0; g < G; g++) sums[g] = _mm512_setzero_ps();
        long d = 0;
        for (; d + 32 <= dim; d += 32) {
            __m512bh k = (__m512bh)_mm512_loadu_si512(key + d);
            for (int g = 0; g < G; g++)
                sums[g] = _mm512_dpbf16_ps(sums[g], (__m512bh)_mm512_loadu_si512(q + g * dim + d), k);
        }
        if (d < dim) {
            __m512bh k = (__m512bh)_mm512_maskz_loadu_epi16(0xffff, key + d);
            for (int g = 0; g < G; g++)
                sums[g] =
                    _mm512_dpbf16_ps(sums[g], (__m512bh)_mm512_maskz_loadu_epi16(0xffff, q + g * dim + d), k);
        }
        for (int g = 0; g < G; g++) partial[g][j] = (F16)sums[g];
    }
    for (int g = 0; g < G; g++) store(scores + g * SEGMENT, sums_of(partial[g]));
}

// Interleaving within quarters of a register is cheap and leaves features in fours; they are put in order at the end.
template <int G, int W>
static void gather_pairs(const bf16 *weights, const bf16 *const *keys, long to_value, long first, long count, long dim,
                         float *out) {
    const I16 lower = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    const I16 upper = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
    const __mmask32 there = dim - first < 32 ? 0xffff : 0xffffffff;
    __m512 sums[G][W][2];
    for (int g = 0; g < G; g++)
        for (int w = 0; w < W; w++) sums[g][w][0] = sums[g][w][1] = _mm512_setzero_ps();
    for (long j = 0; j < count; j += 2) {
        const bf16 *value = keys[j] + to_value + first, *next = keys[j + 1] + to_value + first;
        __m512bh low[W], high[W];
        for (int w = 0; w < W; w++) {
            __m512i a = _mm512_maskz_loadu_epi16(there, value + w * 32);
            __m512i b = _mm512_maskz_loadu_epi16(there, next + w * 32);
            low[w] = (__m512bh)_mm512_unpacklo_epi16(a, b);
            high[w] = (__m512bh)_mm512_unpackhi_epi16(a, b);
        }
        for (int g = 0; g < G; g++) {
            int pair;
            memcpy(&pair, weights + g * SEGMENT + j, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int w = 0; w < W; w++) {
                sums[g][w][0] = _mm512_dpbf16_ps(sums[g][w][0], low[w], both);
                sums[g][w][1] = _mm512_dpbf16_ps(sums[g][w][1], high[w], both);
            }
        }
    }
    for (int g = 0; g < G; g++)
        for (int w = 0; w < W; w++) {
            float *cells = out + g * dim + first + w * 32;
            F16 low = (F16)sums[g][w][0], high = (F16)sums[g][w][1];
            store(cells, load(cells) + __builtin_shuffle(low, high, lower));
            if (there == 0xffffffff) store(cells + LANES, load(cells + LANES) + __builtin_shuffle(low, high, upper));
        }
}

template <int G>
static void gather(const float *weights, const bf16 *const *keys, long to_value, long count, long dim, float *out) {
    bf16 pairs[G * SEGMENT];
    for (int g = 0; g < G; g++)
        for (long j = 0; j < count; j += LANES) store(pairs + g * SEGMENT + j, load(weights + g * SEGMENT + j));
    long first = 0;
    for (; first + 64 <= dim; first += 64) gather_pairs<G, 2>(pairs, keys, to_value, first, count, dim, out);
    for (; first < dim; first += 32) gather_pairs<G, 1>(pairs, keys, to_value, first, count, dim, out);
}
#define PAIRWISE 1
#else
#define PAIRWISE 0
#endif

// Brings the blocks of a list of rows into the second cache, in the order in which they will be read.
template <class T> class Ahead {
public:
    Ahead(const Cache<T> &cache, long layer, long first_head, long last_head, const Alone<T> *rows, long count)
        : bytes_((last_head - first_head) * 2 * cache.block_size * cache.dim * (long)sizeof(T)) {
        for (long i = 0; i < count; i++)
            for (long b = 0; b * cache.block_size < rows[i].context; b++)
                blocks_.push_back((const char *)cache.key(rows[i].table[b], layer, first_head, 0));
    }

    long block_bytes() const { return bytes_; }

    // Asks for everything before `end`, counted in bytes of these blocks as if they followed each other. To be called
    // often: what the memory system cannot take at once would stop the computation.
    void reach(long end) {
        while (at_ < end && block_ < (long)blocks_.size()) {
            const char *line = blocks_[block_] + within_;
            const long here = std::min(end - at_, bytes_ - within_);
            for (long i = 0; i < here; i += 64) __builtin_prefetch(line + i, 0, 2);
            at_ += here, within_ += here;
            if (within_ >= bytes_) within_ = 0, block_++;
        }
    }

private:
    std::vector<const char *> blocks_;
    long bytes_, block_ = 0, within_ = 0, at_ = 0;
};

// How far ahead to be while a head of a segment is met, piece by piece.
template <class T> struct Pace {
    Ahead<T> &ahead;
    long from, bytes;

    void at(long done, long of) const { ahead.reach(from + bytes * done / of / 64 * 64); }
};

// What is known of one query head after some segments: the features summed so far are weighted relative to `best`.
struct Running {
    float best = -std::numeric_limits<float>::infinity(), total = 0.0f, kept = 0.0f;

    // Turns `count` scores into weights in place, with zeros up to the next multiple of `unit`. `kept` is the factor
    // by which all that was summed before shrinks.
    void weigh(float *scores, long count, long unit, float scale) {
        const long end = padded(count, LANES);
        for (long j = count; j < end; j++) scores[j] = -std::numeric_limits<float>::infinity();
        F16 most = load(scores);
        for (long j = LANES; j < end; j += LANES) most = larger(most, load(scores + j));
        const float here = largest_of(most) * scale, now = here > best ? here : best;
        F16 weight = splat(0.0f);
        for (long j = 0; j < end; j += LANES) {
            F16 w = exp2_of(load(scores + j) * scale - now);
            weight += w;
            store(scores + j, w);
        }
        for (long j = end; j < padded(count, unit); j += LANES) store(scores + j, splat(0.0f));
        kept = exp2f(best - now);
        total = total * kept + sum_of(weight);
        best = now;
    }
};

// Keys [start, start + count) of one head; `padded_count` pointers, the last key stands in for those behind the end.
template <class T>
static void find_keys(const Cache<T> &cache, long layer, long head, const int64_t *table, long start, long count,
                      long padded_count, const T **keys) {
    long block = start / cache.block_size, offset = start % cache.block_size;
    const T *key = cache.key(table[block], layer, head, offset);
    for (long j = 0; j < count; j++) {
        if (offset == cache.block_size) key = cache.key(table[++block], layer, head, offset = 0);
        keys[j] = key;
        key += cache.dim;
        offset++;
    }
    for (long j = count; j < padded_count; j++) keys[j] = keys[count - 1];
}

// One segment of a row for up to four query heads of a KV head.
template <class T, int G>
static void meet_segment(const T *q, const Cache<T> &cache, const T *const *keys, long count, float scale,
                         Running *running, float *sums, const Pace<T> &pace) {
    constexpr bool PAIRS = PAIRWISE && std::is_same_v<T, bf16>;
    alignas(64) float scores[G * SEGMENT], queries[PAIRS ? LANES : G * WIDEST];
    const long dim = cache.dim, end = padded(count, LANES);
    if constexpr (!PAIRS)
        for (long d = 0; d < G * dim; d += LANES) store(queries + d, load(q + d));
    for (long j = 0; j < end; j += LANES) {
        pace.at(j + LANES, end);
#if PAIRWISE
        if constexpr (PAIRS)
            score<G>(q, dim, keys + j, scores + j);
        else
#endif
            score<T, G>(queries, dim, keys + j, scores + j);
    }
    for (int g = 0; g < G; g++) {
        running[g].weigh(scores + g * SEGMENT, count, LANES, scale);
        for (long d = 0; d < dim; d += LANES) store(sums + g * dim + d, load(sums + g * dim + d) * running[g].kept);
    }
#if PAIRWISE
    if constexpr (PAIRS)
        gather<G>(scores, keys, cache.to_value(), end, dim, sums);
    else
#endif
        gather<T, G>(scores, keys, cache.to_value(), count, dim, sums);
}

#if HAS_AMX && PAIRWISE
// The same on tiles, for blocks of a multiple of 16 tokens and heads of a multiple of 32 features. Keys are multiplied
// as they lie, by the queries packed as columns; values are interleaved by pairs of tokens first.
//   tiles 0, 1 scores [token][query head]   2 keys   3, 4 queries   5, 6 sums [query head][feature]   7 weights
static void shape_tiles_for_rows(int group) {
    alignas(64) TileShapes shapes;
    for (int t = 0; t < 8; t++) {
        shapes.bytes[t] = 64;
        shapes.rows[t] = (uint8_t)(t < 5 ? 16 : group);
    }
    written();
    _tile_loadconfig(&shapes);
}

// Queries of up to 16 heads as columns: [feature / 32][pair][head][2].
static void pack_queries(const bf16 *q, int group, long dim, bf16 *packed) {
    memset(packed, 0, sizeof(bf16) * 16 * dim);
    for (int g = 0; g < group; g++)
        for (long d = 0; d < dim; d += 2) memcpy(packed + d * 16 + g * 2, q + g * dim + d, 4);
}

// Scores of 16 tokens, [token][16], to rows of four heads: scores[g][token].
static void transpose_four(const float *tokens, float *scores) {
    __m512 v[4];
    for (int k = 0; k < 4; k++) {
        v[k] = _mm512_castps128_ps512(_mm_load_ps(tokens + k * 16));
        v[k] = _mm512_insertf32x4(v[k], _mm_load_ps(tokens + (4 + k) * 16), 1);
        v[k] = _mm512_insertf32x4(v[k], _mm_load_ps(tokens + (8 + k) * 16), 2);
        v[k] = _mm512_insertf32x4(v[k], _mm_load_ps(tokens + (12 + k) * 16), 3);
    }
    const __m512 a = _mm512_unpacklo_ps(v[0], v[1]), b = _mm512_unpackhi_ps(v[0], v[1]);
    const __m512 c = _mm512_unpacklo_ps(v[2], v[3]), d = _mm512_unpackhi_ps(v[2], v[3]);
    _mm512_store_ps(scores, _mm512_shuffle_ps(a, c, 0x44));
    _mm512_store_ps(scores + SEGMENT, _mm512_shuffle_ps(a, c, 0xee));
    _mm512_store_ps(scores + 2 * SEGMENT, _mm512_shuffle_ps(b, d, 0x44));
    _mm512_store_ps(scores + 3 * SEGMENT, _mm512_shuffle_ps(b, d, 0xee));
}

// `group` is at most 16; its tiles are shaped already. `q` is from pack_queries.
static void meet_segment_on_tiles(const bf16 *q, int group, const Cache<bf16> &cache, const bf16 *const *keys,
                                  long count, float scale, Running *running, float *sums,
                                  const Pace<bf16> &pace) {
    alignas(64) static thread_local float scores[16 * SEGMENT], products[2 * 16 * 16];
    alignas(64) static thread_local bf16 weights[16 * SEGMENT], values[2 * 16 * 32];
    const long dim = cache.dim, stride = dim * 2;
    const bool two = dim == 64;  // the usual width: queries stay in their tiles
    written();
    if (two) {
        _tile_loadd(3, q, 64);
        _tile_loadd(4, q + 512, 64);
    }
    for (long j = 0; j < count; j += 32) {
        const bool pair = j + 16 < count;
        pace.at(j + 32, 2 * count);
        _tile_zero(0);
        _tile_zero(1);
        for (long d = 0; d < dim; d += 64) {
            if (!two) _tile_loadd(3, q + d * 16, 64);
            _tile_loadd(2, keys[j] + d, stride);
            _tile_dpbf16ps(0, 2, 3);
            if (pair) {
                _tile_loadd(2, keys[j + 16] + d, stride);
                _tile_dpbf16ps(1, 2, 3);
            }
            if (d + 32 == dim) break;
            if (!two) _tile_loadd(4, q + (d + 32) * 16, 64);
            _tile_loadd(2, keys[j] + d + 32, stride);
            _tile_dpbf16ps(0, 2, 4);
            if (pair) {
                _tile_loadd(2, keys[j + 16] + d + 32, stride);
                _tile_dpbf16ps(1, 2, 4);
            }
        }
        _tile_stored(0, products, 64);
        if (pair) _tile_stored(1, products + 256, 64);
        for (int g = 0; g < group; g += 4) {
            transpose_four(products + g, scores + g * SEGMENT + j);
            if (pair) transpose_four(products + 256 + g, scores + g * SEGMENT + j + 16);
        }
    }
    const long end = padded(count, 32);
    for (int g = 0; g < group; g++) {
        running[g].weigh(scores + g * SEGMENT, count, 32, scale);
        for (long j = 0; j < end; j += LANES) store(weights + g * SEGMENT + j, load(scores + g * SEGMENT + j));
    }
    const I16 lower = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    const I16 upper = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
    for (long d = 0; d < dim; d += 32) {
        _tile_zero(5);
        _tile_zero(6);
        for (long j = 0; j < end; j += 32) {
            if (d == 0) pace.at(count + j + 32, 2 * count);
            for (long i = 0; i < 32; i += 2) {
                const bf16 *value = keys[j + i] + cache.to_value() + d;
                __m512i a = _mm512_loadu_si512(value), b = _mm512_loadu_si512(value + dim);
                // What lies behind the context may be anything, and its weight of zero would not silence a NaN.
                if (j + i + 1 >= count) {
                    b = _mm512_setzero_si512();
                    if (j + i >= count) a = b;
                }
                _mm512_store_si512(values + i * 16, _mm512_unpacklo_epi16(a, b));
                _mm512_store_si512(values + 512 + i * 16, _mm512_unpackhi_epi16(a, b));
            }
            written();
            _tile_loadd(7, weights + j, SEGMENT * 2);
            _tile_loadd(0, values, 64);
            _tile_dpbf16ps(5, 7, 0);
            _tile_loadd(1, values + 512, 64);
            _tile_dpbf16ps(6, 7, 1);
        }
        _tile_stored(5, products, 64);
        _tile_stored(6, products + 256, 64);
        for (int g = 0; g < group; g++) {
            float *cells = sums + g * dim + d;
            const F16 low = load(products + g * 16), high = load(products + 256 + g * 16);
            store(cells, load(cells) * running[g].kept + __builtin_shuffle(low, high, lower));
            store(cells + 16, load(cells + 16) * running[g].kept + __builtin_shuffle(low, high, upper));
        }
    }
}
#endif

// KV heads [first_head, last_head) of some rows. All heads of a segment are met before the next one, because a block
// holds them side by side and memory gives long pieces faster.
template <class T>
static void attend_alone(bool tiles, const Cache<T> &cache, long layer, long group, long first_head, long last_head,
                         const Alone<T> *rows, long count, const Layout &layout) {
    const long dim = cache.dim, heads = last_head - first_head;
    const float scale = LOG2E / sqrtf((float)dim);
    const long token_bytes = cache.kv_heads * 2 * dim * (long)sizeof(T);
    const long segment = std::clamp<long>((SEGMENT_KIB << 10) / token_bytes / 32 * 32, 32, SEGMENT);
    tiles = tiles && std::is_same_v<T, bf16> && dim % 32 == 0 && cache.block_size % 16 == 0 && HAS_AMX && PAIRWISE;
    std::vector<float> sums(heads * group * dim);
    std::vector<Running> running(heads * group);
    std::vector<T> packed(tiles ? heads * padded(group, 16) * dim : 0);
    const T *keys[SEGMENT];
    int shaped = 0;  // the tiles' rows, once they have any
    Ahead<T> ahead(cache, layer, first_head, last_head, rows, count);
    const long head_bytes = 2 * dim * (long)sizeof(T);  // of a token
    const long lead = segment * heads * head_bytes;
    long behind = 0;  // bytes of the blocks of earlier rows
    for (long i = 0; i < count; i++) {
        const Alone<T> &row = rows[i];
        std::fill(sums.begin(), sums.end(), 0.0f);
        std::fill(running.begin(), running.end(), Running{});
        for (long start = 0; start < row.context; start += segment) {
            const long length = std::min(row.context - start, segment);
            for (long h = 0; h < heads; h++) {
                const Pace<T> pace{ahead, behind + lead + (start * heads + h * length) * head_bytes,
                                   length * head_bytes};
                pace.at(0, 1);
                find_keys(cache, layer, first_head + h, row.table, start, length, padded(length, 32), keys);
                const T *q = row.q + (first_head + h) * group * dim;
#if HAS_AMX && PAIRWISE
                if constexpr (std::is_same_v<T, bf16>)
                    if (tiles) {
                        for (long g = 0; g < group; g += 16) {
                            const int some = (int)std::min(group - g, 16l);
                            bf16 *columns = packed.data() + (h * padded(group, 16) + g) * dim;
                            if (start == 0) pack_queries(q + g * dim, some, dim, columns);
                            if (shaped != some) shape_tiles_for_rows(shaped = some);
                            meet_segment_on_tiles(columns, some, cache, keys, length, scale, &running[h * group + g],
                                                  &sums[(h * group + g) * dim], pace);
                        }
                        continue;
                    }
#endif
                for (long g = 0; g < group;) {
                    const long left = group - g;
                    const auto meet = left >= 4   ? meet_segment<T, 4>
                                      : left == 3 ? meet_segment<T, 3>
                                      : left == 2 ? meet_segment<T, 2>
                                                  : meet_segment<T, 1>;
                    meet(q + g * dim, cache, keys, length, scale, &running[h * group + g],
                         &sums[(h * group + g) * dim], pace);
                    g += std::min(left, 4l);
                }
            }
        }
        behind += padded(row.context, cache.block_size) / cache.block_size * ahead.block_bytes();
        for (long g = 0; g < heads * group; g++)
            for (long d = 0; d < dim; d += LANES) {
                const long column = (first_head * group + g) * dim + d;
                store(row.out + layout.within(column), load(&sums[g * dim + d]) / running[g].total);
            }
    }
#if HAS_AMX
    if (shaped) _tile_release();
#endif
}

// What a chunk's keys and values are packed as.
template <class T> struct PackedAs {
    typedef float Number;
};
template <> struct PackedAs<bf16> {
    typedef Pairs::Number Number;
};

static inline void copy_number(float *to, float from) { *to = from; }
static inline void copy_number(float *to, fp16 from) { *to = (float)from; }
static inline void copy_number(float *to, bf16 from) { *to = single(from); }
static inline void copy_number(bf16 *to, bf16 from) { *to = from; }

template <class T> struct Chunk {
    typedef typename PackedAs<T>::Number Number;
    static constexpr int STEP = sizeof(Number) == 2 ? 2 : 1;

    const T *q;  // the chunk's first row; rows are q_stride apart, heads `dim`
    long q_stride;
    T *out;
    Layout layout;  // of `out`, whose rows have heads * dim columns
    long place;     // of the chunk's first row there
    long rows, start, heads;
    const Cache<T> *cache;
    long layer;
    const int64_t *table;
    Number *packed;  // for each KV head: keys, then values

    long context() const { return start + rows; }
    long depth() const { return padded(cache->dim, DEPTH); }
    long keys_size() const { return padded(context(), KEYS) * depth(); }
    long values_size() const { return padded(context(), KEYS) * depth(); }
    long packed_size() const { return cache->kv_heads * (keys_size() + values_size()); }
    Number *keys_of(long head) const { return packed + head * (keys_size() + values_size()); }
    Number *values_of(long head) const { return keys_of(head) + keys_size(); }

    // Packs keys [first, first + PANEL) of a head and their values.
    void pack(long head, long first) const {
        const long dim = cache->dim, tokens = padded(context(), KEYS);
        const T *rows_of[PANEL];
        for (long j = 0; j < PANEL; j++) {
            const long token = first + j;
            rows_of[j] = token < context() ? cache->key(table[token / cache->block_size], layer, head,
                                                        token % cache->block_size)
                                           : nullptr;
        }
        Number *keys = keys_of(head) + first * depth(), *values = values_of(head);
        memset(keys, 0, sizeof(Number) * PANEL * depth());
        for (long j = 0; j < PANEL; j++)
            if (rows_of[j])
                for (long d = 0; d < dim; d += STEP)
                    for (int s = 0; s < STEP; s++)
                        copy_number(keys + d * PANEL + j * STEP + s, rows_of[j][d + s]);
        for (long p = 0; p < depth() / PANEL; p++) {
            Number *lines = values + p * PANEL * tokens + first * PANEL;
            const long width = dim - p * PANEL < PANEL ? dim - p * PANEL : PANEL;
            memset(lines, 0, sizeof(Number) * PANEL * PANEL);
            for (long j = 0; j < PANEL; j++) {
                if (!rows_of[j]) continue;
                const T *value = rows_of[j] + cache->to_value() + p * PANEL;
                Number *line = lines + (j / STEP) * STEP * PANEL + j % STEP;
                for (long c = 0; c < width; c++) copy_number(line + c * STEP, value[c]);
            }
        }
    }

    // Rows [first, first + BLOCK) of one query head.
    void attend(bool tiles, long head, long first) const {
        const long dim = cache->dim, tokens = padded(context(), KEYS);
        const long kv_head = head / (heads / cache->kv_heads);
        const int count = (int)(rows - first < BLOCK ? rows - first : BLOCK);
        const long panels = depth() / PANEL;
        const float scale = LOG2E / sqrtf((float)dim);
        alignas(64) Number queries[BLOCK * WIDEST], weights[BLOCK * KEYS];
        alignas(64) float scores[KEYS * BLOCK], sums[BLOCK * WIDEST];
        alignas(64) float best[BLOCK], kept[BLOCK];
        F16 total[BLOCK], most[BLOCK];  // by lanes: across them goes only what is needed, sixteen rows at a time
        for (int r = 0; r < count; r++) {
            const T *row = q + (first + r) * q_stride + head * dim;
            for (long d = 0; d < dim; d++) copy_number(queries + r * depth() + d, row[d]);
            memset(queries + r * depth() + dim, 0, sizeof(Number) * (depth() - dim));
        }
        for (int r = 0; r < BLOCK; r++) {
            best[r] = -std::numeric_limits<float>::infinity();
            total[r] = splat(0.0f);
        }
        memset(sums, 0, sizeof(float) * BLOCK * depth());
        Multiplier block(tiles);
        const long visible = start + first + count;  // of the last row
        for (long from = 0; from < visible; from += KEYS) {
            const long width = visible - from < KEYS ? padded(visible - from, PANEL) : KEYS;
            for (long p = 0; p < width / PANEL; p++)
                block(count, queries, depth(), keys_of(kv_head) + (from + p * PANEL) * depth(), depth(),
                      scores + p * PANEL * BLOCK, false);
            for (int r = 0; r < BLOCK; r++) {
                F16 largest = splat(-std::numeric_limits<float>::infinity());
                if (r >= count) {
                    most[r] = largest;
                    continue;
                }
                const long seen = start + first + r + 1 - from;
                for (long i = 0; i < width / LANES; i++) {
                    float *cells = scores + (i / 2) * PANEL * BLOCK + r * PANEL + (i % 2) * LANES;
                    F16 s = load(cells);
                    if (seen < (i + 1) * LANES) {
                        const int left = seen < i * LANES ? 0 : (int)(seen - i * LANES);
                        s = first_of(s, left, -std::numeric_limits<float>::infinity());
                        store(cells, s);
                    }
                    largest = larger(largest, s);
                }
                most[r] = largest;
            }
            for (int r = 0; r < BLOCK; r += LANES) {
                const F16 before = load(best + r), now = larger(largests_of(most + r) * scale, before);
                store(kept + r, exp2_of(before - now));
                store(best + r, now);
            }
            for (int r = 0; r < count; r++) {
                F16 weight = splat(0.0f);
                for (long i = 0; i < width / LANES; i++) {
                    const float *cells = scores + (i / 2) * PANEL * BLOCK + r * PANEL + (i % 2) * LANES;
                    F16 w = exp2_for(weights, load(cells) * scale - best[r]);
                    weight += w;
                    store(weights + r * KEYS + i * LANES, w);
                }
                total[r] = total[r] * kept[r] + weight;
            }
            for (long p = 0; p < panels; p++) {
                float *part = sums + p * PANEL * BLOCK;
                for (int r = 0; r < count; r++)
                    for (int h = 0; h < PANEL; h += LANES)
                        store(part + r * PANEL + h, load(part + r * PANEL + h) * kept[r]);
                block(count, weights, KEYS, values_of(kv_head) + p * PANEL * tokens + from * PANEL, width, part, true);
            }
        }
        for (int r = 0; r < count; r++) {
            const float whole = sum_of(total[r]);
            for (long d = 0; d < dim; d += LANES)
                store(out + layout.at(place + first + r, head * dim + d),
                      load(sums + (d / PANEL) * PANEL * BLOCK + r * PANEL + d % PANEL) / whole);
        }
    }
};
