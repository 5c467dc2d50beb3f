// Products with weights of every storage: C [M][N] = A [M][K] W + bias.
//
// Layouts, N padded with zeros to a multiple of 16:
//   float32, 16 bits   [N / 16][K][16]
//   int8               [N / 16][K][16], one float32 scale an output
//   int4               [N / 16][K / 32] blocks of 16 outputs by 32 inputs, one bfloat16 scale an output and block

#pragma once

#include "native_lanes.h"

extern "C" {

struct Linear {  // must match native_layout.py
    const void* weight;  // packed
    const float* bias;   // [N padded] or null
    const float* scale;  // [N padded], int8 only
    int32_t n, k, kind;  // kind: 0 float32, 1 bfloat16, 2 float16, 3 int8, 4 int4
    int32_t unused;
};

}  // extern "C"

namespace {

constexpr int DEPTH = 2048;         // K per pass of a large product: 128 KB of float32 weights stay in L2
constexpr int ROW_BLOCK = 96;       // rows that share one reading of the weights
constexpr int BLOCK = 32;           // inputs of an int4 block

// ---- the one inner loop: C [R][16 P] = init + A [R][K] B, B as P groups of 16 columns --------------------

constexpr int AHEAD = 2048;  // bytes

// Each C value sums its K products in ascending order onto its init, whatever R and P are.
template <int R, int P, class W>
inline void kernel(const float* a, long lda, const W* const* b, long ldb, int K, float* c, long ldc,
                   const float* init, long ldi) {
    V16 acc[R][P];  // all loops over it are unrolled, so that it lives in registers
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 6
        for (int p = 0; p < P; p++) acc[r][p] = init ? load16(init + r * ldi + p * 16) : zero16();
    for (int k = 0; k < K; k++) {
#pragma GCC unroll 6
        for (int p = 0; p < P; p++) {
            const V16 w = load16(b[p] + k * ldb);
            // Int8 groups are short: the hardware's prefetch has just found one when it ends.
            if (sizeof(W) == 1 && R <= 3 && k % 4 == 0)
                _mm_prefetch(reinterpret_cast<const char*>(b[p] + (k + long(P) * K) * ldb), _MM_HINT_T1);
            // One to three rows read memory as fast as it gives; with more, the hardware's prefetch lags.
            if (R > 3) _mm_prefetch(reinterpret_cast<const char*>(b[p] + k * ldb) + AHEAD, _MM_HINT_T1);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) acc[r][p] = fma16(broadcast(a + r * lda + k), w, acc[r][p]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 6
        for (int p = 0; p < P; p++) store16(c + r * ldc + p * 16, acc[r][p]);
}

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

// ---- products -----------------------------------------------------------------------------------------

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

// ---- int8 -----------------------------------------------------------------------------------------------------

// Whatever path computes it, an int8 output is fma(sum of a q in ascending k, scale, bias): the same in any batch.

// c = c * scale + bias, for `groups` column groups from group g.
inline void rescale(float* c, long ldc, int M, const Linear& w, int g, int groups) {
    for (int m = 0; m < M; m++)
        for (int i = g * 16; i < (g + groups) * 16; i += 16) {
            float* to = c + m * ldc + i;
            store16(to, fma16(load16(to), load16(w.scale + i), w.bias ? load16(w.bias + i) : zero16()));
        }
}

void product8(const float* a, long lda, int M, const Linear& w, float* c, long ldc) {
    const int8_t* weight = static_cast<const int8_t*>(w.weight);
    const int groups = (w.n + 15) / 16;
    if (M <= MAX_ROWS) {
        const int8_t* b[6];
        for (int g = 0; g < groups;) {
            const int P = groups - g < GROUPS[M] ? groups - g : GROUPS[M];
            for (int p = 0; p < P; p++) b[p] = weight + long(g + p) * w.k * 16;
            tile(M, P, a, lda, b, 16, w.k, c + g * 16, ldc, nullptr, 0);
            rescale(c, ldc, M, w, g, P);
            g += P;
        }
        return;
    }
    alignas(64) float panel[DEPTH * 16];  // a part of one column group, converted once for many rows
    const float* unpacked = panel;
    for (int m0 = 0; m0 < M; m0 += ROW_BLOCK) {
        const Tiles tiles(M - m0 < ROW_BLOCK ? M - m0 : ROW_BLOCK);
        const bool convert = tiles.count > 2;
        for (int g = 0; g < groups; g++) {
            for (int k0 = 0; k0 < w.k; k0 += DEPTH) {
                const int depth = w.k - k0 < DEPTH ? w.k - k0 : DEPTH;
                const int8_t* packed = weight + (long(g) * w.k + k0) * 16;
                for (int k = 0; convert && k < depth; k++) store16(panel + k * 16, load16(packed + k * 16));
                for (int t = 0; t < tiles.count; t++) {
                    const int r = m0 + tiles.begin(t), rows = tiles.begin(t + 1) - tiles.begin(t);
                    float* to = c + r * ldc + g * 16;
                    const float *from = a + r * lda + k0, *init = k0 ? to : nullptr;
                    if (convert) tile(rows, 1, from, lda, &unpacked, 16, depth, to, ldc, init, ldc);
                    else tile(rows, 1, from, lda, &packed, 16, depth, to, ldc, init, ldc);
                }
            }
            rescale(c + m0 * ldc, ldc, tiles.rows, w, g, 1);
        }
    }
}

// ---- int4 -----------------------------------------------------------------------------------------------------

// Whatever path computes it, an int4 output starts at its bias and takes block after block of 32 inputs as
// fma(sum of a q in ascending k, scale, output): the same in any batch.

struct Int4 {
    BF16 scale[16];
    uint32_t words[4][16];  // word w of column c holds inputs 8 w to 8 w + 7 in ascending nibbles, signed
};

// Column groups, `stride` blocks apart, as they are stored.
struct Packed4 {
    const Int4* blocks;
    long stride;
    V16 scale(int p, int block) const { return load16(blocks[p * stride + block].scale); }
    template <class F>
    __attribute__((always_inline)) void each(int p, int k, int count, int ahead, F&& f) const {
        const uint32_t* words = blocks[p * stride + k / BLOCK].words[k % BLOCK / 8];
        if (ahead) _mm_prefetch(reinterpret_cast<const char*>(words) + ahead * stride * sizeof(Int4), _MM_HINT_T1);
        nibbles(words16(words), count, f);
    }
    template <int J = 0, class F>
    __attribute__((always_inline)) static void nibbles(Words words, int count, F&& f) {
        if constexpr (J < 8) {
            if (J >= count) return;
            f(J, nibble16<J>(words));
            nibbles<J + 1>(words, count, f);
        }
    }
};

// One column group, unpacked once for many rows.
struct Panel4 {
    float scales[DEPTH / BLOCK][16];
    float values[DEPTH][16];
    V16 scale(int, int block) const { return load16(scales[block]); }
    template <class F>
    __attribute__((always_inline)) void each(int, int k, int count, int, F&& f) const {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            if (j < count) f(j, load16(values[k + j]));
    }
};

// c [R][16 P] += a [R][K] W
template <int R, int P, class W>
void kernel4(const float* a, long lda, const W& w, int K, float* c, long ldc) {
    for (int k0 = 0; k0 < K; k0 += BLOCK) {
        V16 acc[R][P];
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) acc[r][p] = zero16();
        const int end = K - k0 < BLOCK ? K : k0 + BLOCK;
        for (int k = k0; k < end; k += 8) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                const auto add = [&](int j, V16 x) __attribute__((always_inline)) {
#pragma GCC unroll 6
                    for (int r = 0; r < R; r++) acc[r][p] = fma16(broadcast(a + r * lda + k + j), x, acc[r][p]);
                };
                if (end - k >= 8) w.each(p, k, 8, R == 1 ? P : 0, add);
                else w.each(p, k, end - k, 0, add);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                float* to = c + r * ldc + p * 16;
                store16(to, fma16(acc[r][p], w.scale(p, k0 / BLOCK), load16(to)));
            }
    }
}

template <class W>
void rows4(int R, const float* a, long lda, const W& w, int K, float* c, long ldc) {
    switch (R) {
        case 1: return kernel4<1, 1>(a, lda, w, K, c, ldc);
        case 2: return kernel4<2, 1>(a, lda, w, K, c, ldc);
        case 3: return kernel4<3, 1>(a, lda, w, K, c, ldc);
        case 4: return kernel4<4, 1>(a, lda, w, K, c, ldc);
        case 5: return kernel4<5, 1>(a, lda, w, K, c, ldc);
        default: return kernel4<6, 1>(a, lda, w, K, c, ldc);
    }
}

void unpack(const Packed4& packed, int depth, Panel4& panel) {
    for (int k = 0; k < depth; k += 8) {
        if (k % BLOCK == 0) store16(panel.scales[k / BLOCK], packed.scale(0, k / BLOCK));
        packed.each(0, k, depth - k, 0, [&](int j, V16 x) { store16(panel.values[k + j], x); });
    }
}

void product4(const float* a, long lda, int M, const Linear& w, float* c, long ldc) {
    const Int4* weight = static_cast<const Int4*>(w.weight);
    const int groups = (w.n + 15) / 16;
    const long stride = (w.k + BLOCK - 1) / BLOCK;
    for (int m = 0; m < M; m++)
        for (int i = 0; i < groups * 16; i += 16) store16(c + m * ldc + i, w.bias ? load16(w.bias + i) : zero16());
    if (M <= MAX_ROWS) {
        for (int g = 0; g < groups;) {
            const Packed4 packed{weight + g * stride, stride};
            if (M == 1 && groups - g >= 4) { kernel4<1, 4>(a, lda, packed, w.k, c + g * 16, ldc); g += 4; }
            else if (M <= 3 && groups - g >= 2) {
                if (M == 1) kernel4<1, 2>(a, lda, packed, w.k, c + g * 16, ldc);
                else if (M == 2) kernel4<2, 2>(a, lda, packed, w.k, c + g * 16, ldc);
                else kernel4<3, 2>(a, lda, packed, w.k, c + g * 16, ldc);
                g += 2;
            } else rows4(M, a, lda, packed, w.k, c + g++ * 16, ldc);
        }
        return;
    }
    alignas(64) Panel4 panel;
    for (int m0 = 0; m0 < M; m0 += ROW_BLOCK) {
        const Tiles tiles(M - m0 < ROW_BLOCK ? M - m0 : ROW_BLOCK);
        const bool convert = tiles.count > 2;
        for (int g = 0; g < groups; g++)
            for (int k0 = 0; k0 < w.k; k0 += DEPTH) {
                const int depth = w.k - k0 < DEPTH ? w.k - k0 : DEPTH;
                const Packed4 packed{weight + g * stride + k0 / BLOCK, stride};
                if (convert) unpack(packed, depth, panel);
                for (int t = 0; t < tiles.count; t++) {
                    const int r = m0 + tiles.begin(t), rows = tiles.begin(t + 1) - tiles.begin(t);
                    const float* from = a + r * lda + k0;
                    float* to = c + r * ldc + g * 16;
                    if (convert) rows4(rows, from, lda, panel, depth, to, ldc);
                    else rows4(rows, from, lda, packed, depth, to, ldc);
                }
            }
    }
}

// c [M][ldc] = a [M][lda] W + bias
void linear(const float* a, long lda, int M, const Linear& w, float* c, long ldc) {
    switch (w.kind) {
        case 0: return product<float>(a, lda, M, w, c, ldc);
        case 1: return product<BF16>(a, lda, M, w, c, ldc);
        case 2: return product<F16>(a, lda, M, w, c, ldc);
        case 3: return product8(a, lda, M, w, c, ldc);
        default: return product4(a, lda, M, w, c, ldc);
    }
}

}  // namespace
