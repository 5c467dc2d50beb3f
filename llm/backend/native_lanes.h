// Eight and sixteen float32 values at once, whatever they are stored as, on x86-64-v2 (SSE4.2), v3 (AVX2, FMA, F16C)
// and v4 (AVX-512). v3 and v4 compute the same bits; v2 rounds the product of an fma, as it has none.
//
//   16 bfloat16 values c0..c15 are stored c0 c8 c1 c9 ... c7 c15, so that a shift and a mask unpack them.

#pragma once

#include <immintrin.h>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct BF16 { uint16_t bits; };
struct F16 { uint16_t bits; };

#ifdef __AVX2__

// ---- 8 values: one register ---------------------------------------------------------------------------------------

using V8 = __m256;

inline V8 all8(float x) { return _mm256_set1_ps(x); }
inline V8 load8(const float* p) { return _mm256_loadu_ps(p); }
inline void store8(float* p, V8 x) { _mm256_storeu_ps(p, x); }
inline float first8(V8 x) { return _mm256_cvtss_f32(x); }
inline V8 add8(V8 a, V8 b) { return _mm256_add_ps(a, b); }
inline V8 sub8(V8 a, V8 b) { return _mm256_sub_ps(a, b); }
inline V8 mul8(V8 a, V8 b) { return _mm256_mul_ps(a, b); }
inline V8 div8(V8 a, V8 b) { return _mm256_div_ps(a, b); }
inline V8 min8(V8 a, V8 b) { return _mm256_min_ps(a, b); }
inline V8 max8(V8 a, V8 b) { return _mm256_max_ps(a, b); }
inline V8 fma8(V8 a, V8 b, V8 sum) { return _mm256_fmadd_ps(a, b, sum); }
inline V8 round8(V8 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// 2^x for whole x from -126 to 127
inline V8 power8(V8 x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
}
// x where a >= b, else 0
inline V8 where8(V8 a, V8 b, V8 x) { return _mm256_and_ps(x, _mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
// lane i of x where lo <= first + i < hi, else -inf
inline V8 between8(V8 x, int first, int lo, int hi) {
    const __m256i at = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
    const __m256i seen = _mm256_and_si256(_mm256_cmpgt_epi32(at, _mm256_set1_epi32(lo - 1)),
                                          _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), at));
    return _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), x, _mm256_castsi256_ps(seen));
}
inline __m128 low4(V8 x) { return _mm256_castps256_ps128(x); }
inline __m128 high4(V8 x) { return _mm256_extractf128_ps(x, 1); }

// ---- 16 values: one register with AVX-512, else two ---------------------------------------------------------------

constexpr int MAX_ROWS = 6;                                   // of a tile: 12 accumulators and operands fill 16 registers
constexpr int GROUPS[MAX_ROWS + 1] = {0, 6, 3, 2, 1, 1, 1};   // column groups at once, by rows

#ifdef __AVX512F__

struct V16 { __m512 v; };
using Broadcast = __m512;
using Words = __m512i;

inline V16 zero16() { return {_mm512_setzero_ps()}; }
inline Broadcast broadcast(const float* x) { return _mm512_set1_ps(*x); }
inline V16 fma16(Broadcast x, V16 w, V16 sum) { return {_mm512_fmadd_ps(x, w.v, sum.v)}; }
inline V16 fma16(V16 x, V16 w, V16 sum) { return {_mm512_fmadd_ps(x.v, w.v, sum.v)}; }
inline void store16(float* p, V16 x) { _mm512_storeu_ps(p, x.v); }
inline V16 load16(const float* p) { return {_mm512_loadu_ps(p)}; }
inline V16 load16(const BF16* p) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i lo = _mm256_slli_epi32(v, 16), hi = _mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000u)));
    return {_mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1))};
}
inline V16 load16(const F16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline V16 load16(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Words words16(const uint32_t* p) { return _mm512_loadu_si512(p); }

// Nibble J of sixteen words, a signed integer.
template <int J>
inline V16 nibble16(Words words) {
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * J), values)};  // looks at the low four bits
}

#else

struct V16 { __m256 lo, hi; };
using Broadcast = __m256;
struct Words { __m256i lo, hi; };

inline V16 zero16() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Broadcast broadcast(const float* x) { return _mm256_broadcast_ss(x); }
inline V16 fma16(Broadcast x, V16 w, V16 sum) {
    return {_mm256_fmadd_ps(x, w.lo, sum.lo), _mm256_fmadd_ps(x, w.hi, sum.hi)};
}
inline V16 fma16(V16 x, V16 w, V16 sum) {
    return {_mm256_fmadd_ps(x.lo, w.lo, sum.lo), _mm256_fmadd_ps(x.hi, w.hi, sum.hi)};
}
inline void store16(float* p, V16 x) { _mm256_storeu_ps(p, x.lo); _mm256_storeu_ps(p + 8, x.hi); }
inline V16 load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline V16 load16(const BF16* p) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000u))))};
}
inline V16 load16(const F16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline V16 load16(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8))))};
}
inline Words words16(const uint32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}

