// Vectors as long as the processor's registers, by the compiler's own extension: any instruction
// set serves. Longer ones would cost twice the registers, of which AVX2 has 16.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace mixerlab {

#if defined(__AVX512F__)
constexpr int64_t kRegister = 64;
#elif defined(__AVX__)
constexpr int64_t kRegister = 32;
#else
constexpr int64_t kRegister = 16;
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

template <class T>
struct Exponential;

// exp(x) = 2^n exp(r), |r| <= ln(2) / 2: n by adding a number whose last bit is worth 1, exp(r) by
// its series as far as the type sees it.
template <>
struct Exponential<float> {
  static constexpr float low = -87.0f, high = 88.0f, magic = 12582912.0f;
  static constexpr float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr int shift = 23;
  template <class V>
  static inline V series(V r) {
    V p = r * (1.0f / 5040) + (1.0f / 720);
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    return p * r + 1.0f;
  }
};
template <>
struct Exponential<double> {
  static constexpr double low = -708.0, high = 709.0, magic = 6755399441055744.0;
  static constexpr double log2e = 1.4426950408889634, ln2_high = 6.93145751953125e-1,
                          ln2_low = 1.42860682030941723212e-6;
  static constexpr int shift = 52;
  template <class V>
  static inline V series(V r) {
    V p = r * (1.0 / 6227020800.0) + (1.0 / 479001600.0);
    p = p * r + (1.0 / 39916800.0);
    p = p * r + (1.0 / 3628800.0);
    p = p * r + (1.0 / 362880.0);
    p = p * r + (1.0 / 40320.0);
    p = p * r + (1.0 / 5040.0);
    p = p * r + (1.0 / 720.0);
    p = p * r + (1.0 / 120.0);
    p = p * r + (1.0 / 24.0);
    p = p * r + (1.0 / 6.0);
    p = p * r + 0.5;
    p = p * r + 1.0;
    return p * r + 1.0;
  }
};

// exp of every lane; what lies outside of the type's range gives the value at its end.
template <class T, class L>
inline typename L::V exponential(typename L::V x) {
  using E = Exponential<T>;
  using V = typename L::V;
  using I = typename L::I;
  x = x < E::low ? V{} + E::low : x;
  x = x > E::high ? V{} + E::high : x;
  V shifted = x * E::log2e + E::magic;
  V n = shifted - E::magic;
  V r = x - n * E::ln2_high - n * E::ln2_low;
  V p = E::series(r);
  I power = (I)shifted << E::shift;
  return (V)((I)p + power);
}

// 1 / (1 + exp(-x)).
template <class T, class L>
inline typename L::V sigmoid(typename L::V x) {
  return T(1) / (T(1) + exponential<T, L>(-x));
}

}  // namespace mixerlab
