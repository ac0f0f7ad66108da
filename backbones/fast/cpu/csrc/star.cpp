// SiLU(x W_G) * LN(SiLU(W_s p W_c) * V(q)), [p, q] = DW(x W_in): SBM where no gradient is recorded.
//
// On a small map its matrices are so small that what torch does between them counts as much as
// they do. An image goes through all steps while it is in the cache; the last ones, which are the
// tokens' own, go in pieces.

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cmath>
#include <memory>

#include "depthwise.h"
#include "products.h"
#include "rows.h"

namespace mixerlab {
namespace {

using at::Tensor;
using at::TensorList;

// Bytes of the three maps of a piece of the tokens, which go through the last steps together. Few
// tokens are not worth the order that a matrix is brought into.
constexpr int64_t kPieceBytes = 1 << 19;
constexpr int64_t kFewestTokens = 64;

template <class T>
struct Layer {
  const T *weight, *bias;
  int64_t rows, columns;

  Layer(const Tensor& w, const Tensor& b)
      : weight(w.const_data_ptr<T>()),
        bias(b.const_data_ptr<T>()),
        rows(w.size(0)),
        columns(w.dim() == 2 ? w.size(1) : 1) {}

  // Without its bias: tokens (n, columns), `stride` apart, to (n, rows).
  void multiply_tokens(const T* tokens, int64_t n, int64_t stride, T* out) const {
    multiply<T>({tokens, n, columns, stride}, Matrix<const T>{weight, rows, columns, columns}.t(),
                {out, n, rows, rows});
  }
};

// SiLU(values + bias) of N vectors.
template <class T, class L, int N>
inline void silu_of(const T* values, const T* bias, typename L::V (&out)[N]) {
  using V = typename L::V;
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i)
    out[i] = load<V>(values + i * L::width) + load<V>(bias + i * L::width);
  silu<T, L>(out);
}

// SiLU(u + b_u) (v + b_v) in place of u, and its sum.
template <class T>
struct Product {
  T* u;
  const T *v, *bias_u, *bias_v;
  T sum;

  template <class L, int N>
  inline void run(int64_t c) {
    using V = typename L::V;
    V star[N], all{};
    silu_of<T, L>(u + c, bias_u + c, star);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      const int64_t at = c + i * L::width;
      star[i] *= load<V>(v + at) + load<V>(bias_v + at);
      store(u + at, star[i]);
      all += star[i];
    }
    sum += total(all);
  }
};

// LN(star) SiLU(g + b_g).
template <class T>
struct Gated {
  const T *star, *gate, *bias, *weight, *shift;
  T mean, inverse;
  T* out;

  template <class L, int N>
  inline void run(int64_t c) {
    using V = typename L::V;
    V open[N];
    silu_of<T, L>(gate + c, bias + c, open);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      const int64_t at = c + i * L::width;
      const V normal = (load<V>(star + at) - mean) * inverse;
      store(out + at, (normal * load<V>(weight + at) + load<V>(shift + at)) * open[i]);
    }
  }
};

template <class T>
struct StarMixer {
  MapSize size;
  int64_t dim, rank;
  Layer<T> in, proj, lin, gate, norm;
  const T *read, *write;  // (m, n)
  const Convolution<T>& conv;
  T eps;

  // One image: x (n, C) -> y (n, C).
  void mix(const T* x, T* y) const {
    const int64_t n = size.height * size.width, both = 2 * dim;
    const std::unique_ptr<T[]> memory(new T[2 * n * both + 2 * rank * dim]);
    T *u = memory.get(), *p = u + n * both, *seen = p + n * both, *latent = seen + rank * dim;
    at::parallel_for(0, n, 2 * kFewestTokens, [&](int64_t from, int64_t to) {
      in.multiply_tokens(x + from * dim, to - from, dim, u + from * both);
    });
    const std::vector<T> zeros(both);
    at::parallel_for(0, size.height, 8, [&](int64_t from, int64_t to) {
      for (int64_t line = from; line < to; ++line) {
        const T* here = u + line * size.width * both;
        walk_row<T>(size.width, both,
                    ConvolvedRow<T>{conv, Rows<T>(here, line, size, both, zeros.data()),
                                    edges(line, size.height), size.width,
                                    p + line * size.width * both});
      }
    });
    multiply<T>({read, rank, n, n}, {p, n, dim, both}, {seen, rank, dim, dim});
    proj.multiply_tokens(seen, rank, dim, latent);
    const int64_t most = std::max<int64_t>(kFewestTokens, kPieceBytes / (3 * dim * sizeof(T)));
    at::parallel_for(0, n, kFewestTokens, [&](int64_t from, int64_t to) {
      const int64_t pieces = (to - from + most - 1) / most;
      const auto start = [&](int64_t piece) { return from + (to - from) * piece / pieces; };
      const std::unique_ptr<T[]> maps(new T[3 * std::min(most, to - from) * dim]);
      for (int64_t piece = 0; piece < pieces; ++piece)
        finish(x, p, latent, start(piece), start(piece + 1) - start(piece), maps.get(), y);
    });
  }

