// What the compiler's vectors have no word for: some lanes of a register, and squares transposed.
#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "vectors.h"

namespace mixerlab {

using Floats = Lanes<float>::V;
using Doubles = Lanes<double>::V;

#if defined(__AVX512F__)

// The first lanes of a register: what lies there, or zeros behind them, and back.
inline Floats load_some(const float* from, int64_t count) {
  return (Floats)_mm512_maskz_loadu_ps((1u << count) - 1, from);
}
inline Doubles load_some(const double* from, int64_t count) {
  return (Doubles)_mm512_maskz_loadu_pd((1u << count) - 1, from);
}
inline void store_some(float* to, Floats value, int64_t count) {
  _mm512_mask_storeu_ps(to, (1u << count) - 1, (__m512)value);
}
inline void store_some(double* to, Doubles value, int64_t count) {
  _mm512_mask_storeu_pd(to, (1u << count) - 1, (__m512d)value);
}

// Lanes of a, numbered from 0, and of b behind them.
inline Floats pick(Floats a, Floats b, Lanes<float>::I lanes) {
  return (Floats)_mm512_permutex2var_ps((__m512)a, (__m512i)lanes, (__m512)b);
}
inline Doubles pick(Doubles a, Doubles b, Lanes<double>::I lanes) {
  return (Doubles)_mm512_permutex2var_pd((__m512d)a, (__m512i)lanes, (__m512d)b);
}

// Exchange the lanes of a that have a bit with those of b that have it not.
template <int bit, class V>
inline void exchange(V& a, V& b) {
  constexpr int width = sizeof(V) / sizeof(a[0]);
  decltype(a < b) low, high;  // integers
  for (int j = 0; j < width; ++j) {
    low[j] = j & bit ? width + j - bit : j;
    high[j] = j & bit ? width + j : j + bit;
  }
  const auto first = a;
  a = pick(first, b, low);
  b = pick(first, b, high);
}

#elif defined(__AVX2__)

template <class T>
inline typename Lanes<T>::V load_some(const T* from, int64_t count) {
  T all[Lanes<T>::width] = {};
  for (int64_t i = 0; i < count; ++i) all[i] = from[i];
  return load<typename Lanes<T>::V>(all);
}
template <class T>
inline void store_some(T* to, typename Lanes<T>::V value, int64_t count) {
  T all[Lanes<T>::width];
  store(all, value);
  for (int64_t i = 0; i < count; ++i) to[i] = all[i];
}

template <int bit>
inline void exchange(Floats& a, Floats& b) {
  const auto first = (__m256)a, second = (__m256)b;
  if constexpr (bit == 1) {
    a = (Floats)_mm256_blend_ps(first, _mm256_moveldup_ps(second), 0xAA);
    b = (Floats)_mm256_blend_ps(_mm256_movehdup_ps(first), second, 0xAA);
  } else if constexpr (bit == 2) {
    a = (Floats)_mm256_unpacklo_pd((__m256d)first, (__m256d)second);
    b = (Floats)_mm256_unpackhi_pd((__m256d)first, (__m256d)second);
  } else {
    a = (Floats)_mm256_permute2f128_ps(first, second, 0x20);
    b = (Floats)_mm256_permute2f128_ps(first, second, 0x31);
  }
}
template <int bit>
inline void exchange(Doubles& a, Doubles& b) {
  const auto first = (__m256d)a, second = (__m256d)b;
  if constexpr (bit == 1) {
    a = (Doubles)_mm256_unpacklo_pd(first, second);
    b = (Doubles)_mm256_unpackhi_pd(first, second);
  } else {
    a = (Doubles)_mm256_permute2f128_pd(first, second, 0x20);
    b = (Doubles)_mm256_permute2f128_pd(first, second, 0x31);
  }
}

#endif

#ifdef __AVX2__

// A square as wide as a register, transposed: at each step what has one bit of row and column
// different.
template <class T>
inline void transpose(const T* from, int64_t from_stride, T* to, int64_t stride) {
  using V = typename Lanes<T>::V;
  constexpr int width = Lanes<T>::width;
  V rows[width];
#pragma GCC unroll 16
  for (int i = 0; i < width; ++i) rows[i] = load<V>(from + i * from_stride);
  const auto step = [&]<int bit>() {
    if constexpr (bit < width) {
#pragma GCC unroll 16
      for (int i = 0; i < width; ++i)
        if (!(i & bit)) exchange<bit>(rows[i], rows[i + bit]);
    }
  };
  step.template operator()<1>();
  step.template operator()<2>();
  step.template operator()<4>();
  step.template operator()<8>();
#pragma GCC unroll 16
  for (int i = 0; i < width; ++i) store(to + i * stride, rows[i]);
}

#endif

}  // namespace mixerlab
