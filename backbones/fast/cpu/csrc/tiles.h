// Matrix products in the longest vectors of a processor, AVX-512's or AVX2's.
#pragma once

#include <cstdint>

namespace mixerlab {

// Elements of a matrix in memory: (i, j) is data[i * row + j * column]; one of the two is 1.
template <class T>
struct View {
  const T* data;
  int64_t row, column;
};

// What a product is added to: rows `stride` apart, one row for all with a stride of 0, or nothing.
template <class T>
struct Base {
  const T* data = nullptr;
  int64_t stride = 0;

  Base from(int64_t row, int64_t column) const {
    return data ? Base{data + row * stride + column, stride} : Base{};
  }
};

// Whether `multiply_tiles` serves here: on processors that are not Intel's. There MKL, which torch
// brings, takes half a register of AVX-512 at a time, and small matrices cost it as much as larger
// ones; large ones in AVX2 are as fast either way.
bool has_tiles();

// out (rows, columns), whose rows are `stride` apart, = base + left (rows, depth) right (depth,
// columns). The base may be out itself.
template <class T>
void multiply_tiles(View<T> left, View<T> right, int64_t rows, int64_t depth, int64_t columns,
                    T* out, int64_t stride, Base<T> base);

}  // namespace mixerlab
