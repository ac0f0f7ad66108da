// Matrix products on plain memory, by tiles of our own or the BLAS that torch brings.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>

#include "tiles.h"
#include "vectors.h"

extern "C" {
void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*,
            const float*, const int*, const float*, const int*, const float*, float*, const int*)
    __attribute__((weak));
void dgemm_(const char*, const char*, const int*, const int*, const int*, const double*,
            const double*, const int*, const double*, const int*, const double*, double*,
            const int*) __attribute__((weak));
}

namespace mixerlab {

// A matrix in memory: rows `stride` elements apart; `transposed` reads it as its transpose.
template <class T>
struct Matrix {
  T* data;
  int64_t rows, columns, stride;
  bool transposed = false;

  Matrix t() const { return {data, rows, columns, stride, !transposed}; }
  int64_t height() const { return transposed ? columns : rows; }
  int64_t width() const { return transposed ? rows : columns; }
  View<std::remove_const_t<T>> view() const {
    return transposed ? View<std::remove_const_t<T>>{data, 1, stride}
                      : View<std::remove_const_t<T>>{data, stride, 1};
  }
  at::Tensor tensor() const {
    using Plain = std::remove_const_t<T>;
    auto whole = at::from_blob(const_cast<Plain*>(data), {rows, columns}, {stride, 1},
                               at::CppTypeToScalarType<Plain>::value);
    return transposed ? whole.t() : whole;
  }
};

// Below this many it is not worth to bring the right matrix into another order.
constexpr int64_t kFewRows = 8;
// Of a transposed left matrix a tile reads as many numbers side by side as it has rows. AVX2's have
// six, and the BLAS, which copies such a matrix first, is the faster one.
constexpr bool kTilesTakeTransposed = kRegister == 64;

inline auto blas(float) { return &sgemm_; }
inline auto blas(double) { return &dgemm_; }

// out = base + left right.
template <class T>
void multiply(Matrix<const T> left, Matrix<const T> right, Matrix<T> out, Base<T> base = {}) {
  if (out.rows == 0 || out.columns == 0) return;
  if (out.rows >= kFewRows && left.width() > 0 && has_tiles() &&
      (kTilesTakeTransposed || !left.transposed))
    return multiply_tiles(left.view(), right.view(), out.rows, left.width(), out.columns, out.data,
                          out.stride, base);
  const bool is_empty = left.width() == 0;  // a sum of nothing
  if (base.data != out.data && (base.data || is_empty))
    for (int64_t row = 0; row < out.rows; ++row) {
      T* to = out.data + row * out.stride;
      if (base.data)
        std::copy_n(base.data + row * base.stride, out.columns, to);
      else
        std::fill_n(to, out.columns, T(0));
    }
  if (is_empty) return;
  const auto gemm = blas(T());
  if (gemm == nullptr) {
    auto result = out.tensor();
    if (!base.data) result.zero_();  // what is in fresh memory may be no number
    result.addmm_(left.tensor(), right.tensor());
    return;
  }
  // BLAS counts by columns: it is given the transposed product, right^T left^T.
  const char first = right.transposed ? 'T' : 'N', second = left.transposed ? 'T' : 'N';
  const int m = out.columns, n = out.rows, k = left.width();
  const int lda = right.stride, ldb = left.stride, ldc = out.stride;
  const T one = 1, beta = base.data ? 1 : 0;
  gemm(&first, &second, &m, &n, &k, &one, right.data, &lda, left.data, &ldb, &beta, out.data, &ldc);
}

// out += left right.
template <class T>
void multiply_onto(Matrix<const T> left, Matrix<const T> right, Matrix<T> out) {
  multiply<T>(left, right, out, {out.data, out.stride});
}

}  // namespace mixerlab
