// One decoder step on an x86-64 CPU (v2 to v4, see native_lanes.h): ragged chunks of many sequences in one call.
//
// Arithmetic is float32; weights may be stored in 16, 8 or 4 bits, KV in 16 or 8. Every output value is computed by
// one fixed sequence of operations that depends on its own row only, so a row's result is bitwise the same alone, in
// any batch, and for any chunking. Contraction is off (-ffp-contract=off): the fused operations are those spelled out.
//
// Layouts (those of weights are in native_product.h):
//   KV       [layer][page][kv head]{ keys [D][16], values [16][Dp] }, Dp = D rounded up to 16;
//            int8 adds { key scales [16], value scales [16] } in float32, one a position and head

#include "native_product.h"

#include <type_traits>

// ---- what Python fills in; must match native_layout.py ------------------------------------------------------------

extern "C" {

struct Layer {
    const float *attention_norm, *q_norm, *k_norm, *mlp_norm;  // q_norm and k_norm may be null
    const float *post_attention_norm, *post_mlp_norm;          // null where nothing comes before the residual sum
    Linear qkv, out, gate_up, down;  // gate and up are each padded to 16 columns
    int64_t window;                  // 0: none
    int64_t rope;                    // which table of Step's cos and sin
};

struct Model {
    const Layer* layers;
    const float* norm;
    Linear head;
    void* pool;
    int64_t num_pages;
    int32_t num_layers, d_model, d_ff, heads, kv_heads, head_dim, kv_kind;  // kv_kind: 0 to 3 as in Linear
    int32_t activation;  // 0: SiLU, 1: GELU in its tanh form
    float eps;
};

struct Step {
    float* x;                  // [T][d_model], embeddings in
    const int32_t* positions;  // [T]
    const int32_t* visible;    // [T]: keys that a row sees, not fewer than causal; null: causal
    const float *cos, *sin;    // [ropes][T][D / 2]
    const int64_t* slots;      // [T]: page * 16 + position inside the page
    const int32_t* offsets;    // [n + 1]
    const int32_t* wanted;     // [n]: logits of an item's last rows
    const int32_t* pages;      // pages of all items, one after the other
    const int64_t* page_start; // [n + 1]
    float* logits;             // [R][vocab padded to 16]
    float* work;               // work_floats(...) of scratch
    int64_t* ticks;            // grows by one with every linear and attended head: others watch it
    const float* added;        // [V][added_layers][d_model]: what layer l's output gets besides, for l < added_layers
    const int32_t* added_rows; // [V]: the rows that get it
    int32_t num_tokens, num_items, num_added, added_layers;
};

}  // extern "C"