 private:
  // What a token does alone, for some tokens.
  void finish(const T* x, const T* p, const T* latent, int64_t at, int64_t count, T* maps,
              T* y) const {
    const int64_t n = size.height * size.width;
    T *star = maps, *value = star + count * dim, *open = value + count * dim;
    multiply<T>(Matrix<const T>{write + at, rank, count, n}.t(), {latent, rank, dim, dim},
                {star, count, dim, dim});
    lin.multiply_tokens(p + at * 2 * dim + dim, count, 2 * dim, value);
    gate.multiply_tokens(x + at * dim, count, dim, open);
    for (int64_t i = 0; i < count; ++i) {
      T* own = star + i * dim;
      Product<T> product{own, value + i * dim, proj.bias, lin.bias, 0};
      each_channel<T>(dim, product);
      Squares<T> squares{own, product.sum / dim, 0};
      each_channel<T>(dim, squares);
      Gated<T> gated{own,          open + i * dim, gate.bias,
                     norm.weight,  norm.bias,      squares.mean,
                     inverse_deviation(squares.sum / dim, eps), y + (at + i) * dim};
      each_channel<T>(dim, gated);
    }
  }
};

void check_one(const Tensor& tensor, const Tensor& x, at::IntArrayRef sizes) {
  TORCH_CHECK(tensor.scalar_type() == x.scalar_type() && tensor.is_contiguous() &&
                  tensor.sizes() == sizes,
              "mixerlab::star_mixer needs a contiguous tensor ", sizes, " of ", x.scalar_type(),
              "; got ", tensor.sizes(), " of ", tensor.scalar_type());
}

void check(const Tensor& x, TensorList weights, TensorList biases, const Tensor& kernel,
           const Tensor& own, const Tensor& read, const Tensor& write) {
  TORCH_CHECK(x.dim() == 4 && x.is_contiguous() && weights.size() == 5 && biases.size() == 5,
              "mixerlab::star_mixer needs a contiguous map (B, H, W, C) and five layers");
  const int64_t dim = x.size(3), rows[] = {2 * dim, dim, dim, dim, dim};
  for (int64_t i = 0; i < 5; ++i) {
    const int64_t matrix[] = {rows[i], dim};
    check_one(weights[i], x, at::IntArrayRef(matrix, i < 4 ? 2 : 1));
    check_one(biases[i], x, at::IntArrayRef(rows + i, 1));
  }
  check_one(kernel, x, {2 * dim, 1, 3, 3});
  check_one(own, x, {2 * dim});
  TORCH_CHECK(read.dim() == 3, "mixerlab::star_mixer needs factors (m, H, W)");
  for (const Tensor& factor : {read, write})
    check_one(factor, x, {read.size(0), x.size(1), x.size(2)});
}

// x (B, H, W, C) -> the same; weights and biases of in, proj, lin, gate and norm, all contiguous.
Tensor star_mixer(const Tensor& x, TensorList weights, TensorList biases, const Tensor& kernel,
                  const Tensor& own, const Tensor& read, const Tensor& write, double eps) {
  check(x, weights, biases, kernel, own, read, write);
  Tensor y = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "star_mixer", [&] {
    using T = scalar_t;
    const MapSize size{x.size(1), x.size(2)};
    const int64_t dim = x.size(3), image = size.height * size.width * dim;
    const auto layer = [&](int64_t i) { return Layer<T>(weights[i], biases[i]); };
    const Convolution<T> conv(kernel.const_data_ptr<T>(), biases[0].const_data_ptr<T>(),
                              own.const_data_ptr<T>(), 2 * dim, size);
    const StarMixer<T> mixer{size,
                             dim,
                             read.size(0),
                             layer(0),
                             layer(1),
                             layer(2),
                             layer(3),
                             layer(4),
                             read.const_data_ptr<T>(),
                             write.const_data_ptr<T>(),
                             conv,
                             T(eps)};
    const T* from = x.const_data_ptr<T>();
    T* to = y.mutable_data_ptr<T>();
    const auto mix = [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) mixer.mix(from + i * image, to + i * image);
    };
    // Few images share their threads.
    if (x.size(0) >= at::get_num_threads())
      at::parallel_for(0, x.size(0), 1, mix);
    else
      mix(0, x.size(0));
  });
  return y;
}

}  // namespace
}  // namespace mixerlab

TORCH_LIBRARY_FRAGMENT(mixerlab, m) {
  m.def(
      "star_mixer(Tensor x, Tensor[] weights, Tensor[] biases, Tensor kernel, Tensor own, "
      "Tensor read, Tensor write, float eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(mixerlab, CPU, m) { m.impl("star_mixer", &mixerlab::star_mixer); }
