// y = W3 (silu(DW_a(u_a + b_a)) * DW_b(u_b + b_b)) + b3, [u_a, u_b] = block products of x: AFBO.
//
// A piece of the tokens goes through all steps before the next one begins, so that what lies
// between the products is still in the cache: some images at a time, or of a large map some rows at
// a time. The backward pass computes the convolutions, the gate and the product again.

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <string>

#include "depthwise.h"
#include "pieces.h"
#include "products.h"

namespace mixerlab {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Bytes between the products, per thread: half of a second-level cache.
constexpr int64_t kPieceBytes = 1 << 19;
// Further numbers between tokens, against tokens that all fall into the same places of a cache.
constexpr int64_t kPadding = 16;

template <class T>
const T* data_of(const OptionalTensor& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr<T>() : nullptr;
}

// Some channels of both branches at up to 4 tokens, in a first-level cache.
template <class T>
struct Pair {
  T a[4][kChannelBlock], b[4][kChannelBlock];
};

// The two convolutions along a row of the map.
template <class T>
struct Branches {
  const Convolution<T>&conv_a, &conv_b;
  Rows<T> rows_a, rows_b;
  int64_t row_edges, width;

  // N tokens from x on, channels from `begin` to `end`.
  template <class L, int N>
  inline void fill(int64_t x, int64_t begin, int64_t end, Pair<T>& pair) const {
    convolve_one<L, N>(rows_a, conv_a, x, begin, end, pair.a);
    convolve_one<L, N>(rows_b, conv_b, x, begin, end, pair.b);
  }

 private:
  template <class L, int N>
  inline void convolve_one(const Rows<T>& rows, const Convolution<T>& conv, int64_t x,
                           int64_t begin, int64_t end, T (*out)[kChannelBlock]) const {
    const T* start[N];
    for (int i = 0; i < N; ++i) start[i] = conv.bias_at(row_edges, edges(x + i, width));
    convolve<L, N>(rows, conv, start, x, width, begin, end, out[0] - begin, kChannelBlock);
  }
};

// Prefix tokens, which no convolution sees, as a row of one token.
template <class T>
struct Pointwise {
  const Convolution<T>&conv_a, &conv_b;
  const T* u;

  template <class L, int N>
  inline void fill(int64_t, int64_t begin, int64_t end, Pair<T>& pair) const {
    for (int64_t c = begin; c < end; ++c) {
      pair.a[0][c - begin] = u[c] + conv_a.before[c];
      pair.b[0][c - begin] = u[conv_a.h + c] + conv_b.before[c];
    }
  }
};

// silu(a) b.
template <class T, class Source>
struct Gate {
  const Source& source;
  T* out;
  int64_t stride;

  template <class L, int N>
  inline void run(int64_t x, int64_t begin, int64_t end) const {
    using V = typename L::V;
    Pair<T> pair;
    source.template fill<L, N>(x, begin, end, pair);
    for (int64_t c = begin; c < end; c += L::width) {
      V a[N];
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) a[i] = load<V>(pair.a[i] + c - begin);
      silu<T, L>(a);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i)
        store(out + (x + i) * stride + c, a[i] * load<V>(pair.b[i] + c - begin));
    }
  }
};

// silu(a) b again, and from its gradient those of a and, h numbers behind them, of b.
template <class T, class Source>
struct GateBack {
  const Source& source;
  const T* grad;
  T* out;
  int64_t stride;  // of both
  T* grad_ab;
  int64_t ab_stride;

  template <class L, int N>
  inline void run(int64_t x, int64_t begin, int64_t end) const {
    using V = typename L::V;
    Pair<T> pair;
    source.template fill<L, N>(x, begin, end, pair);
    for (int64_t c = begin; c < end; c += L::width) {
      V a[N], s[N];
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i)
        s[i] = a[i] = at_least(load<V>(pair.a[i] + c - begin), V{} - Exponential<T>::high);
      sigmoid<T, L>(s);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        const int64_t at = (x + i) * stride + c, to = (x + i) * ab_stride + c;
        const V b = load<V>(pair.b[i] + c - begin), g = load<V>(grad + at), silu = a[i] * s[i];
        store(out + at, silu * b);
        store(grad_ab + to, g * b * s[i] * (T(1) + a[i] * (T(1) - s[i])));
        store(grad_ab + to + source.conv_a.h, g * silu);
      }
    }
  }
};

// Gradients of all that a mixer has, in memory of its own.
struct Gradients {
  Tensor x;
  std::vector<Tensor> weights;
  Tensor before, taps, own;  // (2, h), (2, 9, h), (2, h)
  Tensor proj;
};

