// A product goes in tiles of 14 rows and two lines of columns, whose sums stay in registers. The
// right matrix is first written in the order in which tiles read it.

#include "tiles.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "vectors.h"

namespace mixerlab {

#ifdef __AVX512F__

namespace {

constexpr int64_t kRows = 14;   // 28 sums, two lines of the right matrix and one of the left
constexpr int64_t kLines = 2;
constexpr int64_t kDepth = 256;  // of one pass: a panel of it fills two thirds of a first-level cache

template <class T>
constexpr int64_t kPanel = kLines* Lanes<T>::width;  // columns of a panel

// Lanes of a, numbered from 0, and of b behind them.
inline Lanes<float>::V pick(Lanes<float>::V a, Lanes<float>::V b, Lanes<float>::I lanes) {
  return (Lanes<float>::V)_mm512_permutex2var_ps((__m512)a, (__m512i)lanes, (__m512)b);
}
inline Lanes<double>::V pick(Lanes<double>::V a, Lanes<double>::V b, Lanes<double>::I lanes) {
  return (Lanes<double>::V)_mm512_permutex2var_pd((__m512d)a, (__m512i)lanes, (__m512d)b);
}

// The first lanes of a line: what lies there, or zeros behind them, and back.
inline Lanes<float>::V load_some(const float* from, int64_t count) {
  return (Lanes<float>::V)_mm512_maskz_loadu_ps((1u << count) - 1, from);
}
inline Lanes<double>::V load_some(const double* from, int64_t count) {
  return (Lanes<double>::V)_mm512_maskz_loadu_pd((1u << count) - 1, from);
}
inline void store_some(float* to, Lanes<float>::V value, int64_t count) {
  _mm512_mask_storeu_ps(to, (1u << count) - 1, (__m512)value);
}
inline void store_some(double* to, Lanes<double>::V value, int64_t count) {
  _mm512_mask_storeu_pd(to, (1u << count) - 1, (__m512d)value);
}

// A square of lines, transposed: at each step what has one bit of row and column different.
template <class T>
void transpose(const T* from, int64_t from_stride, T* to, int64_t stride) {
  using V = typename Lanes<T>::V;
  using I = typename Lanes<T>::I;
  constexpr int width = Lanes<T>::width;
  V rows[width];
#pragma GCC unroll 16
  for (int i = 0; i < width; ++i) rows[i] = load<V>(from + i * from_stride);
#pragma GCC unroll 4
  for (int bit = 1; bit < width; bit *= 2) {
    I low, high;
    for (int j = 0; j < width; ++j) {
      low[j] = j & bit ? width + j - bit : j;
      high[j] = j & bit ? width + j : j + bit;
    }
#pragma GCC unroll 16
    for (int i = 0; i < width; ++i)
      if (!(i & bit)) {
        const V first = rows[i], second = rows[i + bit];
        rows[i] = pick(first, second, low);
        rows[i + bit] = pick(first, second, high);
      }
  }
#pragma GCC unroll 16
  for (int i = 0; i < width; ++i) store(to + i * stride, rows[i]);
}

// Columns of the right matrix, at most a panel, side by side (depth, panel) with zeros behind them.
template <class T>
void pack(View<T> right, int64_t depth, int64_t columns, T* to) {
  constexpr int64_t panel = kPanel<T>, width = Lanes<T>::width;
  if (right.column == 1) {
    for (int64_t k = 0; k < depth; ++k) {
      const T* from = right.data + k * right.row;
      std::fill(std::copy(from, from + columns, to + k * panel), to + (k + 1) * panel, T(0));
    }
    return;
  }
  const int64_t whole = columns / width * width, squares = depth / width * width;
  for (int64_t n = 0; n < whole; n += width)
    for (int64_t k = 0; k < squares; k += width)
      transpose(right.data + n * right.column + k, right.column, to + k * panel + n, panel);
  for (int64_t k = 0; k < depth; ++k) {
    T* line = to + k * panel;
    for (int64_t n = k < squares ? whole : 0; n < columns; ++n)
      line[n] = right.data[n * right.column + k];
    std::fill(line + columns, line + panel, T(0));
  }
}

// R rows and W lines of columns, the last one of which has some columns only.
template <class T, int R, int W>
void multiply_tile(View<T> left, const T* panel, int64_t depth, int64_t columns, T* out,
                   int64_t stride, bool add) {
  using V = typename Lanes<T>::V;
  constexpr int64_t width = Lanes<T>::width;
  const int64_t row = left.row, column = left.column;
  const T* from = left.data;
  V sum[R][W] = {};
  for (int64_t k = 0; k < depth; ++k) {
    V right[W];
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) right[w] = load<V>(panel + w * width);
#pragma GCC unroll 14
    for (int i = 0; i < R; ++i) {
      const V one = V{} + from[i * row];
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) sum[i][w] += one * right[w];
    }
    panel += kLines * width;
    from += column;
  }
  const int64_t last = columns - (W - 1) * width;
#pragma GCC unroll 14
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) {
      T* to = out + i * stride + w * width;
      if (w + 1 < W)
        store(to, add ? load<V>(to) + sum[i][w] : sum[i][w]);
      else
        store_some(to, add ? load_some(to, last) + sum[i][w] : sum[i][w], last);
    }
}

