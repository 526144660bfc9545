// A decoder's step on a CPU, behind a plain C interface: no Python, no torch, built by library.py.
//
// Owns: the order of a step (engine/layers.py draws it), how its work is shared out among threads, and the scratch
// memory between its parts. Refuses to know: where weights come from, and which sequence is whose.
#include <algorithm>
#include <new>
#include <type_traits>

#include "attention.h"
#include "threads.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

enum Number : int { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum Finish : int { PLAIN = 0, ADD = 1, GATED = 2, SCORES = 3 };

// Memory that grows; what was in it is lost then. In large pages, where the system has some: rows are read again and
// again in other orders than they lie.
template <class T> class Scratch {
public:
    ~Scratch() { give_back(); }

    T *of(long size) {
        if (size > size_) {
            give_back();
            const size_t bytes = sizeof(T) * size;
            alignment_ = std::align_val_t(bytes < LARGE_PAGE ? 64 : LARGE_PAGE);
            memory_ = static_cast<T *>(::operator new[](bytes, alignment_));
            size_ = size;
#if defined(__linux__)
            if (bytes >= LARGE_PAGE) madvise(memory_, bytes / LARGE_PAGE * LARGE_PAGE, MADV_HUGEPAGE);
#endif
        }
        return memory_;
    }

private:
    static constexpr size_t LARGE_PAGE = 2 << 20;

    void give_back() {
        ::operator delete[](memory_, alignment_);
        memory_ = nullptr, size_ = 0;
    }

    T *memory_ = nullptr;
    long size_ = 0;
    std::align_val_t alignment_{64};
};

}  // namespace

extern "C" {

// y = x w^T + bias. `packed` comes from baton_pack; gate and up rows alternate in it by sixteens where GATED is meant.
struct Product {
    const bf16 *packed, *bias;
    long depth, columns;
};

struct Layer {
    const bf16 *attention_norm, *qk_norm, *mlp_norm;
    Product qkv, output, gate_up, down;
};

struct Model {
    long num_layers, heads, kv_heads, dim, hidden, middle;
    float epsilon;
    const bf16 *embedding, *norm;
    const Layer *layers;
};

// The pool, and what the step's sequences have in it: sequence i's blocks start at table[table_starts[i]].
struct Paged {
    void *pool;
    long layers, kv_heads, block_size, dim;
    long sequences;
    const int64_t *query_lens, *context_lens, *table, *table_starts;
};

struct Step {
    long tokens;
    const int64_t *token_ids, *blocks, *offsets;
    const bf16 *cosine, *sine;  // [tokens][dim]
    long rows;
    const int64_t *row_ids;
};

struct Engine {
    explicit Engine(int threads, bool tiles) : team(threads), tiles(tiles) {}
    Team team;
    bool tiles;
    Scratch<bf16> x, normed, qkv, attended, middle;
    Scratch<char> packed;
};
}