// The operation on plain memory.
template <class T>
class GatedMixer {
 public:
  GatedMixer(const Tensor& tokens, const Layout& layout, at::TensorList weights,
             at::IntArrayRef blocks, const OptionalTensor& before_a, const OptionalTensor& before_b,
             const Tensor& kernel_a, const Tensor& kernel_b, const OptionalTensor& own_a,
             const OptionalTensor& own_b, const Tensor& proj)
      : layout_(layout),
        batch_(tokens.size(0)),
        dim_(tokens.size(2)),
        out_dim_(proj.size(0)),
        h_(proj.size(1)),
        x_(tokens.const_data_ptr<T>()),
        weights_(weights),
        blocks_(blocks),
        proj_{proj.const_data_ptr<T>(), out_dim_, h_, h_},
        conv_a_(convolution(kernel_a, before_a, own_a)),
        conv_b_(convolution(kernel_b, before_b, own_b)),
        zeros_(h_),
        // As many tokens as fit, and enough for each to be worth the weights that it is read with.
        budget_(std::max<int64_t>(dim_, kPieceBytes / (3 * h_ * sizeof(T))) *
                at::get_num_threads()) {}

  // y (B, P + H W, C'). `kept` (B, P + H W, 2 h) is given what is mapped, unless it is null.
  void forward(const T* bias, T* y, T* kept) const {
    Window<T> window(kept ? 0 : layout_.window(budget_), 2 * h_ + kPadding);
    Window<T> product(layout_.window(budget_), h_ + kPadding);
    layout_.each_piece(batch_, budget_, [&](const Piece& piece) {
      const int64_t start = piece.image * layout_.count();
      const int64_t stride = kept ? 2 * h_ : window.stride;
      if (!kept) window.slide(piece);
      const auto u = [&](int64_t token) {
        return kept ? kept + (start + token) * stride : window.at(token);
      };
      const auto out = [&](int64_t token) { return product.at(token - piece.first); };
      map(x_ + (start + piece.fresh) * dim_, piece.until - piece.fresh, u(piece.fresh), stride);
      each_row(piece.first, piece.last, u, stride,
               [&](int64_t token, int64_t width, const auto& source) {
                 using Source = std::decay_t<decltype(source)>;
                 walk_row<T>(width, h_, Gate<T, Source>{source, out(token), product.stride});
               });
      const int64_t tokens = piece.last - piece.first;
      T* to = y + (start + piece.first) * out_dim_;
      multiply<T>({out(piece.first), tokens, h_, product.stride}, proj_.t(),
                  {to, tokens, out_dim_, out_dim_}, {bias});
    });
  }

  // All gradients, from that of y and what the forward pass kept.
  void backward(const T* grad_y, const T* kept, const Gradients& out) const {
    const int64_t stride = 2 * h_;
    Window<T> grads(layout_.window(budget_), 2 * h_ + kPadding);   // of what the gate reads
    Window<T> mapped(layout_.window(budget_), 2 * h_ + kPadding);  // of what is mapped
    Window<T> product(layout_.window(budget_), h_ + kPadding),
        grad(layout_.window(budget_), h_ + kPadding);
    std::vector<Sums<T>> sums_a(at::get_num_threads(), Sums<T>(h_)), sums_b = sums_a;
    T* grad_x = out.x.mutable_data_ptr<T>();
    layout_.each_piece(batch_, budget_, [&](const Piece& piece) {
      const int64_t start = piece.image * layout_.count();
      const auto u = [&](int64_t token) { return kept + (start + token) * stride; };
      grads.slide(piece);
      const int64_t fresh = piece.until - piece.fresh;
      const Matrix<const T> grad_out{grad_y + (start + piece.fresh) * out_dim_, fresh, out_dim_,
                                     out_dim_};
      multiply<T>(grad_out, proj_, {grad.at(0), fresh, h_, grad.stride});
      each_row(piece.fresh, piece.until, u, stride,
               [&](int64_t token, int64_t width, const auto& source) {
                 using Source = std::decay_t<decltype(source)>;
                 const int64_t at = token - piece.fresh;
                 walk_row<T>(width, h_,
                             GateBack<T, Source>{source, grad.at(at), product.at(at), grad.stride,
                                                 grads.at(token), grads.stride});
               });
      multiply_onto<T>(grad_out.t(), {product.at(0), fresh, h_, product.stride},
                       {out.proj.mutable_data_ptr<T>(), out_dim_, h_, h_});
      const auto to = [&](int64_t token) { return mapped.at(token - piece.first); };
      layout_.each_line(piece.first, piece.last, [&](int64_t token, int64_t y) {
        const int64_t thread = at::get_thread_num();
        const T* here = grads.at(token);
        const Rows<T> rows_a(here, y, layout_.size, grads.stride, zeros_.data());
        const Rows<T> rows_b(here + h_, y, layout_.size, grads.stride, zeros_.data());
        convolve_back(rows_a, u(token), stride, to(token), mapped.stride, conv_a_,
                      layout_.size.width, sums_a[thread]);
        convolve_back(rows_b, u(token) + h_, stride, to(token) + h_, mapped.stride, conv_b_,
                      layout_.size.width, sums_b[thread]);
      });
      layout_.each_prefix(piece.first, piece.last, [&](int64_t token) {
        const T* here = grads.at(token);
        std::copy(here, here + 2 * h_, to(token));
        for (int64_t c = 0; c < h_; ++c)
          sums_a[0].before[c] += here[c], sums_b[0].before[c] += here[h_ + c];
      });
      map_back(start + piece.first, piece.last - piece.first, to(piece.first), mapped.stride,
               grad_x, out.weights);
    });
    const Tensor all[] = {out.before, out.taps, out.own};
    for (int branch = 0; branch < 2; ++branch)
      for (const auto& sums : branch ? sums_b : sums_a) {
        const std::vector<T>* parts[] = {&sums.before, &sums.taps, &sums.own};
        for (int part = 0; part < 3; ++part) {
          T* total = all[part][branch].template mutable_data_ptr<T>();
          for (size_t i = 0; i < parts[part]->size(); ++i) total[i] += (*parts[part])[i];
        }
      }
  }

