// The channels of one token, from the first to the last: what a layer norm is made of.
#pragma once

#include <cmath>

#include "vectors.h"

namespace mixerlab {

// Call `use.run<L, N>(c)` for all channels: four vectors at a time, and what is left one by one.
template <class T, class Use>
inline void each_channel(int64_t channels, Use& use) {
  constexpr int64_t width = Lanes<T>::width;
  int64_t c = 0;
  for (; c + 4 * width <= channels; c += 4 * width) use.template run<Lanes<T>, 4>(c);
  for (; c + width <= channels; c += width) use.template run<Lanes<T>, 1>(c);
  for (; c < channels; ++c) use.template run<One<T>, 1>(c);
}

template <class V>
inline auto total(V value) {
  auto sum = value[0];
  for (size_t i = 1; i < sizeof(V) / sizeof(value[0]); ++i) sum += value[i];
  return sum;
}

// 1 / sqrt(variance + eps); NaN for an infinite variance, whose 0 would make wrong numbers finite.
template <class T>
inline T inverse_deviation(T variance, T eps) {
  return T(1) / std::sqrt(variance + eps) + (variance - variance);
}

// The sum of squares of the distance to the mean.
template <class T>
struct Squares {
  const T* values;
  T mean, sum;

  template <class L, int N>
  inline void run(int64_t c) {
    typename L::V all{};
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      const auto distance = load<typename L::V>(values + c + i * L::width) - mean;
      all += distance * distance;
    }
    sum += total(all);
  }
};

}  // namespace mixerlab
