// Depthwise 3 x 3 convolutions on maps (H, W, h), channels last, with zeros around the map.
//
// Taps lie (9, h) in memory. A map has a stride between its tokens, so that two maps may lie side
// by side. Whoever walks takes a block of channels at a time: taps and neighbours stay in the first
// cache. A vector type L is a register (`Lanes`), or half of one (`Half`) or one number (`One`) for
// what is left over.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace mixerlab {

constexpr int64_t kChannelBlock = 128;

struct MapSize {
  int64_t height, width;
};

// Which neighbours of a row or column are outside: bit 0 the one before, bit 1 the one after.
inline int64_t edges(int64_t at, int64_t size) { return (at == 0) | ((at == size - 1) << 1); }

// Weights (h, 1, 3, 3) as taps (9, h).
template <class T>
std::vector<T> taps_of(const T* weight, int64_t h) {
  std::vector<T> taps(9 * h);
  for (int64_t c = 0; c < h; ++c)
    for (int64_t k = 0; k < 9; ++k) taps[k * h + c] = weight[9 * c + k];
  return taps;
}

// A convolution of u + before: taps, and what both biases amount to at each kind of place.
template <class T>
struct Convolution {
  int64_t h;
  std::vector<T> taps, before, own;

  // A bias that is not there (null) is zero.
  Convolution(const T* weight, const T* bias_before, const T* bias_own, int64_t channels,
              MapSize size)
      : h(channels),
        taps(taps_of(weight, channels)),
        before(channels),
        own(channels),
        bias_(16 * channels) {
    if (bias_before) std::copy(bias_before, bias_before + h, before.begin());
    if (bias_own) std::copy(bias_own, bias_own + h, own.begin());
    for (int64_t row = 0; row < 4; ++row)
      for (int64_t column = 0; column < 4; ++column)
        if (is_possible(row, size.height) && is_possible(column, size.width)) add_up(row, column);
  }

  // What the biases amount to where the row and the column have these edges, (h).
  const T* bias_at(int64_t row_edges, int64_t column_edges) const {
    return bias_.data() + (4 * row_edges + column_edges) * h;
  }

 private:
  std::vector<T> bias_;  // (16, h)

  static bool is_possible(int64_t edge, int64_t size) { return size == 1 ? edge == 3 : edge != 3; }

  // The taps inside the map times the bias before them, plus the convolution's own.
  void add_up(int64_t row, int64_t column) {
    T* out = bias_.data() + (4 * row + column) * h;
    for (int64_t dy = (row & 1); dy < (row & 2 ? 2 : 3); ++dy)
      for (int64_t dx = (column & 1); dx < (column & 2 ? 2 : 3); ++dx) {
        const T* tap = taps.data() + (3 * dy + dx) * h;
        for (int64_t c = 0; c < h; ++c) out[c] += tap[c];
      }
    for (int64_t c = 0; c < h; ++c) out[c] = out[c] * before[c] + own[c];
  }
};

// A row of a map with the rows above and below; one outside is a line of zeros, over and over.
template <class T>
struct Rows {
  const T* row[3];
  int64_t step[3];  // from a token to the next

  // `here` is where row y lies.
  Rows(const T* here, int64_t y, MapSize size, int64_t stride, const T* zeros) {
    for (int64_t dy = -1; dy < 2; ++dy) {
      const bool is_inside = y + dy >= 0 && y + dy < size.height;
      row[dy + 1] = is_inside ? here + dy * size.width * stride : zeros;
      step[dy + 1] = is_inside ? stride : 0;
    }
  }
};

// The convolution at N neighbouring tokens from x on, some channels: to `out`, whose tokens are
// `stride` apart, what it adds to `start`. A function of its own, lest what comes before and after
// it take registers that its sums and taps need.
template <class L, int N, class T>
[[gnu::noinline]] void convolve(const Rows<T>& rows, const Convolution<T>& conv,
                                const T* const (&start)[N], int64_t x, int64_t width,
                                int64_t begin, int64_t end, T* out, int64_t stride) {
  using V = typename L::V;
  const bool has_left = x > 0, has_right = x + N < width;
  const T *const taps = conv.taps.data(), *const row[3] = {rows.row[0] + x * rows.step[0],
                                                          rows.row[1] + x * rows.step[1],
                                                          rows.row[2] + x * rows.step[2]};
  for (int64_t c = begin; c < end; c += L::width) {
    V sum[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) sum[i] = load<V>(start[i] + c);
#pragma GCC unroll 3
    for (int dy = 0; dy < 3; ++dy) {
      const int64_t step = rows.step[dy];
      const T *from = row[dy] + c, *tap = taps + 3 * dy * conv.h + c;
      const V left = load<V>(tap), centre = load<V>(tap + conv.h), right = load<V>(tap + 2 * conv.h);
      V value[N + 2];
      value[0] = has_left ? load<V>(from - step) : V{};
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) value[i + 1] = load<V>(from + i * step);
      value[N + 1] = has_right ? load<V>(from + N * step) : V{};
      // All sums by turns, as each waits for its own last addition.
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) sum[i] += left * value[i];
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) sum[i] += centre * value[i + 1];
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) sum[i] += right * value[i + 2];
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) store(out + i * stride + c, sum[i]);
  }
}

