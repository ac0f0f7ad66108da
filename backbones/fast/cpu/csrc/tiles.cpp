// A product goes in tiles of some rows and two registers of columns, whose sums stay in registers.
// The right matrix is first written in the order in which tiles read it.

#include "tiles.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "registers.h"

namespace mixerlab {

#ifdef __AVX2__

namespace {

// The sums of a tile, what of the right matrix they take and a number of the left one: 31 registers
// of 32, or 15 of the 16 that AVX2 has.
constexpr int64_t kRows = kRegister == 64 ? 14 : 6;
constexpr int64_t kWide = 2;  // registers of columns
constexpr int64_t kDepth = 256;  // of one pass, whose panel then lies in the nearest cache
constexpr int64_t kShare = 1 << 17;  // multiply-adds that are worth a thread: some microseconds

template <class T>
constexpr int64_t kPanel = kWide * Lanes<T>::width;  // columns of a panel

// Columns of the right matrix, at most a panel, side by side (depth, panel) with zeros behind them.
template <class T>
void pack(View<T> right, int64_t depth, int64_t columns, T* to) {
  constexpr int64_t panel = kPanel<T>, width = Lanes<T>::width;
  using V = typename Lanes<T>::V;
  if (right.column == 1) {
    for (int64_t k = 0; k < depth; ++k, to += panel) {
      const T* from = right.data + k * right.row;
      if (columns == panel)
        for (int64_t n = 0; n < panel; n += width) store(to + n, load<V>(from + n));
      else
        std::fill(std::copy(from, from + columns, to), to + panel, T(0));
    }
    return;
  }
  const int64_t whole = columns / width * width, squares = depth / width * width;
  for (int64_t n = 0; n < whole; n += width)
    for (int64_t k = 0; k < squares; k += width)
      transpose(right.data + n * right.column + k, right.column, to + k * panel + n, panel);
  for (int64_t k = columns == panel ? squares : 0; k < depth; ++k) {
    T* line = to + k * panel;
    for (int64_t n = k < squares ? whole : 0; n < columns; ++n)
      line[n] = right.data[n * right.column + k];
    std::fill(line + columns, line + panel, T(0));
  }
}

// `count` tiles below each other of R rows and W registers of columns, the last of which may have
// fewer columns.
template <class T, int R, int W>
void multiply_column(View<T> left, const T* panel, int64_t count, int64_t depth, int64_t columns,
                     T* out, int64_t stride, Base<T> base) {
  using V = typename Lanes<T>::V;
  constexpr int64_t width = Lanes<T>::width;
  const int64_t row = left.row, column = left.column;
  const int64_t last = columns - (W - 1) * width;
  for (int64_t tile = 0; tile < count; ++tile) {
    V sum[R][W] = {};
    const auto each = [&](const auto& use) {
#pragma GCC unroll 14
      for (int i = 0; i < R; ++i)
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) use(sum[i][w], i, w);
    };
    const T *from = left.data, *line = panel;
    for (int64_t k = 0; k < depth; ++k) {
      V right[W];
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) right[w] = load<V>(line + w * width);
#pragma GCC unroll 14
      for (int i = 0; i < R; ++i) {
        const V one = from[i * row] - V{};  // what "+" would make of -0 costs an instruction
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) sum[i][w] += one * right[w];
      }
      line += kWide * width;
      from += column;
    }
    const auto with = [&](int i, int w) { return base.data + i * base.stride + w * width; };
    if (last == width) {
      if (base.data != nullptr) each([&](V& one, int i, int w) { one += load<V>(with(i, w)); });
      each([&](const V& one, int i, int w) { store(out + i * stride + w * width, one); });
    } else {
      if (base.data != nullptr)
        each([&](V& one, int i, int w) {
          one += w + 1 < W ? load<V>(with(i, w)) : load_some(with(i, w), last);
        });
      each([&](const V& one, int i, int w) {
        T* to = out + i * stride + w * width;
        if (w + 1 < W)
          store(to, one);
        else
          store_some(to, one, last);
      });
    }
    left.data += R * row;
    out += R * stride;
    if (base.data != nullptr) base.data += R * base.stride;
  }
}

template <class T>
using Column = void (*)(View<T>, const T*, int64_t, int64_t, int64_t, T*, int64_t, Base<T>);