 private:
  // Call `use(columns of x, its first row of u, part of a weight, where that begins, whether more
  // of the same rows came before)` for all block products. Blocks go round: one that would read
  // beyond the last column of x goes on with the first.
  template <class Use>
  void each_product(const Use& use) const {
    int64_t row = 0;
    for (size_t i = 0; i < blocks_.size(); i += 2) {
      const Tensor& weight = weights_[blocks_[i]];
      const int64_t rows = weight.size(0), columns = weight.size(1), start = blocks_[i + 1];
      const int64_t here = std::min(columns, dim_ - start);
      use(i, row, rows, start, 0, here);
      if (here < columns) use(i, row, rows, 0, here, columns - here);
      row += rows;
    }
  }

  // Block products of tokens at x, side by side: (tokens, C) -> (tokens, 2 h).
  void map(const T* x, int64_t tokens, T* u, int64_t stride) const {
    each_product([&](size_t i, int64_t row, int64_t rows, int64_t start, int64_t from,
                     int64_t columns) {
      const Tensor& weight = weights_[blocks_[i]];
      const Matrix<const T> part{weight.const_data_ptr<T>() + from, rows, columns, weight.size(1)};
      const Matrix<const T> run{x + start, tokens, columns, dim_};
      const Matrix<T> out{u + row, tokens, rows, stride};
      from ? multiply_onto<T>(run, part.t(), out) : multiply<T>(run, part.t(), out);
    });
  }

  // The same backwards: gradients of x, which begin with zeros, and of the weights.
  void map_back(int64_t first, int64_t tokens, const T* grad, int64_t stride, T* grad_x,
                const std::vector<Tensor>& grad_weights) const {
    each_product([&](size_t i, int64_t row, int64_t rows, int64_t start, int64_t from,
                     int64_t columns) {
      const Tensor& weight = weights_[blocks_[i]];
      const Matrix<const T> part{weight.const_data_ptr<T>() + from, rows, columns, weight.size(1)};
      const Matrix<const T> run{grad + row, tokens, rows, stride};
      const int64_t at = first * dim_ + start;
      multiply_onto<T>(run, part, {grad_x + at, tokens, columns, dim_});
      T* grad_weight = grad_weights[blocks_[i]].template mutable_data_ptr<T>() + from;
      multiply_onto<T>(run.t(), {x_ + at, tokens, columns, dim_},
                       {grad_weight, rows, columns, weight.size(1)});
    });
  }

  // Call `use(token, width, source)` for the lines of the map, and prefix tokens, among some
  // tokens.
  template <class At, class Use>
  void each_row(int64_t from, int64_t until, const At& u, int64_t stride, const Use& use) const {
    layout_.each_line(from, until, [&](int64_t token, int64_t y) {
      const T* here = u(token);
      use(token, layout_.size.width,
          Branches<T>{conv_a_, conv_b_, Rows<T>(here, y, layout_.size, stride, zeros_.data()),
                      Rows<T>(here + h_, y, layout_.size, stride, zeros_.data()),
                      edges(y, layout_.size.height), layout_.size.width});
    });
    layout_.each_prefix(from, until, [&](int64_t token) {
      use(token, 1, Pointwise<T>{conv_a_, conv_b_, u(token)});
    });
  }

  Convolution<T> convolution(const Tensor& kernel, const OptionalTensor& before,
                             const OptionalTensor& own) const {
    return {kernel.const_data_ptr<T>(), data_of<T>(before), data_of<T>(own), h_, layout_.size};
  }

