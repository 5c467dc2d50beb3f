// Sixteen values of one row of columns or positions as two vectors, whatever they are stored as.
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

// ---- 16 values at once: one register with AVX-512, else two; the results are the same -------------------------

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

}  // namespace