// Nibble J of eight words, a signed integer.
template <int J>
inline __m256 nibble8(__m256i words) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 28 - 4 * J), 28));
}

template <int J>
inline V16 nibble16(Words words) { return {nibble8<J>(words.lo), nibble8<J>(words.hi)}; }

#endif

inline void store1(F16* group, int i, float x) { group[i].bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

#else

// ---- x86-64-v2: 8 values are two registers, 16 are four -----------------------------------------------------------

struct V8 { __m128 lo, hi; };

inline V8 all8(float x) { return {_mm_set1_ps(x), _mm_set1_ps(x)}; }
inline V8 load8(const float* p) { return {_mm_loadu_ps(p), _mm_loadu_ps(p + 4)}; }
inline void store8(float* p, V8 x) { _mm_storeu_ps(p, x.lo); _mm_storeu_ps(p + 4, x.hi); }
inline float first8(V8 x) { return _mm_cvtss_f32(x.lo); }
inline V8 add8(V8 a, V8 b) { return {_mm_add_ps(a.lo, b.lo), _mm_add_ps(a.hi, b.hi)}; }
inline V8 sub8(V8 a, V8 b) { return {_mm_sub_ps(a.lo, b.lo), _mm_sub_ps(a.hi, b.hi)}; }
inline V8 mul8(V8 a, V8 b) { return {_mm_mul_ps(a.lo, b.lo), _mm_mul_ps(a.hi, b.hi)}; }
inline V8 div8(V8 a, V8 b) { return {_mm_div_ps(a.lo, b.lo), _mm_div_ps(a.hi, b.hi)}; }
inline V8 min8(V8 a, V8 b) { return {_mm_min_ps(a.lo, b.lo), _mm_min_ps(a.hi, b.hi)}; }
inline V8 max8(V8 a, V8 b) { return {_mm_max_ps(a.lo, b.lo), _mm_max_ps(a.hi, b.hi)}; }
inline V8 fma8(V8 a, V8 b, V8 sum) { return add8(mul8(a, b), sum); }
inline V8 round8(V8 x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm_round_ps(x.lo, nearest), _mm_round_ps(x.hi, nearest)};
}
inline __m128 power4(__m128 x) {
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_add_epi32(_mm_cvtps_epi32(x), _mm_set1_epi32(127)), 23));
}
inline V8 power8(V8 x) { return {power4(x.lo), power4(x.hi)}; }
inline V8 where8(V8 a, V8 b, V8 x) {
    return {_mm_and_ps(x.lo, _mm_cmpge_ps(a.lo, b.lo)), _mm_and_ps(x.hi, _mm_cmpge_ps(a.hi, b.hi))};
}
inline __m128 between4(__m128 x, int first, int lo, int hi) {
    const __m128i at = _mm_add_epi32(_mm_setr_epi32(0, 1, 2, 3), _mm_set1_epi32(first));
    const __m128i seen = _mm_and_si128(_mm_cmpgt_epi32(at, _mm_set1_epi32(lo - 1)),
                                       _mm_cmpgt_epi32(_mm_set1_epi32(hi), at));
    return _mm_blendv_ps(_mm_set1_ps(-INFINITY), x, _mm_castsi128_ps(seen));
}
inline V8 between8(V8 x, int first, int lo, int hi) {
    return {between4(x.lo, first, lo, hi), between4(x.hi, first + 4, lo, hi)};
}
inline __m128 low4(V8 x) { return x.lo; }
inline __m128 high4(V8 x) { return x.hi; }

constexpr int MAX_ROWS = 3;                          // of a tile: 12 accumulators, and operands from memory
constexpr int GROUPS[MAX_ROWS + 1] = {0, 3, 1, 1};   // column groups at once, by rows

struct V16 { V8 lo, hi; };
using Broadcast = __m128;
struct Words { __m128i part[4]; };