template <class T>
using Tile = void (*)(View<T>, const T*, int64_t, int64_t, T*, int64_t, bool);

template <class T, int W, size_t... R>
constexpr std::array<Tile<T>, sizeof...(R)> tiles_of(std::index_sequence<R...>) {
  return {&multiply_tile<T, R + 1, W>...};
}

// A tile of some rows and columns, at most a panel.
template <class T>
void multiply_some(View<T> left, const T* panel, int64_t rows, int64_t depth, int64_t columns,
                   T* out, int64_t stride, bool add) {
  static constexpr auto ones = tiles_of<T, 1>(std::make_index_sequence<kRows>()),
                        twos = tiles_of<T, 2>(std::make_index_sequence<kRows>());
  (columns > Lanes<T>::width ? twos : ones)[rows - 1](left, panel, depth, columns, out, stride, add);
}

}  // namespace

bool has_tiles() {
  static const bool is_intel = __builtin_cpu_is("intel");
  return !is_intel;
}

template <class T>
void multiply_tiles(View<T> left, View<T> right, int64_t rows, int64_t depth, int64_t columns,
                    T* out, int64_t stride, bool add) {
  constexpr int64_t panel = kPanel<T>;
  static thread_local std::vector<T> memory;
  const int64_t panels = (columns + panel - 1) / panel, tiles = (rows + kRows - 1) / kRows;
  memory.resize(std::max<size_t>(memory.size(), panels * panel * std::min(depth, kDepth)));
  T* packed = memory.data();
  for (int64_t k = 0; k < depth; k += kDepth) {
    const int64_t now = std::min(kDepth, depth - k);
    const auto width = [&](int64_t n) { return std::min(panel, columns - n * panel); };
    at::parallel_for(0, panels, 8, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        pack<T>({right.data + k * right.row + n * panel * right.column, right.row, right.column},
                now, width(n), packed + n * panel * now);
    });
    at::parallel_for(0, tiles, 4, [&](int64_t begin, int64_t end) {
      for (int64_t n = 0; n < panels; ++n)
        for (int64_t tile = begin; tile < end; ++tile) {
          // Of equal height, but for one row.
          const int64_t from = rows * tile / tiles, until = rows * (tile + 1) / tiles;
          multiply_some<T>({left.data + from * left.row + k * left.column, left.row, left.column},
                           packed + n * panel * now, until - from, now, width(n),
                           out + from * stride + n * panel, stride, add || k > 0);
        }
    });
  }
}

#else

bool has_tiles() { return false; }

template <class T>
void multiply_tiles(View<T>, View<T>, int64_t, int64_t, int64_t, T*, int64_t, bool) {
  TORCH_CHECK(false, "this library was compiled for processors without AVX-512");
}

#endif

template void multiply_tiles(View<float>, View<float>, int64_t, int64_t, int64_t, float*, int64_t,
                             bool);
template void multiply_tiles(View<double>, View<double>, int64_t, int64_t, int64_t, double*,
                             int64_t, bool);

}  // namespace mixerlab
