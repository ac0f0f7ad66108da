// The normal distribution of the numbers in a vector: what GELU and its slope are made of.
#pragma once

#include <cmath>

#include "vectors.h"

namespace mixerlab {

// Phi(x), the share of a standard normal distribution below x.
template <class T>
struct Normal;

template <>
struct Normal<double> {
  template <class L>
  static inline typename L::V below(typename L::V x) {
    for (int64_t i = 0; i < L::width; ++i) x[i] = 0.5 + 0.5 * std::erf(x[i] * M_SQRT1_2);
    return x;
  }
};

// (Phi(x) - 1/2) / x as a polynomial of x^2, fitted by least squares at Chebyshev's weights: 1e-7 of
// Phi, which is float's rounding of it. Beyond the ends it is 0 or 1 to that.
template <>
struct Normal<float> {
  static constexpr float end = 5.5f;
  template <class L>
  static inline typename L::V below(typename L::V x) {
    using V = typename L::V;
    constexpr float factors[] = {
        1.285519317e-01f, -6.417233847e-02f, 4.773753443e-02f, -3.879274958e-02f,
        3.207202373e-02f, -2.604919239e-02f, 2.035219256e-02f, -1.499166226e-02f,
        1.026858292e-02f, -6.846181438e-03f, 4.553661133e-03f, -2.372507637e-03f,
        7.760163877e-04f, -5.684266366e-04f, 6.136820316e-04f, -2.234833463e-04f};
    V inside = x < -end ? V{} - end : x;
    inside = inside > end ? V{} + end : inside;
    const V t = inside * inside * (2 / (end * end)) - 1.0f;
    V p = V{} + factors[15];
#pragma GCC unroll 15
    for (int i = 14; i >= 0; --i) p = p * t + factors[i];
    p = p * inside + 0.5f;
    return x < -end ? V{} : p;
  }
};

// The density at x.
template <class T, class L>
inline typename L::V density(typename L::V x) {
  return exponential<T, L>(x * x * T(-0.5)) * T(0.398942280401432678);
}

template <class T, class L>
inline typename L::V gelu(typename L::V x) {
  return x * Normal<T>::template below<L>(x);
}

// GELU and its slope.
template <class T, class L>
inline typename L::V gelu_and_slope(typename L::V x, typename L::V& slope) {
  const typename L::V below = Normal<T>::template below<L>(x);
  slope = below + x * density<T, L>(x);
  return x * below;
}

}  // namespace mixerlab