// Call `step.run<L, N>(x, begin, end)` for all tokens of a row, N at a time, and some channels.
template <class T, class Step>
inline void walk_channels(int64_t width, int64_t begin, int64_t end, const Step& step) {
  const int64_t lines = begin + (end - begin) / Lanes<T>::width * Lanes<T>::width;
  const int64_t halves = lines + (end - lines) / Half<T>::width * Half<T>::width;
  const auto run = [&]<int N>(int64_t x) {
    if (begin < lines) step.template run<Lanes<T>, N>(x, begin, lines);
    if (lines < halves) step.template run<Half<T>, N>(x, lines, halves);
    if (halves < end) step.template run<One<T>, N>(x, halves, end);
  };
  int64_t x = 0;
  for (; x + 4 <= width; x += 4) run.template operator()<4>(x);
  for (; x + 2 <= width; x += 2) run.template operator()<2>(x);
  for (; x < width; ++x) run.template operator()<1>(x);
}

// The same for all channels.
template <class T, class Step>
inline void walk_row(int64_t width, int64_t h, const Step& step) {
  for (int64_t begin = 0; begin < h; begin += kChannelBlock)
    walk_channels<T>(width, begin, std::min(h, begin + kChannelBlock), step);
}

// The convolution of a row whose edges are these, into a row without gaps; a step of `walk_row`.
template <class T>
struct ConvolvedRow {
  const Convolution<T>& conv;
  Rows<T> rows;
  int64_t row_edges, width;
  T* out;

  template <class L, int N>
  inline void run(int64_t x, int64_t begin, int64_t end) const {
    const T* start[N];
    for (int i = 0; i < N; ++i) start[i] = conv.bias_at(row_edges, edges(x + i, width));
    convolve<L, N>(rows, conv, start, x, width, begin, end, out + x * conv.h, conv.h);
  }
};

// What a convolution's backward pass adds up over all places.
template <class T>
struct Sums {
  std::vector<T> taps, before, own;

  explicit Sums(int64_t h) : taps(9 * h), before(h), own(h) {}
};

// The backward pass at one row: from the gradients around it to those of u, and to the sums.
template <class L, class T>
inline void convolve_back_some(const Rows<T>& grads, const T* u, int64_t u_stride, T* grad_u,
                               int64_t grad_stride, const Convolution<T>& conv, int64_t width,
                               int64_t begin, int64_t end, Sums<T>& sums) {
  using V = typename L::V;
  const int64_t h = conv.h;
  for (int64_t c = begin; c < end; c += L::width) {
    V tap[9], sum[9] = {}, sum_before{}, sum_own{};
    for (int k = 0; k < 9; ++k) tap[k] = load<V>(conv.taps.data() + k * h + c);
    const V before = load<V>(conv.before.data() + c);
    for (int64_t x = 0; x < width; ++x) {
      const V value = load<V>(u + x * u_stride + c) + before;
      V grad{};
#pragma GCC unroll 3
      for (int dy = 0; dy < 3; ++dy) {
        // Tap (dy, dx) of the output at (-dy, -dx) read this place.
        const T* from = grads.row[2 - dy] + x * grads.step[2 - dy] + c;
        const int64_t step = grads.step[2 - dy];
#pragma GCC unroll 3
        for (int dx = 0; dx < 3; ++dx) {
          const int64_t at = x + 1 - dx;
          const V one = at < 0 || at >= width ? V{} : load<V>(from + (1 - dx) * step);
          grad += tap[3 * dy + dx] * one;
          sum[3 * dy + dx] += one * value;
          if (dy == 1 && dx == 1) sum_own += one;
        }
      }
      sum_before += grad;
      store(grad_u + x * grad_stride + c, grad);
    }
    for (int k = 0; k < 9; ++k) {
      T* to = sums.taps.data() + k * h + c;
      store(to, load<V>(to) + sum[k]);
    }
    store(sums.before.data() + c, load<V>(sums.before.data() + c) + sum_before);
    store(sums.own.data() + c, load<V>(sums.own.data() + c) + sum_own);
  }
}
template <class T>
inline void convolve_back(const Rows<T>& grads, const T* u, int64_t u_stride, T* grad_u,
                          int64_t grad_stride, const Convolution<T>& conv, int64_t width,
                          Sums<T>& sums) {
  const int64_t lines = conv.h / Lanes<T>::width * Lanes<T>::width;
  convolve_back_some<Lanes<T>>(grads, u, u_stride, grad_u, grad_stride, conv, width, 0, lines,
                               sums);
  convolve_back_some<One<T>>(grads, u, u_stride, grad_u, grad_stride, conv, width, lines, conv.h,
                             sums);
}

}  // namespace mixerlab