namespace {

// Sixteen columns of a row, or as many as there are.
template <Finish F> void finish_columns(F16 y, const bf16 *bias, void *out, long place, long left) {
    typedef std::conditional_t<F == SCORES, float, bf16> Cell;
    Cell *cells = (Cell *)out + place;
    if (left >= LANES) {
        if (bias) y += load(bias);
        if constexpr (F == ADD) y += load(cells);
        return store(cells, y);
    }
    bf16 offsets[LANES] = {};
    Cell few[LANES] = {};
    if (bias) memcpy(offsets, bias, left * sizeof(bf16)), y += load(offsets);
    memcpy(few, cells, left * sizeof(Cell));
    if constexpr (F == ADD) y += load(few);
    store(few, y);
    memcpy(cells, few, left * sizeof(Cell));
}

// Columns are shared out: each thread reads its part of the matrix.
template <Finish F>
void product(Engine &engine, const Product &w, const bf16 *x, long rows, void *out, bool tiled = false) {
    const Layout from{w.depth, tiled}, gated{w.columns / 2, tiled};
    const long panels = padded(w.columns, PANEL) / PANEL;
    const long parts = std::min<long>(engine.team.size(), panels);
    engine.team.each(parts, [&](long part, int) {
        multiply(engine.tiles, rows, x, from, w.packed, panels * part / parts, panels * (part + 1) / parts,
                 [&](long row, long column, const float *sums) __attribute__((always_inline)) {
                     const bf16 *bias = w.bias ? w.bias + column : nullptr;
                     const long left = w.columns - column;
                     if constexpr (F == GATED) {
                         F16 gate = load(sums), up = load(sums + LANES);
                         if (bias) gate += load(bias), up += load(bias + LANES);
                         store((bf16 *)out + gated.at(row, column / 2), silu(gate) * up);
                     } else {
                         const long place = row * w.columns + column;
                         finish_columns<F>(load(sums), bias, out, place, left);
                         if (left > LANES)
                             finish_columns<F>(load(sums + LANES), bias ? bias + LANES : nullptr, out, place + LANES,
                                               left - LANES);
                     }
                 });
    });
}

// Rows are shared out in pieces that are worth a thread's while.
template <class Piece> void each_row(Team &team, long rows, Piece piece) {
    const long parts = std::min<long>(team.size(), (rows + 7) / 8);
    team.each(parts, [&](long part, int) {
        for (long row = rows * part / parts; row < rows * (part + 1) / parts; row++) piece(row);
    });
}

template <class T> Cache<T> cache_of(const Paged &paged) {
    return {(T *)paged.pool, paged.layers, paged.kv_heads, paged.block_size, paged.dim};
}

// Normalises (where `qk_norm` is there) and rotates queries in place and keys into the pool; values go there too.
template <class T>
void store_rows(Team &team, T *qkv, long tokens, long heads, const T *qk_norm, float epsilon, const T *cosine,
                const T *sine, const Paged &paged, long layer, const int64_t *blocks, const int64_t *offsets) {
    const Cache<T> cache = cache_of<T>(paged);
    const long dim = paged.dim, width = heads + 2 * paged.kv_heads;
    each_row(team, tokens, [&](long t) {
        T *row = qkv + t * width * dim, head[WIDEST];
        for (long h = 0; h < heads + paged.kv_heads; h++) {
            T *x = row + h * dim;
            if (qk_norm) normalise(x, qk_norm + h * dim, dim, epsilon, head, Layout{dim});
            else memcpy(head, x, sizeof(T) * dim);
            T *to = h < heads ? x : cache.key(blocks[t], layer, h - heads, offsets[t]);
            rotate(head, cosine + t * dim, sine + t * dim, dim, to);
        }
        for (long k = 0; k < paged.kv_heads; k++)
            memcpy(cache.key(blocks[t], layer, k, offsets[t]) + cache.to_value(),
                   row + (heads + paged.kv_heads + k) * dim, sizeof(T) * dim);
    });
}

constexpr long FEW = 6;  // a chunk of so few rows is not worth packing for

template <class T>
void attend(Engine &engine, const T *q, long q_stride, long heads, const Paged &paged, long layer, T *out,
            bool tiled = false) {
    const Layout layout{heads * paged.dim, tiled};
    const Cache<T> cache = cache_of<T>(paged);
    const long group = heads / paged.kv_heads;
    std::vector<Alone<T>> rows;
    std::vector<long> behind{0};  // tokens that the rows before each attend to
    long first = 0;
    for (long i = 0; i < paged.sequences; first += paged.query_lens[i++])
        for (long r = 0; r < paged.query_lens[i] && paged.query_lens[i] <= FEW; r++) {
            const long context = paged.context_lens[i] - paged.query_lens[i] + r + 1;
            rows.push_back({q + (first + r) * q_stride, out + layout.row(first + r),
                            paged.table + paged.table_starts[i], context});
            behind.push_back(behind.back() + context);
        }
    // Rows are shared out by the length of their contexts; a few long ones by their heads.
    const long threads = engine.team.size(), count = (long)rows.size();
    const long by_head = count < 4 * threads ? std::min(threads, paged.kv_heads) : 1;
    const long parts = count ? std::max(1l, threads / by_head) : 0;
    engine.team.each(parts * by_head, [&](long item, int) {
        const long part = item / by_head, share = item % by_head;
        const auto row_at = [&](long p) {
            return std::lower_bound(behind.begin(), behind.end(), behind.back() * p / parts) - behind.begin();
        };
        attend_alone(engine.tiles, cache, layer, group, paged.kv_heads * share / by_head,
                     paged.kv_heads * (share + 1) / by_head, rows.data() + row_at(part),
                     row_at(part + 1) - row_at(part), layout);
    });
    first = 0;
    for (long i = 0; i < paged.sequences; first += paged.query_lens[i++]) {
        const long length = paged.query_lens[i];
        if (length <= FEW) continue;
        Chunk<T> chunk{q + first * q_stride, q_stride, out, layout, first, length, paged.context_lens[i] - length,
                       heads, &cache, layer, paged.table + paged.table_starts[i],
                       nullptr};
        typedef typename Chunk<T>::Number Packed;
        chunk.packed = (Packed *)engine.packed.of(chunk.packed_size() * (long)sizeof(Packed));
        const long panels = padded(chunk.context(), KEYS) / PANEL, blocks = padded(length, BLOCK) / BLOCK;
        engine.team.each(panels * paged.kv_heads,
                         [&](long item, int) { chunk.pack(item / panels, item % panels * PANEL); });
        // The longest rows last would leave the other threads idle.
        engine.team.each(blocks * heads, [&](long item, int) {
            chunk.attend(engine.tiles, item % heads, (blocks - 1 - item / heads) * BLOCK);
        });
    }
}

}  // namespace