inline V16 zero16() { return {all8(0), all8(0)}; }
inline Broadcast broadcast(const float* x) { return _mm_set1_ps(*x); }
inline V16 fma16(V16 x, V16 w, V16 sum) { return {fma8(x.lo, w.lo, sum.lo), fma8(x.hi, w.hi, sum.hi)}; }
inline V16 fma16(Broadcast x, V16 w, V16 sum) { return fma16(V16{{x, x}, {x, x}}, w, sum); }
inline void store16(float* p, V16 x) { store8(p, x.lo); store8(p + 8, x.hi); }
inline V16 load16(const float* p) { return {load8(p), load8(p + 8)}; }
inline __m128i words4(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline V16 load16(const BF16* p) {
    const __m128i a = words4(p), b = words4(p + 8), high = _mm_set1_epi32(int(0xffff0000u));
    return {{_mm_castsi128_ps(_mm_slli_epi32(a, 16)), _mm_castsi128_ps(_mm_slli_epi32(b, 16))},
            {_mm_castsi128_ps(_mm_and_si128(a, high)), _mm_castsi128_ps(_mm_and_si128(b, high))}};
}
// Exponents differ by 112; the largest one is infinity or no number in both.
inline __m128 halves4(__m128i x) {  // low 16 bits of each word
    const __m128i sign = _mm_slli_epi32(_mm_and_si128(x, _mm_set1_epi32(0x8000)), 16);
    const __m128i size = _mm_and_si128(x, _mm_set1_epi32(0x7fff));
    const __m128 scaled = _mm_mul_ps(_mm_castsi128_ps(_mm_slli_epi32(size, 13)), _mm_set1_ps(0x1p112f));
    const __m128i infinite = _mm_and_si128(_mm_cmpgt_epi32(size, _mm_set1_epi32(0x7bff)), _mm_set1_epi32(0x7f800000));
    return _mm_castsi128_ps(_mm_or_si128(_mm_or_si128(_mm_castps_si128(scaled), infinite), sign));
}
inline V8 halves8(__m128i x) { return {halves4(_mm_cvtepu16_epi32(x)), halves4(_mm_cvtepu16_epi32(_mm_srli_si128(x, 8)))}; }
inline V16 load16(const F16* p) { return {halves8(words4(p)), halves8(words4(p + 8))}; }
inline V8 bytes8(__m128i x) {
    return {_mm_cvtepi32_ps(_mm_cvtepi8_epi32(x)), _mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_srli_si128(x, 4)))};
}
inline V16 load16(const int8_t* p) { return {bytes8(words4(p)), bytes8(_mm_srli_si128(words4(p), 8))}; }
inline Words words16(const uint32_t* p) { return {{words4(p), words4(p + 4), words4(p + 8), words4(p + 12)}}; }

// Nibble J of four words, a signed integer.
template <int J>
inline __m128 nibble4(__m128i words) {
    return _mm_cvtepi32_ps(_mm_srai_epi32(_mm_slli_epi32(words, 28 - 4 * J), 28));
}

template <int J>
inline V16 nibble16(Words words) {
    return {{nibble4<J>(words.part[0]), nibble4<J>(words.part[1])}, {nibble4<J>(words.part[2]), nibble4<J>(words.part[3])}};
}

// Rounds to nearest even, as F16C does.
inline void store1(F16* group, int i, float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    const uint32_t sign = u >> 16 & 0x8000u, size = u & 0x7fffffffu;
    uint32_t half;
    if (size > 0x7f800000u) half = 0x7e00u | (size >> 13 & 0x3ffu);  // no number: stays none
    else if (size >= 0x477ff000u) half = 0x7c00u;                    // from 65520 on: infinity
    else if (size >= 0x38800000u) half = (size - (112u << 23) + 0xfffu + (size >> 13 & 1)) >> 13;
    else half = uint32_t(std::nearbyint(std::fabs(x) * 0x1p24f));    // below 2^-14: multiples of 2^-24
    group[i].bits = uint16_t(sign | half);
}

#endif

// Stores column `i` of a group of 16; rounds to nearest even.
inline void store1(float* group, int i, float x) { group[i] = x; }

inline void store1(BF16* group, int i, float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    u = (u & 0x7fffffffu) > 0x7f800000u ? u | 0x400000u : u + 0x7fffu + ((u >> 16) & 1);
    group[i < 8 ? 2 * i : 2 * (i - 8) + 1].bits = uint16_t(u >> 16);
}

// e^x to about 2 ulp; e^0 is exactly 1, below -87.3 exactly 0.
inline V8 exp8(V8 given) {
    const V8 smallest = all8(-87.3f);
    const V8 x = min8(max8(given, smallest), all8(88.3f));
    const V8 n = round8(mul8(x, all8(1.44269504088896341f)));
    V8 r = fma8(n, all8(-0.693359375f), x);
    r = fma8(n, all8(2.12194440e-4f), r);
    // Taylor to degree 7 on |r| <= ln(2) / 2: truncation error under 6e-9.
    V8 y = all8(1.0f / 5040);
    y = fma8(y, r, all8(1.0f / 720));
    y = fma8(y, r, all8(1.0f / 120));
    y = fma8(y, r, all8(1.0f / 24));
    y = fma8(y, r, all8(1.0f / 6));
    y = fma8(y, r, all8(0.5f));
    y = fma8(y, r, all8(1.0f));
    y = fma8(y, r, all8(1.0f));
    return where8(given, smallest, mul8(y, power8(n)));
}

inline float sum8(V8 v) {
    __m128 s = _mm_add_ps(low4(v), high4(v));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

inline float largest8(V8 v) {
    __m128 s = _mm_max_ps(low4(v), high4(v));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

}  // namespace
