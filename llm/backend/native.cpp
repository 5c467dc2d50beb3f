// One decoder step on an x86-64 CPU (AVX2, FMA, F16C): ragged chunks of many sequences in one call.
//
// Arithmetic is float32; weights and KV may be stored in 16 bits. Every output value is computed by one fixed
// sequence of operations that depends on its own row only, so a row's result is bitwise the same alone, in any
// batch, and for any chunking. Contraction is off (-ffp-contract=off): the fused operations are those spelled out.
//
// Layouts (P = 16 columns or positions):
//   weights  [N / 16][K][16], N padded with zeros
//   KV       [layer][page][kv head]{ keys [D][16], values [16][Dp] }, Dp = D rounded up to 16
//   16 bfloat16 values c0..c15 are stored c0 c8 c1 c9 ... c7 c15, so that a shift and a mask unpack them.

#include <immintrin.h>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct BF16 { uint16_t bits; };
struct F16 { uint16_t bits; };

// ---- 16 values as two vectors ----------------------------------------------------------------------------

inline void load16(const float* p, __m256& lo, __m256& hi) { lo = _mm256_loadu_ps(p); hi = _mm256_loadu_ps(p + 8); }

inline void load16(const BF16* p, __m256& lo, __m256& hi) {
    __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    lo = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
    hi = _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000u))));
}

inline void load16(const F16* p, __m256& lo, __m256& hi) {
    lo = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    hi = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)));
}

// Stores column `i` of a group of 16; rounds to nearest even.
inline void store1(float* group, int i, float x) { group[i] = x; }

inline void store1(BF16* group, int i, float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    u = (u & 0x7fffffffu) > 0x7f800000u ? u | 0x400000u : u + 0x7fffu + ((u >> 16) & 1);
    group[i < 8 ? 2 * i : 2 * (i - 8) + 1].bits = uint16_t(u >> 16);
}

inline void store1(F16* group, int i, float x) { group[i].bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

// e^x to about 2 ulp; e^0 is exactly 1, below -87.3 exactly 0.
inline __m256 exp8(__m256 x) {
    const __m256 smallest = _mm256_set1_ps(-87.3f);
    __m256 keep = _mm256_cmp_ps(x, smallest, _CMP_GE_OQ);
    x = _mm256_min_ps(_mm256_max_ps(x, smallest), _mm256_set1_ps(88.3f));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    // Taylor to degree 7 on |r| <= ln(2) / 2: truncation error under 6e-9.
    __m256 y = _mm256_set1_ps(1.0f / 5040);
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f / 720));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f / 120));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f / 24));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f / 6));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(0.5f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_mul_ps(y, _mm256_castsi256_ps(power)), keep);
}

inline float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

