// The normal distribution of the numbers in a vector: what GELU and its slope are made of.
#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace mixerlab {

// Phi(x), the share of a standard normal distribution below x, of N vectors in place.
template <class T>
struct Normal;

template <>
struct Normal<double> {
  // By way of memory: of lanes that are set one by one, GCC 12 makes wrong vectors for AVX-512.
  template <class L, int N>
  static inline void below(typename L::V (&x)[N]) {
    double values[N * L::width];
    for (int i = 0; i < N; ++i) store(values + i * L::width, x[i]);
    for (double& value : values) value = 0.5 + 0.5 * std::erf(value * M_SQRT1_2);
    for (int i = 0; i < N; ++i) x[i] = load<typename L::V>(values + i * L::width);
  }

  template <class L, int N>
  static inline void times_below(typename L::V (&x)[N]) {
    typename L::V phi[N];
    std::copy(x, x + N, phi);
    below<L>(phi);
    for (int i = 0; i < N; ++i) x[i] *= phi[i];
  }
};

// (Phi(x) - 1/2) / x as a polynomial of x^2, fitted by least squares at Chebyshev's weights: 1e-7 of
// Phi, which is float's rounding of it. Beyond the ends it is 0 or 1 to that.
template <>
struct Normal<float> {
  static constexpr float end = 5.5f;
  static constexpr float factors[] = {
      -2.234833463e-04f, 6.136820316e-04f,  -5.684266366e-04f, 7.760163877e-04f,
      -2.372507637e-03f, 4.553661133e-03f,  -6.846181438e-03f, 1.026858292e-02f,
      -1.499166226e-02f, 2.035219256e-02f,  -2.604919239e-02f, 3.207202373e-02f,
      -3.879274958e-02f, 4.773753443e-02f,  -6.417233847e-02f, 1.285519317e-01f};
  template <class L, int N>
  static inline void below(typename L::V (&x)[N]) {
    using V = typename L::V;
    V p[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) p[i] = clipped(x[i]);
    slope(p);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) x[i] = x[i] < -end ? V{} : p[i] * clipped(x[i]) + 0.5f;
  }

  // x Phi(x). x, be it infinite, is cut off at the lower end, too, where this is -1e-7: no vector
  // is needed beside x and the polynomial's, which fill the registers of AVX2.
  template <class L, int N>
  static inline void times_below(typename L::V (&x)[N]) {
    using V = typename L::V;
    V p[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      x[i] = at_least(x[i], V{} - end);
      p[i] = at_most(x[i], V{} + end);
    }
    slope(p);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) x[i] *= p[i] * at_most(x[i], V{} + end) + 0.5f;
  }

 private:
  template <class V>
  static inline V clipped(V x) {
    return at_most(at_least(x, V{} - end), V{} + end);
  }

  // (Phi(x) - 1/2) / x in place of x between the ends.
  template <class V, int N>
  static inline void slope(V (&x)[N]) {
    V t[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) t[i] = x[i] * x[i] * (2 / (end * end)) - 1.0f;
    horner(t, factors, x);
  }
};

template <class T, class L, int N>
inline void gelu(typename L::V (&x)[N]) {
  Normal<T>::template times_below<L>(x);
}

// GELU and its slope.
template <class T, class L, int N>
inline void gelu_and_slope(typename L::V (&x)[N], typename L::V (&slope)[N]) {
  typename L::V density[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    density[i] = x[i] * x[i] * T(-0.5);
    slope[i] = x[i];
  }
  exponential<T, L>(density);
  Normal<T>::template below<L>(slope);
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    const typename L::V value = x[i] * slope[i];
    slope[i] += x[i] * density[i] * T(0.398942280401432678);
    x[i] = value;
  }
}

}  // namespace mixerlab