namespace {

constexpr int KEYS = 64;          // per softmax update
constexpr int QUERY_ROWS = 48;    // that share one pass over the keys

inline void tick(const Step& s) { __atomic_fetch_add(s.ticks, 1, __ATOMIC_RELAXED); }

inline long pad16(long n) { return (n + 15) / 16 * 16; }

void rms_norm(const float* x, const float* weight, float* out, int n, float eps) {
    V8 s = all8(0);
    int i = 0;
    for (; i + 8 <= n; i += 8) { const V8 v = load8(x + i); s = fma8(v, v, s); }
    float total = sum8(s);
    for (int j = i; j < n; j++) total += x[j] * x[j];
    const float scale = 1.0f / std::sqrt(total / float(n) + eps);
    for (i = 0; i + 8 <= n; i += 8) store8(out + i, mul8(mul8(load8(x + i), all8(scale)), load8(weight + i)));
    for (; i < n; i++) out[i] = x[i] * scale * weight[i];
}

// x [M][d] += delta; out = rms_norm(x)
void add_norm(float* x, const float* delta, long ldd, int M, int d, const float* weight, float eps, float* out) {
    for (int t = 0; t < M; t++) {
        float* row = x + long(t) * d;
        if (delta)
            for (int i = 0; i < d; i++) row[i] += delta[t * ldd + i];
        rms_norm(row, weight, out + long(t) * d, d, eps);
    }
}

// gate and up [M][2][Dp] -> activation(gate) * up, over gate. GELU's tanh form 0.5 g (1 + tanh(u)) is g sigmoid(2 u).
void gated(float* x, long width, int M, int activation) {
    const V8 one = all8(1), zero = all8(0), slope = all8(-1.5957691216f), cubic = all8(0.044715f);
    for (int t = 0; t < M; t++) {
        float *gate = x + t * 2 * width, *up = gate + width;
        for (long i = 0; i < width; i += 8) {
            const V8 g = load8(gate + i);
            const V8 minus = activation == 0 ? sub8(zero, g) : mul8(slope, fma8(mul8(mul8(g, g), g), cubic, g));
            const V8 sigmoid = div8(one, add8(one, exp8(minus)));
            store8(gate + i, mul8(mul8(g, sigmoid), load8(up + i)));
        }
    }
}

// Every row of x [M][ld] normalised in place.
void norm_rows(float* x, long ld, int M, int d, const float* weight, float eps) {
    if (weight)
        for (int t = 0; t < M; t++) rms_norm(x + t * ld, weight, x + t * ld, d, eps);
}

void rotate(float* head, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

template <class T>
struct Pages {
    T* base;
    static constexpr bool quantised = std::is_same_v<T, int8_t>;
    long keys, scales, head, page;  // elements
    Pages(const Model& m, int layer) {
        keys = long(m.head_dim) * 16;
        scales = keys + 16 * pad16(m.head_dim);
        head = scales + (quantised ? 2 * 16 * long(sizeof(float)) : 0);
        page = head * m.kv_heads;
        base = static_cast<T*>(m.pool) + long(layer) * m.num_pages * page;
    }
    T* key(int64_t p, int h) const { return base + p * page + h * head; }
    T* value(int64_t p, int h) const { return key(p, h) + keys; }
    float* key_scales(int64_t p, int h) const { return reinterpret_cast<float*>(key(p, h) + scales); }
    float* value_scales(int64_t p, int h) const { return key_scales(p, h) + 16; }
};

// Rounds a head [D] to 127 steps either way, `stride` apart; returns the step. Anything but finite numbers makes it NaN.
inline float quantise(const float* x, int D, int8_t* out, long stride) {
    float largest = 0;
    bool finite = true;
    for (int d = 0; d < D; d++) {
        const float size = std::fabs(x[d]);
        finite &= size <= 3.4e38f;
        largest = size > largest ? size : largest;
    }
    const float inverse = finite && largest > 0 ? 127.0f / largest : 0.0f;
    for (int d = 0; d < D; d++) out[d * stride] = int8_t(std::nearbyint(finite ? x[d] * inverse : 0.0f));
    return finite ? largest / 127.0f : NAN;
}

// Writes one position's key and value of head h.
template <class T>
inline void put(const Pages<T>& pages, int64_t page, int inside, int h, const float* k, const float* v, int D) {
    T *keys = pages.key(page, h), *values = pages.value(page, h) + inside * pad16(D);
    if constexpr (Pages<T>::quantised) {
        pages.key_scales(page, h)[inside] = quantise(k, D, keys + inside, 16);
        pages.value_scales(page, h)[inside] = quantise(v, D, values, 1);
    } else {
        for (int d = 0; d < D; d++) store1(keys + d * 16, inside, k[d]);
        for (int d = 0; d < D; d++) store1(values + d / 16 * 16, d % 16, v[d]);
    }
}

// rows [R][KEYS] times 16 values from column `at` on
inline void scale_columns(float* rows, int R, int at, const float* scales) {
    const V8 lo = load8(scales), hi = load8(scales + 8);
    for (int r = 0; r < R; r++) {
        float* to = rows + r * KEYS + at;
        store8(to, mul8(load8(to), lo));
        store8(to + 8, mul8(load8(to + 8), hi));
    }
}

// Normalises and rotates the queries and keys of qkv [T][ld] in place and writes keys and values to the pool.
template <class T>
void write_kv(const Model& m, const Layer& layer, const Pages<T>& pages, const Step& s, float* qkv, long ld) {
    const int D = m.head_dim, half = D / 2;
    for (int t = 0; t < s.num_tokens; t++) {
        float* row = qkv + t * ld;
        const long at = (layer.rope * s.num_tokens + t) * half;
        const float *cos = s.cos + at, *sin = s.sin + at;
        for (int h = 0; h < m.heads + m.kv_heads; h++) {
            const float* norm = h < m.heads ? layer.q_norm : layer.k_norm;
            if (norm) rms_norm(row + h * D, norm, row + h * D, D, m.eps);
            rotate(row + h * D, cos, sin, half);
        }
        const int64_t page = s.slots[t] / 16;
        const int inside = int(s.slots[t] % 16);
        for (int h = 0; h < m.kv_heads; h++) {
            const float *k = row + (m.heads + h) * D, *v = row + (m.heads + m.kv_heads + h) * D;
            put(pages, page, inside, h, k, v, D);
        }
    }
}

// One softmax update: scores [64] of a row become weights; keys outside [lo, hi) get none.
// maximum, total and output [Dp] are the row's state.
inline void soften(float* scores, int lo, int hi, float& maximum, float& total, float* output, long Dp) {
    V8 v[8];
    const bool all = lo <= 0 && hi >= KEYS;
    V8 best = all8(-INFINITY);
    for (int i = 0; i < 8; i++) {
        v[i] = load8(scores + i * 8);
        if (!all) v[i] = between8(v[i], i * 8, lo, hi);
        best = max8(best, v[i]);
    }
    const float peak = largest8(best);
    if (peak > maximum) {
        const V8 shrink = exp8(all8(maximum - peak));
        total *= first8(shrink);
        for (long d = 0; d < Dp; d += 8) store8(output + d, mul8(load8(output + d), shrink));
        maximum = peak;
    }
    const V8 shift = all8(maximum);
    V8 sum = all8(0);
    for (int i = 0; i < 8; i++) {
        v[i] = exp8(sub8(v[i], shift));
        sum = add8(sum, v[i]);
        store8(scores + i * 8, v[i]);
    }
    total += sum8(sum);
}

// Scratch of one attention call, in floats: queries and outputs of QUERY_ROWS rows.
inline long attention_floats(const Model& m) { return QUERY_ROWS * (m.head_dim + pad16(m.head_dim)); }

// Queries [count] of one sequence from position `first`, for KV head h: q [count][ldq] -> out [count][ldo].
// visible: [count], the keys [0, visible) of each, growing with the position; null: causal.
template <class T>
void attend(const Model& m, const Pages<T>& pages, const int32_t* table, int h, int window, const float* q, long ldq,
            int count, int first, const int32_t* visible_to, float* out, long ldo, float* work) {
    const int D = m.head_dim, G = m.heads / m.kv_heads;
    const long Dp = pad16(D);
    const float scale = 1.0f / std::sqrt(float(D));
    float *queries = work, *outputs = work + QUERY_ROWS * D;
    alignas(64) float scores[MAX_ROWS * KEYS];
    float maximum[QUERY_ROWS], total[QUERY_ROWS];
    for (int row0 = 0; row0 < count * G; row0 += QUERY_ROWS) {
        const int rows = count * G - row0 < QUERY_ROWS ? count * G - row0 : QUERY_ROWS;
        for (int r = 0; r < rows; r++) {  // row r: query head (row0 + r) % G of token (row0 + r) / G
            const float* from = q + (row0 + r) / G * ldq + (h * G + (row0 + r) % G) * D;
            for (int d = 0; d < D; d++) queries[r * D + d] = from[d] * scale;
            maximum[r] = -3e38f;
            total[r] = 0;
        }
        std::memset(outputs, 0, sizeof(float) * rows * Dp);
        const auto position = [&](int r) { return first + (row0 + r) / G; };
        const auto bound = [&](int r) { return visible_to ? visible_to[(row0 + r) / G] : position(r) + 1; };
        const auto oldest = [&](int r) { return window && position(r) >= window ? position(r) - window + 1 : 0; };
        const int end = bound(rows - 1);
        for (int key0 = oldest(0) / KEYS * KEYS; key0 < end; key0 += KEYS) {
            const Tiles tiles(rows);
            for (int t = 0; t < tiles.count; t++) {
                const int r0 = tiles.begin(t), R = tiles.begin(t + 1) - r0;
                int visible = bound(r0 + R - 1) - key0;  // keys of this block that some row sees
                if (visible <= 0 || oldest(r0) >= key0 + KEYS) continue;
                if (visible > KEYS) visible = KEYS;
                const int used = (visible + 15) / 16;
                const T *keys[4], *values[4];
                for (int p = 0; p < used; p++) {
                    keys[p] = pages.key(table[key0 / 16 + p], h);
                    values[p] = pages.value(table[key0 / 16 + p], h);
                }
                tile(R, used, queries + r0 * D, D, keys, 16, D, scores, KEYS, nullptr, 0);
                if constexpr (Pages<T>::quantised)
                    for (int p = 0; p < used; p++)
                        scale_columns(scores, R, p * 16, pages.key_scales(table[key0 / 16 + p], h));
                for (int r = 0; r < R; r++) {
                    const int hi = bound(r0 + r) - key0;
                    soften(scores + r * KEYS, oldest(r0 + r) - key0, hi < visible ? hi : visible, maximum[r0 + r],
                           total[r0 + r], outputs + (r0 + r) * Dp, Dp);
                }
                if constexpr (Pages<T>::quantised)
                    for (int p = 0; p < used; p++)
                        scale_columns(scores, R, p * 16, pages.value_scales(table[key0 / 16 + p], h));
                for (int p = 0; p < used; p++) {
                    const int depth = visible - p * 16 < 16 ? visible - p * 16 : 16;
                    for (int d = 0; d < Dp; d += 64) {
                        const int groups = int((Dp - d < 64 ? Dp - d : 64) / 16);
                        const T* columns[4];
                        for (int g = 0; g < groups; g++) columns[g] = values[p] + d + g * 16;
                        float* o = outputs + r0 * Dp + d;
                        tile(R, groups, scores + p * 16, KEYS, columns, Dp, depth, o, Dp, o, Dp);
                    }
                }
            }
        }
        for (int r = 0; r < rows; r++) {
            float* to = out + (row0 + r) / G * ldo + (h * G + (row0 + r) % G) * D;
            const float inverse = 1.0f / total[r];
            for (int d = 0; d < D; d++) to[d] = outputs[r * Dp + d] * inverse;
        }
    }
}

// Attention of the last `wanted[i]` (or all) rows of each item; out gets those rows without gaps.
template <class T>
int attend_all(const Model& m, const Pages<T>& pages, const Step& s, int window, bool only_wanted, const float* qkv,
               long ldq, float* out, long ldo, float* work) {
    int done = 0;
    for (int i = 0; i < s.num_items; i++) {
        const int end = s.offsets[i + 1];
        const int begin = only_wanted ? end - s.wanted[i] : s.offsets[i];
        if (begin == end) continue;
        for (int h = 0; h < m.kv_heads; h++) {
            attend(m, pages, s.pages + s.page_start[i], h, window, qkv + begin * ldq, ldq, end - begin,
                   s.positions[begin], s.visible ? s.visible + begin : nullptr, out + done * ldo, ldo, work);
            tick(s);
        }
        done += end - begin;
    }
    return done;
}

// Rows of visual tokens get what layer l adds to them; never the last layer, whose rows are fewer.
void add_visuals(const Model& m, const Step& s, int l, float* delta, long ldd) {
    for (int v = 0; v < s.num_added; v++) {
        const float* from = s.added + (long(v) * s.added_layers + l) * m.d_model;
        float* to = delta + s.added_rows[v] * ldd;
        for (int i = 0; i < m.d_model; i++) to[i] += from[i];
    }
}

struct Sizes {
    long qkv, attended, hidden, delta;
    explicit Sizes(const Model& m)
        : qkv(pad16(long(m.heads + 2 * m.kv_heads) * m.head_dim)), attended(long(m.heads) * m.head_dim),
          hidden(2 * pad16(m.d_ff)), delta(pad16(m.d_model)) {}
    // qkv and attended are dead before hidden is written: they share its place.
    long shared() const { return qkv + attended > hidden ? qkv + attended : hidden; }
};

template <class T>
void run(const Model& m, const Step& s) {
    const Sizes n(m);
    int rows = s.num_tokens;
    float* normed = s.work;
    float* delta = normed + long(rows) * m.d_model;
    float* scratch = delta + rows * n.delta;
    float* shared = scratch + attention_floats(m);
    float *qkv = shared, *attended = shared + rows * n.qkv, *hidden = shared;
    const float* pending = nullptr;  // what the previous layer's MLP adds to x
    for (int l = 0; l < m.num_layers; l++) {
        const Layer& layer = m.layers[l];
        const Pages<T> pages(m, l);
        const bool last = l + 1 == m.num_layers;
        add_norm(s.x, pending, n.delta, rows, m.d_model, layer.attention_norm, m.eps, normed);
        linear(normed, m.d_model, rows, layer.qkv, qkv, n.qkv);
        tick(s);
        write_kv(m, layer, pages, s, qkv, n.qkv);
        // Beyond its KV, the last layer matters only to the rows whose logits are wanted.
        const int kept = attend_all(m, pages, s, int(layer.window), last, qkv, n.qkv, attended, n.attended, scratch);
        if (last) {
            int to = 0;
            for (int i = 0; i < s.num_items; i++)
                for (int t = s.offsets[i + 1] - s.wanted[i]; t < s.offsets[i + 1]; t++)
                    std::memmove(s.x + long(to++) * m.d_model, s.x + long(t) * m.d_model, sizeof(float) * m.d_model);
            rows = kept;
            if (rows == 0) return;
        }
        linear(attended, n.attended, rows, layer.out, delta, n.delta);
        norm_rows(delta, n.delta, rows, m.d_model, layer.post_attention_norm, m.eps);
        tick(s);
        add_norm(s.x, delta, n.delta, rows, m.d_model, layer.mlp_norm, m.eps, normed);
        linear(normed, m.d_model, rows, layer.gate_up, hidden, n.hidden);
        tick(s);
        gated(hidden, n.hidden / 2, rows, m.activation);
        linear(hidden, n.hidden, rows, layer.down, delta, n.delta);
        norm_rows(delta, n.delta, rows, m.d_model, layer.post_mlp_norm, m.eps);
        if (l < s.added_layers) add_visuals(m, s, l, delta, n.delta);
        tick(s);
        pending = delta;
    }
    add_norm(s.x, pending, n.delta, rows, m.d_model, m.norm, m.eps, normed);
    linear(normed, m.d_model, rows, m.head, s.logits, pad16(m.head.n));
}

}  // namespace

extern "C" {

// Scratch that a step of `num_tokens` tokens needs, in floats.
int64_t work_floats(const Model* m, int64_t num_tokens) {
    const Sizes n(*m);
    return num_tokens * (m->d_model + n.delta + n.shared()) + attention_floats(*m);
}

// Elements of one page of one layer, all KV heads.
int64_t page_elements(const Model* m) {
    return m->kv_kind == 3 ? Pages<int8_t>(*m, 0).page : Pages<char>(*m, 0).page;
}

// Reads n floats in eight streams, about as fast as one thread can: the limit that benchmarks compare with.
float read_all(const float* p, int64_t n) {
    const int64_t part = n / 64 * 8;
    V8 sums[8] = {};
    for (int64_t k = 0; k < part; k += 8)
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) sums[i] = add8(sums[i], load8(p + i * part + k));
    float total = 0;
    for (int i = 0; i < 8; i++) total += sum8(sums[i]);
    return total;
}

void execute(const Model* m, const Step* s) {
    if (m->kv_kind == 0) run<float>(*m, *s);
    else if (m->kv_kind == 1) run<BF16>(*m, *s);
    else if (m->kv_kind == 2) run<F16>(*m, *s);
    else run<int8_t>(*m, *s);
}

}  // extern "C"