inline float max8(__m256 v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

// ---- the one inner loop: C [R][16 P] = init + A [R][K] B, B as P groups of 16 columns --------------------

constexpr int AHEAD = 2048;  // bytes

// Each C value sums its K products in ascending order onto its init, whatever R and P are.
template <int R, int P, class W>
inline void kernel(const float* a, long lda, const W* const* b, long ldb, int K, float* c, long ldc,
                   const float* init, long ldi) {
    __m256 acc[R][2 * P];  // all loops over it are unrolled, so that it lives in registers
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 12
        for (int i = 0; i < 2 * P; i++) acc[r][i] = init ? _mm256_loadu_ps(init + r * ldi + i * 8) : _mm256_setzero_ps();
    for (int k = 0; k < K; k++) {
#pragma GCC unroll 6
        for (int p = 0; p < P; p++) {
            __m256 lo, hi;
            load16(b[p] + k * ldb, lo, hi);
            // One to three rows read memory as fast as it gives; with more, the hardware's prefetch lags.
            if (R > 3) _mm_prefetch(reinterpret_cast<const char*>(b[p] + k * ldb) + AHEAD, _MM_HINT_T1);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const __m256 x = _mm256_broadcast_ss(a + r * lda + k);
                acc[r][2 * p] = _mm256_fmadd_ps(x, lo, acc[r][2 * p]);
                acc[r][2 * p + 1] = _mm256_fmadd_ps(x, hi, acc[r][2 * p + 1]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 12
        for (int i = 0; i < 2 * P; i++) _mm256_storeu_ps(c + r * ldc + i * 8, acc[r][i]);
}

constexpr int MAX_ROWS = 6;                                   // of a tile: 12 accumulators and operands fill 16 registers
constexpr int GROUPS[MAX_ROWS + 1] = {0, 6, 3, 2, 1, 1, 1};   // column groups at once, by rows

template <int R, class W>
inline void tile_rows(int P, const float* a, long lda, const W* const* b, long ldb, int K, float* c, long ldc,
                      const float* init, long ldi) {
    if constexpr (R == 1) {
        if (P == 6) return kernel<R, 6>(a, lda, b, ldb, K, c, ldc, init, ldi);
        if (P == 5) return kernel<R, 5>(a, lda, b, ldb, K, c, ldc, init, ldi);
        if (P == 4) return kernel<R, 4>(a, lda, b, ldb, K, c, ldc, init, ldi);
    }
    if constexpr (R <= 2) {
        if (P == 3) return kernel<R, 3>(a, lda, b, ldb, K, c, ldc, init, ldi);
    }
    if constexpr (R <= 3) {
        if (P == 2) return kernel<R, 2>(a, lda, b, ldb, K, c, ldc, init, ldi);
    }
    kernel<R, 1>(a, lda, b, ldb, K, c, ldc, init, ldi);
}

// R rows by `groups` column groups; b[g] is group g.
template <class W>
void tile(int R, int groups, const float* a, long lda, const W* const* b, long ldb, int K, float* c, long ldc,
          const float* init, long ldi) {
    for (int g = 0; g < groups;) {
        int P = groups - g < GROUPS[R] ? groups - g : GROUPS[R];
        const float* from = init ? init + g * 16 : nullptr;
        switch (R) {
            case 1: tile_rows<1>(P, a, lda, b + g, ldb, K, c + g * 16, ldc, from, ldi); break;
            case 2: tile_rows<2>(P, a, lda, b + g, ldb, K, c + g * 16, ldc, from, ldi); break;
            case 3: tile_rows<3>(P, a, lda, b + g, ldb, K, c + g * 16, ldc, from, ldi); break;
            case 4: tile_rows<4>(P, a, lda, b + g, ldb, K, c + g * 16, ldc, from, ldi); break;
            case 5: tile_rows<5>(P, a, lda, b + g, ldb, K, c + g * 16, ldc, from, ldi); break;
            default: tile_rows<6>(P, a, lda, b + g, ldb, K, c + g * 16, ldc, from, ldi); break;
        }
        g += P;
    }
}

// Row ranges of nearly equal size, at most MAX_ROWS each: 8 rows are 4 + 4 rather than 6 + 2.
struct Tiles {
    int rows, count;
    explicit Tiles(int rows) : rows(rows), count((rows + MAX_ROWS - 1) / MAX_ROWS) {}
    int begin(int i) const { return int(long(rows) * i / count); }
};

}  // namespace

// ---- what Python fills in; must match native_layout.py ------------------------------------------------------------

extern "C" {

struct Linear {
    const void* weight;  // packed
    const float* bias;   // [N padded] or null
    int32_t n, k, kind;  // kind: 0 float32, 1 bfloat16, 2 float16
    int32_t unused;
};

struct Layer {
    const float *attention_norm, *q_norm, *k_norm, *mlp_norm;  // q_norm and k_norm may be null
    Linear qkv, out, gate_up, down;  // gate and up are each padded to 16 columns
    int64_t window;                  // 0: none
};

struct Model {
    const Layer* layers;
    const float *norm, *cos, *sin;  // cos, sin: [positions][D / 2]
    Linear head;
    void* pool;
    int64_t num_pages;
    int32_t num_layers, d_model, d_ff, heads, kv_heads, head_dim, kv_kind;
    float eps;
};

struct Step {
    float* x;                  // [T][d_model], embeddings in
    const int32_t* positions;  // [T]
    const int64_t* slots;      // [T]: page * 16 + position inside the page
    const int32_t* offsets;    // [n + 1]
    const int32_t* wanted;     // [n]: logits of an item's last rows
    const int32_t* pages;      // pages of all items, one after the other
    const int64_t* page_start; // [n + 1]
    float* logits;             // [R][vocab padded to 16]
    float* work;               // work_floats(...) of scratch
    int32_t num_tokens, num_items;
};

}  // extern "C"

namespace {

constexpr int KEYS = 64;          // per softmax update
constexpr int QUERY_ROWS = 48;    // that share one pass over the keys
constexpr int DEPTH = 2048;       // K per pass of a large product: 128 KB of float32 weights stay in L2
constexpr int ROW_BLOCK = 96;     // rows that share one reading of the weights

inline long pad16(long n) { return (n + 15) / 16 * 16; }

template <class W>
void product(const float* a, long lda, int M, const Linear& w, float* c, long ldc) {
    const W* weight = static_cast<const W*>(w.weight);
    const int groups = (w.n + 15) / 16;
    const W* b[6];
    if (M <= MAX_ROWS) {
        for (int g = 0; g < groups;) {
            int P = groups - g < GROUPS[M] ? groups - g : GROUPS[M];
            for (int p = 0; p < P; p++) b[p] = weight + long(g + p) * w.k * 16;
            tile(M, P, a, lda, b, 16, w.k, c + g * 16, ldc, w.bias ? w.bias + g * 16 : nullptr, 0);
            g += P;
        }
        return;
    }
    for (int m0 = 0; m0 < M; m0 += ROW_BLOCK) {
        const Tiles tiles(M - m0 < ROW_BLOCK ? M - m0 : ROW_BLOCK);
        for (int k0 = 0; k0 < w.k; k0 += DEPTH) {
            const int depth = w.k - k0 < DEPTH ? w.k - k0 : DEPTH;
            for (int g = 0; g < groups; g++) {
                b[0] = weight + (long(g) * w.k + k0) * 16;
                for (int t = 0; t < tiles.count; t++) {
                    const int r = tiles.begin(t), rows = tiles.begin(t + 1) - r;
                    float* to = c + (m0 + r) * ldc + g * 16;
                    const float* init = k0 ? to : w.bias ? w.bias + g * 16 : nullptr;
                    tile(rows, 1, a + (m0 + r) * lda + k0, lda, b, 16, depth, to, ldc, init, k0 ? ldc : 0);
                }
            }
        }
    }
}

// c [M][ldc] = a [M][lda] W + bias
void linear(const float* a, long lda, int M, const Linear& w, float* c, long ldc) {
    if (w.kind == 0) product<float>(a, lda, M, w, c, ldc);
    else if (w.kind == 1) product<BF16>(a, lda, M, w, c, ldc);
    else product<F16>(a, lda, M, w, c, ldc);
}

void rms_norm(const float* x, const float* weight, float* out, int n, float eps) {
    __m256 s = _mm256_setzero_ps();
    int i = 0;
    for (; i + 8 <= n; i += 8) { __m256 v = _mm256_loadu_ps(x + i); s = _mm256_fmadd_ps(v, v, s); }
    float total = sum8(s);
    for (int j = i; j < n; j++) total += x[j] * x[j];
    const float scale = 1.0f / std::sqrt(total / float(n) + eps);
    const __m256 scales = _mm256_set1_ps(scale);
    for (i = 0; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), scales), _mm256_loadu_ps(weight + i)));
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

// gate and up [M][2][Dp] -> silu(gate) * up, over gate
void gated_silu(float* x, long width, int M) {
    const __m256 one = _mm256_set1_ps(1.0f), zero = _mm256_setzero_ps();
    for (int t = 0; t < M; t++) {
        float *gate = x + t * 2 * width, *up = gate + width;
        for (long i = 0; i < width; i += 8) {
            __m256 g = _mm256_loadu_ps(gate + i);
            __m256 sigmoid = _mm256_div_ps(one, _mm256_add_ps(one, exp8(_mm256_sub_ps(zero, g))));
            _mm256_storeu_ps(gate + i, _mm256_mul_ps(_mm256_mul_ps(g, sigmoid), _mm256_loadu_ps(up + i)));
        }
    }
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
    long keys, head, page;  // elements
    Pages(const Model& m, int layer) {
        keys = long(m.head_dim) * 16;
        head = keys + 16 * pad16(m.head_dim);
        page = head * m.kv_heads;
        base = static_cast<T*>(m.pool) + long(layer) * m.num_pages * page;
    }
    T* key(int64_t p, int h) const { return base + p * page + h * head; }
    T* value(int64_t p, int h) const { return key(p, h) + keys; }
};

// Normalises and rotates the queries and keys of qkv [T][ld] in place and writes keys and values to the pool.
template <class T>
void write_kv(const Model& m, const Layer& layer, const Pages<T>& pages, const Step& s, float* qkv, long ld) {
    const int D = m.head_dim, half = D / 2;
    const long Dp = pad16(D);
    for (int t = 0; t < s.num_tokens; t++) {
        float* row = qkv + t * ld;
        const float *cos = m.cos + long(s.positions[t]) * half, *sin = m.sin + long(s.positions[t]) * half;
        for (int h = 0; h < m.heads + m.kv_heads; h++) {
            const float* norm = h < m.heads ? layer.q_norm : layer.k_norm;
            if (norm) rms_norm(row + h * D, norm, row + h * D, D, m.eps);
            rotate(row + h * D, cos, sin, half);
        }
        const int64_t page = s.slots[t] / 16;
        const int inside = int(s.slots[t] % 16);
        for (int h = 0; h < m.kv_heads; h++) {
            const float *k = row + (m.heads + h) * D, *v = row + (m.heads + m.kv_heads + h) * D;
            T *keys = pages.key(page, h), *values = pages.value(page, h) + inside * Dp;
            for (int d = 0; d < D; d++) store1(keys + d * 16, inside, k[d]);
            for (int d = 0; d < D; d++) store1(values + d / 16 * 16, d % 16, v[d]);
        }
    }
}

// One softmax update: scores [64] of a row become weights; keys outside [lo, hi) get none.
// maximum, total and output [Dp] are the row's state.
inline void soften(float* scores, int lo, int hi, float& maximum, float& total, float* output, long Dp) {
    __m256 v[8];
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 minus_inf = _mm256_set1_ps(-INFINITY);
    const bool all = lo <= 0 && hi >= KEYS;
    const __m256i low = _mm256_set1_epi32(lo - 1), high = _mm256_set1_epi32(hi);
    __m256 best = minus_inf;
    for (int i = 0; i < 8; i++) {
        v[i] = _mm256_loadu_ps(scores + i * 8);
        if (!all) {
            __m256i key = _mm256_add_epi32(lane, _mm256_set1_epi32(i * 8));
            __m256i seen = _mm256_and_si256(_mm256_cmpgt_epi32(key, low), _mm256_cmpgt_epi32(high, key));
            v[i] = _mm256_blendv_ps(minus_inf, v[i], _mm256_castsi256_ps(seen));
        }
        best = _mm256_max_ps(best, v[i]);
    }
    const float peak = max8(best);
    if (peak > maximum) {
        const __m256 shrink = exp8(_mm256_set1_ps(maximum - peak));
        total *= _mm256_cvtss_f32(shrink);
        for (long d = 0; d < Dp; d += 8)
            _mm256_storeu_ps(output + d, _mm256_mul_ps(_mm256_loadu_ps(output + d), shrink));
        maximum = peak;
    }
    const __m256 shift = _mm256_set1_ps(maximum);
    __m256 sum = _mm256_setzero_ps();
    for (int i = 0; i < 8; i++) {
        v[i] = exp8(_mm256_sub_ps(v[i], shift));
        sum = _mm256_add_ps(sum, v[i]);
        _mm256_storeu_ps(scores + i * 8, v[i]);
    }
    total += sum8(sum);
}

// Scratch of one attention call, in floats: queries and outputs of QUERY_ROWS rows.
inline long attention_floats(const Model& m) { return QUERY_ROWS * (m.head_dim + pad16(m.head_dim)); }

// Queries [count] of one sequence from position `first`, for KV head h: q [count][ldq] -> out [count][ldo].
template <class T>
void attend(const Model& m, const Pages<T>& pages, const int32_t* table, int h, int window, const float* q, long ldq,
            int count, int first, float* out, long ldo, float* work) {
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
        const auto oldest = [&](int r) { return window && position(r) >= window ? position(r) - window + 1 : 0; };
        const int end = position(rows - 1) + 1;
        for (int key0 = oldest(0) / KEYS * KEYS; key0 < end; key0 += KEYS) {
            const Tiles tiles(rows);
            for (int t = 0; t < tiles.count; t++) {
                const int r0 = tiles.begin(t), R = tiles.begin(t + 1) - r0;
                int visible = position(r0 + R - 1) + 1 - key0;  // keys of this block that some row sees
                if (visible <= 0 || oldest(r0) >= key0 + KEYS) continue;
                if (visible > KEYS) visible = KEYS;
                const int used = (visible + 15) / 16;
                const T *keys[4], *values[4];
                for (int p = 0; p < used; p++) {
                    keys[p] = pages.key(table[key0 / 16 + p], h);
                    values[p] = pages.value(table[key0 / 16 + p], h);
                }
                tile(R, used, queries + r0 * D, D, keys, 16, D, scores, KEYS, nullptr, 0);
                for (int r = 0; r < R; r++) {
                    const int hi = position(r0 + r) + 1 - key0;
                    soften(scores + r * KEYS, oldest(r0 + r) - key0, hi < visible ? hi : visible, maximum[r0 + r],
                           total[r0 + r], outputs + (r0 + r) * Dp, Dp);
                }
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
        for (int h = 0; h < m.kv_heads; h++)
            attend(m, pages, s.pages + s.page_start[i], h, window, qkv + begin * ldq, ldq, end - begin,
                   s.positions[begin], out + done * ldo, ldo, work);
        done += end - begin;
    }
    return done;
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
        add_norm(s.x, delta, n.delta, rows, m.d_model, layer.mlp_norm, m.eps, normed);
        linear(normed, m.d_model, rows, layer.gate_up, hidden, n.hidden);
        gated_silu(hidden, n.hidden / 2, rows);
        linear(hidden, n.hidden, rows, layer.down, delta, n.delta);
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
int64_t page_elements(const Model* m) { return Pages<char>(*m, 0).page; }

// Reads n floats in eight streams, about as fast as one thread can: the limit that benchmarks compare with.
float read_all(const float* p, int64_t n) {
    const int64_t part = n / 64 * 8;
    __m256 sums[8] = {};
    for (int64_t k = 0; k < part; k += 8)
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) sums[i] = _mm256_add_ps(sums[i], _mm256_loadu_ps(p + i * part + k));
    float total = 0;
    for (int i = 0; i < 8; i++) total += sum8(sums[i]);
    return total;
}

void execute(const Model* m, const Step* s) {
    if (m->kv_kind == 0) run<float>(*m, *s);
    else if (m->kv_kind == 1) run<BF16>(*m, *s);
    else run<F16>(*m, *s);
}

}  // extern "C"