  const Layout layout_;
  const int64_t batch_, dim_, out_dim_, h_;
  const T* const x_;
  const at::TensorList weights_;
  const at::IntArrayRef blocks_;
  const Matrix<const T> proj_;
  const Convolution<T> conv_a_, conv_b_;
  const std::vector<T> zeros_;
  const int64_t budget_;  // tokens of a piece
};

std::tuple<Tensor, Tensor> gated_mixer(const Tensor& tokens, int64_t prefix, int64_t height,
                                       int64_t width, at::TensorList weights,
                                       at::IntArrayRef blocks, const OptionalTensor& before_a,
                                       const OptionalTensor& before_b, const Tensor& kernel_a,
                                       const Tensor& kernel_b, const OptionalTensor& own_a,
                                       const OptionalTensor& own_b, const Tensor& proj,
                                       const OptionalTensor& proj_bias, bool keep) {
  for (size_t i = 0; i < blocks.size(); i += 2)
    TORCH_CHECK(blocks[i] >= 0 && blocks[i] < static_cast<int64_t>(weights.size()),
                "mixerlab::gated_mixer has ", weights.size(), " weights; a block asks for number ",
                blocks[i]);
  const int64_t batch = tokens.size(0), count = tokens.size(1);
  auto y = at::empty({batch, count, proj.size(0)}, tokens.options());
  auto kept = at::empty({keep ? batch : 0, count, 2 * proj.size(1)}, tokens.options());
  AT_DISPATCH_FLOATING_TYPES(tokens.scalar_type(), "gated_mixer", [&] {
    const GatedMixer<scalar_t> mixer(tokens, {prefix, {height, width}}, weights, blocks, before_a,
                                     before_b, kernel_a, kernel_b, own_a, own_b, proj);
    mixer.forward(data_of<scalar_t>(proj_bias), y.mutable_data_ptr<scalar_t>(),
                  keep ? kept.mutable_data_ptr<scalar_t>() : nullptr);
  });
  return {y, kept};
}

std::tuple<Tensor, std::vector<Tensor>, Tensor, Tensor, Tensor, Tensor> gated_mixer_backward(
    const Tensor& grad, const Tensor& kept, const Tensor& tokens, int64_t prefix, int64_t height,
    int64_t width, at::TensorList weights, at::IntArrayRef blocks, const OptionalTensor& before_a,
    const OptionalTensor& before_b, const Tensor& kernel_a, const Tensor& kernel_b,
    const OptionalTensor& own_a, const OptionalTensor& own_b, const Tensor& proj) {
  const int64_t h = proj.size(1);
  const auto zeros = [&](at::IntArrayRef size) { return at::zeros(size, proj.options()); };
  Gradients out{zeros(tokens.sizes()), {}, zeros({2, h}), zeros({2, 9, h}), zeros({2, h}),
                zeros(proj.sizes())};
  for (const Tensor& weight : weights) out.weights.push_back(zeros(weight.sizes()));
  AT_DISPATCH_FLOATING_TYPES(tokens.scalar_type(), "gated_mixer_backward", [&] {
    const GatedMixer<scalar_t> mixer(tokens, {prefix, {height, width}}, weights, blocks, before_a,
                                     before_b, kernel_a, kernel_b, own_a, own_b, proj);
    mixer.backward(grad.const_data_ptr<scalar_t>(), kept.const_data_ptr<scalar_t>(), out);
  });
  return {out.x, out.weights, out.before, out.taps, out.own, out.proj};
}

}  // namespace
}  // namespace mixerlab

TORCH_LIBRARY(mixerlab, m) {
  m.def("has_tiles() -> bool", &mixerlab::has_tiles);
  m.def("instructions() -> str", [] { return std::string(mixerlab::kInstructions); });
  m.def(
      "gated_mixer(Tensor tokens, SymInt prefix, SymInt height, SymInt width, Tensor[] weights, "
      "int[] blocks, Tensor? before_a, Tensor? before_b, Tensor kernel_a, Tensor kernel_b, "
      "Tensor? own_a, Tensor? own_b, Tensor proj, Tensor? proj_bias, bool keep) "
      "-> (Tensor, Tensor)");
  m.def(
      "gated_mixer_backward(Tensor grad, Tensor kept, Tensor tokens, SymInt prefix, SymInt height, "
      "SymInt width, Tensor[] weights, int[] blocks, Tensor? before_a, Tensor? before_b, "
      "Tensor kernel_a, Tensor kernel_b, Tensor? own_a, Tensor? own_b, Tensor proj) "
      "-> (Tensor, Tensor[], Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(mixerlab, CPU, m) {
  m.impl("gated_mixer", &mixerlab::gated_mixer);
  m.impl("gated_mixer_backward", &mixerlab::gated_mixer_backward);
}