template <class T, int W, size_t... R>
constexpr std::array<Column<T>, sizeof...(R)> columns_of(std::index_sequence<R...>) {
  return {&multiply_column<T, R + 1, W>...};
}

// Rows in tiles of about equal height, times a panel.
template <class T>
void multiply_panel(View<T> left, const T* panel, int64_t rows, int64_t depth, int64_t columns,
                    T* out, int64_t stride, Base<T> base) {
  static constexpr auto ones = columns_of<T, 1>(std::make_index_sequence<kRows>()),
                        twos = columns_of<T, 2>(std::make_index_sequence<kRows>());
  const auto& functions = columns > Lanes<T>::width ? twos : ones;
  const int64_t tiles = (rows + kRows - 1) / kRows, height = (rows + tiles - 1) / tiles;
  const int64_t tall = rows - tiles * (height - 1);  // tiles; the others have a row less
  functions[height - 1](left, panel, tall, depth, columns, out, stride, base);
  if (tall == tiles) return;
  const int64_t row = tall * height;
  functions[height - 2]({left.data + row * left.row, left.row, left.column}, panel, tiles - tall,
                        depth, columns, out + row * stride, stride, base.from(row, 0));
}

// Fetch what `pack` will read, while something else is computed.
template <class T>
void prefetch(View<T> right, int64_t depth, int64_t columns) {
  constexpr int64_t line = 64 / sizeof(T);
  const bool is_row = right.column == 1;
  const int64_t lines = is_row ? depth : columns, step = is_row ? right.row : right.column;
  for (int64_t i = 0; i < lines; ++i)
    for (int64_t at = 0; at < (is_row ? columns : depth); at += line)
      __builtin_prefetch(right.data + i * step + at, 0, 2);
}

}  // namespace

bool has_tiles() {
  static const bool is_intel = __builtin_cpu_is("intel");
  return !is_intel;
}

template <class T>
void multiply_tiles(View<T> left, View<T> right, int64_t rows, int64_t depth, int64_t columns,
                    T* out, int64_t stride, Base<T> base) {
  constexpr int64_t panel = kPanel<T>;
  const int64_t panels = (columns + panel - 1) / panel, worth = rows * depth * columns / kShare + 1;
  const int64_t threads =
      at::in_parallel_region() ? 1 : std::min<int64_t>(at::get_num_threads(), worth);
  // Threads have whole panels, or where these do not go round, shares of the rows of each.
  const int64_t shares = std::min(threads / std::gcd(threads, panels), (rows + kRows - 1) / kRows);
  const int64_t jobs = panels * shares;
  at::parallel_for(0, jobs, (jobs + threads - 1) / threads, [&](int64_t begin, int64_t end) {
    alignas(64) static thread_local T packed[panel * kDepth];
    for (int64_t k = 0; k < depth; k += kDepth) {
      const int64_t now = std::min(kDepth, depth - k);
      const auto width = [&](int64_t job) {
        return std::min(panel, columns - job / shares * panel);
      };
      const auto part = [&](int64_t job) {
        return View<T>{right.data + k * right.row + job / shares * panel * right.column, right.row,
                       right.column};
      };
      for (int64_t job = begin; job < end; ++job) {
        const int64_t share = job % shares, column = job / shares * panel;
        const int64_t from = rows * share / shares, until = rows * (share + 1) / shares;
        T* to = out + from * stride + column;
        if (job == begin || share == 0) pack<T>(part(job), now, width(job), packed);
        if (share + 1 == shares && job + 1 < end) prefetch<T>(part(job + 1), now, width(job + 1));
        multiply_panel<T>({left.data + from * left.row + k * left.column, left.row, left.column},
                          packed, until - from, now, width(job), to, stride,
                          k ? Base<T>{to, stride} : base.from(from, column));
      }
    }
  });
}

#else

bool has_tiles() { return false; }

template <class T>
void multiply_tiles(View<T>, View<T>, int64_t, int64_t, int64_t, T*, int64_t, Base<T>) {
  TORCH_CHECK(false, "this library was compiled for processors without AVX2");
}

#endif

template void multiply_tiles(View<float>, View<float>, int64_t, int64_t, int64_t, float*, int64_t,
                             Base<float>);
template void multiply_tiles(View<double>, View<double>, int64_t, int64_t, int64_t, double*,
                             int64_t, Base<double>);

}  // namespace mixerlab
