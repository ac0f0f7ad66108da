// Matrix products in vectors of a whole line of memory, for processors that have them (AVX-512).
#pragma once

#include <cstdint>

namespace mixerlab {

// Elements of a matrix in memory: (i, j) is data[i * row + j * column]; one of the two is 1.
template <class T>
struct View {
  const T* data;
  int64_t row, column;
};

// Whether `multiply_tiles` is the faster way here. MKL, which torch brings, takes half a line at a
// time on processors that are not Intel's.
bool has_tiles();

// out (rows, columns), whose rows are `stride` apart, = left (rows, depth) right (depth, columns),
// or += that.
template <class T>
void multiply_tiles(View<T> left, View<T> right, int64_t rows, int64_t depth, int64_t columns,
                    T* out, int64_t stride, bool add);

}  // namespace mixerlab