extern "C" {

// Widest instructions that this build uses: 4 AMX, 3 AVX-512 bf16, 2 AVX-512, 1 AVX2, 0 whatever else there is.
int baton_level() {
    if (HAS_AMX && amx_granted()) return 4;
#if defined(__AVX512BF16__)
    return 3;
#elif defined(__AVX512F__)
    return 2;
#elif defined(__AVX2__)
    return 1;
#else
    return 0;
#endif
}

Engine *baton_open(int threads, int tiles) { return new Engine(threads < 1 ? 1 : threads, tiles && HAS_AMX && amx_granted()); }
void baton_close(Engine *engine) { delete engine; }

long baton_packed_size(long rows, long depth) { return padded(rows, PANEL) * depth; }

void baton_pack(const bf16 *w, long rows, long depth, bf16 *packed) {
    for (long p = 0; p * PANEL < rows; p++)
        pack_columns(w + p * PANEL * depth, depth, rows - p * PANEL, depth, packed + p * PANEL * depth);
}

void baton_product(Engine *engine, const Product *w, const bf16 *x, long rows, int finish, void *out) {
    if (finish == PLAIN) product<PLAIN>(*engine, *w, x, rows, out);
    else if (finish == ADD) product<ADD>(*engine, *w, x, rows, out);
    else if (finish == GATED) product<GATED>(*engine, *w, x, rows, out);
    else product<SCORES>(*engine, *w, x, rows, out);
}

void baton_rms_norm(int number, const void *x, const void *weight, long rows, long width, float epsilon, void *out) {
    auto all = [&](auto zero) {
        typedef decltype(zero) T;
        for (long r = 0; r < rows; r++)
            normalise((const T *)x + r * width, (const T *)weight, width, epsilon, (T *)out + r * width, Layout{width});
    };
    if (number == FLOAT32) all(float{});
    else if (number == BFLOAT16) all(bf16{});
    else all(fp16{});
}

void baton_store(Engine *engine, int number, void *qkv, long tokens, long heads, const void *qk_norm, float epsilon,
                 const void *cosine, const void *sine, const Paged *paged, long layer, const int64_t *blocks,
                 const int64_t *offsets) {
    auto all = [&](auto zero) {
        typedef decltype(zero) T;
        store_rows(engine->team, (T *)qkv, tokens, heads, (const T *)qk_norm, epsilon, (const T *)cosine,
                   (const T *)sine, *paged, layer, blocks, offsets);
    };
    if (number == FLOAT32) all(float{});
    else if (number == BFLOAT16) all(bf16{});
    else all(fp16{});
}

void baton_attend(Engine *engine, int number, const void *q, long q_stride, long heads, const Paged *paged, long layer,
                  void *out) {
    auto all = [&](auto zero) {
        typedef decltype(zero) T;
        attend(*engine, (const T *)q, q_stride, heads, *paged, layer, (T *)out);
    };
    if (number == FLOAT32) all(float{});
    else if (number == BFLOAT16) all(bf16{});
    else all(fp16{});
}

// The whole step; `out` [rows][hidden] is the final hidden state of the rows asked for.
void baton_step(Engine *engine, const Model *model, const Step *step, const Paged *paged, bf16 *out) {
    const long E = model->hidden, dim = model->dim, width = (model->heads + 2 * model->kv_heads) * dim;
    long tokens = step->tokens;
    Team &team = engine->team;
    bool tiled = engine->tiles && tokens > BLOCK;
    Layout hidden{E, tiled}, heads{model->heads * dim, tiled};
    const long most = padded(std::max(tokens, step->rows), TILE_ROWS);  // a row may be asked for twice
    bf16 *x = engine->x.of(most * E), *normed = engine->normed.of(most * E), *qkv = engine->qkv.of(most * width);
    bf16 *attended = engine->attended.of(most * heads.columns), *middle = engine->middle.of(most * model->middle);
    const auto norm = [&](const bf16 *weight, const Layout &layout, bf16 *out) {
        each_row(team, tokens, [&](long t) {
            normalise(x + t * E, weight, E, model->epsilon, out + layout.row(t), layout);
        });
    };
    each_row(team, tokens, [&](long t) { memcpy(x + t * E, model->embedding + step->token_ids[t] * E, 2 * E); });
    for (long l = 0; l < model->num_layers; l++) {
        const Layer &layer = model->layers[l];
        norm(layer.attention_norm, hidden, normed);
        product<PLAIN>(*engine, layer.qkv, normed, tokens, qkv, tiled);
        store_rows(team, qkv, tokens, model->heads, layer.qk_norm, model->epsilon, step->cosine, step->sine, *paged, l,
                   step->blocks, step->offsets);
        if (l == model->num_layers - 1 && step->rows == 0) return;
        attend(*engine, qkv, width, model->heads, *paged, l, attended, tiled);
        if (l == model->num_layers - 1) {
            // Rows may be asked for in any order: they are picked, in plain rows, into memory that is free by now.
            bf16 *picked = normed, *picked_attended = qkv;
            for (long r = 0; r < step->rows; r++) {
                const bf16 *row = attended + heads.row(step->row_ids[r]);
                memcpy(picked + r * E, x + step->row_ids[r] * E, 2 * E);
                for (long d = 0; d < heads.columns; d += DEPTH)
                    memcpy(picked_attended + r * heads.columns + d, row + heads.within(d), 2 * DEPTH);
            }
            std::swap(x, normed);
            attended = picked_attended;
            tokens = step->rows;
            tiled = hidden.tiled = false;
        }
        product<ADD>(*engine, layer.output, attended, tokens, x, tiled);
        norm(layer.mlp_norm, hidden, normed);
        product<GATED>(*engine, layer.gate_up, normed, tokens, middle, tiled);
        product<ADD>(*engine, layer.down, middle, tokens, x, tiled);
    }
    norm(model->norm, Layout{E}, out);
}
}
