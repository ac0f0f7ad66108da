// Vectors as long as the processor's registers, by the compiler's own extension: any instruction
// set serves. Longer ones would cost twice the registers, of which AVX2 has 16.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace mixerlab {

// Bytes of a register, and what people call the instructions that use it.
#if defined(__AVX512F__)
constexpr int64_t kRegister = 64;
constexpr const char* kInstructions = "AVX-512";
#elif defined(__AVX__)
constexpr int64_t kRegister = 32;
#ifdef __AVX2__
constexpr const char* kInstructions = "AVX2";
#else
constexpr const char* kInstructions = "AVX";
#endif
#else
constexpr int64_t kRegister = 16;
constexpr const char* kInstructions = "";
#endif

// A vector of T, and one of as many integers of the same width.
template <class T, int64_t bytes>
struct Vector {
  typedef T V __attribute__((vector_size(bytes)));
  typedef typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type Whole;
  typedef Whole I __attribute__((vector_size(bytes)));
  static constexpr int64_t width = bytes / sizeof(T);
};
// A register full, half of it, and one number.
template <class T>
struct Lanes : Vector<T, kRegister> {};
template <class T>
struct Half : Vector<T, kRegister / 2> {};
template <class T>
struct One : Vector<T, sizeof(T)> {};

template <class V, class T>
inline V load(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <class V, class T>
inline void store(T* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

// The larger, or the smaller, of x and a bound. Where x is no number, it stays none. GCC makes one
// instruction of the plain form unless it knows the bound.
template <class V>
inline V at_least(V x, V bound) {
#ifdef __AVX__
  if constexpr (std::is_same_v<V, Vector<float, 32>::V>)
    return (V)_mm256_max_ps((__m256)bound, (__m256)x);
#endif
#ifdef __AVX512F__
  if constexpr (std::is_same_v<V, Vector<float, 64>::V>)
    return (V)_mm512_max_ps((__m512)bound, (__m512)x);
#endif
  return x < bound ? bound : x;
}
template <class V>
inline V at_most(V x, V bound) {
#ifdef __AVX__
  if constexpr (std::is_same_v<V, Vector<float, 32>::V>)
    return (V)_mm256_min_ps((__m256)bound, (__m256)x);
#endif
#ifdef __AVX512F__
  if constexpr (std::is_same_v<V, Vector<float, 64>::V>)
    return (V)_mm512_min_ps((__m512)bound, (__m512)x);
#endif
  return x > bound ? bound : x;
}

// The functions below take N vectors, in place, each step of all before the next step of any: a
// processor has several such steps under way at once, and does not look far ahead for them.

// A polynomial of N vectors, its highest factor first.
template <class V, int N, class T, int count>
inline void horner(const V (&x)[N], const T (&factors)[count], V (&value)[N]) {
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) value[i] = x[i] * factors[0] + factors[1];
#pragma GCC unroll 16
  for (int k = 2; k < count; ++k)
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) value[i] = value[i] * x[i] + factors[k];
}

template <class T>
struct Exponential;

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2: n by adding a number whose last bit is worth 1, exp(r) by
// its series as far as the type sees it.
template <>
struct Exponential<float> {
  static constexpr float low = -87.0f, high = 88.0f, magic = 12582912.0f;
  static constexpr float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr int shift = 23;
  static constexpr float series[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24,
                                     1.0f / 6,    0.5f,       1.0f,       1.0f};
};
template <>
struct Exponential<double> {
  static constexpr double low = -708.0, high = 709.0, magic = 6755399441055744.0;
  static constexpr double log2e = 1.4426950408889634, ln2_high = 6.93145751953125e-1,
                          ln2_low = 1.42860682030941723212e-6;
  static constexpr int shift = 52;
  static constexpr double series[] = {
      1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0,
      1.0 / 40320.0,      1.0 / 5040.0,      1.0 / 720.0,      1.0 / 120.0,     1.0 / 24.0,
      1.0 / 6.0,          0.5,               1.0,              1.0};
};

// exp of every lane; what lies outside of the type's range gives the value at its end.
template <class T, class L, int N>
inline void exponential(typename L::V (&x)[N]) {
  using E = Exponential<T>;
  using V = typename L::V;
  using I = typename L::I;
  V shifted[N], p[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    x[i] = at_most(at_least(x[i], V{} + E::low), V{} + E::high);
    shifted[i] = x[i] * E::log2e + E::magic;
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    const V n = shifted[i] - E::magic;
    x[i] = x[i] - n * E::ln2_high - n * E::ln2_low;
  }
  horner(x, E::series, p);
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) x[i] = (V)((I)p[i] + ((I)shifted[i] << E::shift));
}

// 1 / (1 + exp(-x)).
template <class T, class L, int N>
inline void sigmoid(typename L::V (&x)[N]) {
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) x[i] = -x[i];
  exponential<T, L>(x);
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) x[i] = T(1) / (T(1) + x[i]);
}

// x sigmoid(x). The gate does not fall below the type's smallest numbers, so x must not go on.
template <class T, class L, int N>
inline void silu(typename L::V (&x)[N]) {
  using V = typename L::V;
  V gate[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) gate[i] = x[i] = at_least(x[i], V{} - Exponential<T>::high);
  sigmoid<T, L>(gate);
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) x[i] *= gate[i];
}

}  // namespace mixerlab
