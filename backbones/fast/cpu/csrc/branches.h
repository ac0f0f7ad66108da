// What both forms of IFFN's operator have in common: branches, convolution and the norm behind it.
#pragma once

#include <ATen/ATen.h>

#include "depthwise.h"
#include "normal.h"
#include "norms.h"
#include "pieces.h"
#include "products.h"

namespace mixerlab {

using at::Tensor;

// Bytes of the hidden map of a piece, per thread.
constexpr int64_t kPieceBytes = 1 << 20;
// Further numbers between tokens, against tokens that all fall into the same places of a cache.
constexpr int64_t kPadding = 16;

// Rows of the gradients that there is one of per hidden channel.
enum PerChannel { kAlpha, kBeta, kGamma, kTheta, kWeightMid, kBiasMid, kWeightDw, kBiasDw, kOwn,
                  kTaps, kPerChannel = kTaps + 9 };

// gelu(alpha z + gamma), times a scale plus a shift, of channels of one branch.
template <class T>
struct Activate {
  const T* z;
  int64_t z_stride, branch;  // the branch's first channel
  const T *alpha, *gamma, *scale, *shift;
  T* out;
  int64_t stride;

  template <class L, int N>
  inline void run(int64_t x, int64_t begin, int64_t end) const {
    using V = typename L::V;
    for (int64_t c = begin; c < end; c += L::width) {
      const V a = load<V>(alpha + c), b = load<V>(gamma + c);
      V value[N];
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i)
        value[i] = load<V>(z + (x + i) * z_stride + c - branch) * a + b;
      gelu<T, L>(value);
      const V s = load<V>(scale + c), f = load<V>(shift + c);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) store(out + (x + i) * stride + c, value[i] * s + f);
    }
  }
};

// gelu(values * scale + shift), plus what lies in `add`, as far apart as the values, unless it is null.
template <class T>
struct NormGelu {
  const T *values, *scale, *shift, *add;
  T* out;
  int64_t from_stride, stride;

  template <class L, int N>
  inline void run(int64_t x, int64_t begin, int64_t end) const {
    using V = typename L::V;
    for (int64_t c = begin; c < end; c += L::width) {
      const V s = load<V>(scale + c), f = load<V>(shift + c);
      V value[N];
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) value[i] = load<V>(values + (x + i) * from_stride + c) * s + f;
      gelu<T, L>(value);
      if (add != nullptr)
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) value[i] += load<V>(add + (x + i) * from_stride + c);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) store(out + (x + i) * stride + c, value[i]);
    }
  }
};

// The same backwards: also the gradient before the GELU, its sum and that of its product with u.
template <class T>
struct NormGeluBack {
  const T *values, *scale, *shift, *centre, *add, *grad;
  T *product, *out;
  int64_t from_stride, grad_stride, stride;  // the last one of product
  int64_t out_stride;
  T *sum, *dot;

  template <class L, int N>
  inline void run(int64_t x, int64_t begin, int64_t end) const {
    using V = typename L::V;
    for (int64_t c = begin; c < end; c += L::width) {
      const V s = load<V>(scale + c), f = load<V>(shift + c), m = load<V>(centre + c);
      V one = load<V>(sum + c), two = load<V>(dot + c);
      V u[N], value[N], slope[N];
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        u[i] = load<V>(values + (x + i) * from_stride + c);
        value[i] = u[i] * s + f;
      }
      gelu_and_slope<T, L>(value, slope);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        const V more = add ? load<V>(add + (x + i) * from_stride + c) : V{};
        store(product + (x + i) * stride + c, value[i] + more);
        const V g = load<V>(grad + (x + i) * grad_stride + c) * slope[i];
        store(out + (x + i) * out_stride + c, g);
        one += g;
        two += g * (u[i] - m);
      }
      store(sum + c, one);
      store(dot + c, two);
    }
  }
};

// out = a grad + b + c (values - centre).
template <class T>
struct Centred {
  const T *grad, *values;
  int64_t stride;
  const T *a, *b, *c, *centre;
  T* out;
  int64_t out_stride;

  template <class L, int N>
  inline void run(int64_t x, int64_t begin, int64_t end) const {
    using V = typename L::V;
    for (int64_t i = begin; i < end; i += L::width) {
      const V k = load<V>(a + i), l = load<V>(b + i), m = load<V>(c + i), n = load<V>(centre + i);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) {
        const int64_t at = (x + j) * stride + i;
        store(out + (x + j) * out_stride + i,
              k * load<V>(grad + at) + l + m * (load<V>(values + at) - n));
      }
    }
  }
};

// The parts of a mixer on plain memory.
template <class T>
class Branches {
 protected:
  // `norms` are weight and bias of both; `is_training` says whether the norm behind the convolution
  // takes the batch's statistics, or its running ones.
  Branches(const Tensor& tokens, MapSize size, const Tensor& w1, const Tensor& b1,
           at::TensorList coefficients, at::TensorList norms, double eps_dw, bool is_training,
           const Tensor& kernel, const Tensor& own, const Tensor& w2)
      : layout_{0, size},
        batch_(tokens.size(0)),
        dim_(tokens.size(2)),
        out_dim_(w2.size(0)),
        w_(w1.size(0)),
        h_(w2.size(1)),
        is_training_(is_training),
        x_(tokens.const_data_ptr<T>()),
        w1_{w1.const_data_ptr<T>(), w_, dim_, dim_},
        w2_{w2.const_data_ptr<T>(), out_dim_, h_, h_},
        b1_(b1.const_data_ptr<T>()),
        own_(own.const_data_ptr<T>()),
        norms_{norms[0].const_data_ptr<T>(), norms[1].const_data_ptr<T>(),
               norms[2].const_data_ptr<T>(), norms[3].const_data_ptr<T>()},
        conv_(kernel.const_data_ptr<T>(), nullptr, own_, h_, size),
        zeros_(h_),
        ones_(h_, T(1)),
        dw_(h_),
        budget_(std::max<int64_t>(dim_ / 2, kPieceBytes / (h_ * sizeof(T))) *
                at::get_num_threads()) {
    for (auto* part : {&alpha_, &beta_, &gamma_, &theta_}) part->reserve(h_);
    for (size_t i = 0; i < coefficients.size(); ++i) {
      std::vector<T>* parts[] = {&alpha_, &beta_, &gamma_, &theta_};
      const T* from = coefficients[i].template const_data_ptr<T>();
      parts[i % 4]->insert(parts[i % 4]->end(), from, from + w_);
    }
    dw_.eps = eps_dw;
    dw_.is_batch = is_training;
  }

  void set_dw(int64_t c, double mean, double variance) {
    dw_.set(c, norms_[2][c], norms_[3][c], 1, 0, mean, variance, mean);
  }

  // What follows the convolution.
  enum After { kNothing, kNormGelu, kNormGeluAdd };

  // Call `use(first, count)` for all tokens, as many at a time as a piece has.
  template <class Use>
  void each_run(int64_t tokens, const Use& use) const {
    for (int64_t at = 0; at < tokens; at += budget_) use(at, std::min(budget_, tokens - at));
  }

  // Call `use(first, count)`, in parallel, for shares of some tokens.
  template <class Use>
  void each_token(int64_t tokens, const Use& use) const {
    at::parallel_for(0, tokens, 16,
                     [&](int64_t from, int64_t until) { use(from, until - from); });
  }

  // z of some tokens.
  void map(int64_t first, int64_t tokens, T* z) const {
    multiply<T>({x_ + first * dim_, tokens, dim_, dim_}, w1_.t(), {z, tokens, w_, w_}, {b1_});
  }

  // gelu(alpha z + gamma) of all branches side by side, times a scale plus a shift.
  void activate(const T* z, int64_t tokens, const T* scale, const T* shift, T* out,
                int64_t stride) const {
    each_token(tokens, [&](int64_t from, int64_t count) {
      activate_some(z + from * w_, count, scale, shift, out + from * stride, stride);
    });
  }
  void activate_some(const T* z, int64_t tokens, const T* scale, const T* shift, T* out,
                     int64_t stride) const {
    for (int64_t c = 0; c < w_; c += kChannelBlock)
      for (int64_t branch = 0; branch < h_; branch += w_)
        walk_channels<T>(tokens, branch + c, branch + std::min(w_, c + kChannelBlock),
                         Activate<T>{z, w_, branch, alpha_.data(), gamma_.data(), scale, shift, out,
                                     stride});
  }

  // One line of the convolution, and of what follows it.
  struct Line {
    const Convolution<T>& conv;
    Rows<T> rows;
    int64_t width;
    const T *scale, *shift;  // null: the convolution alone
    bool is_added_to;        // whether the convolution's input is added behind the GELU
    T* out;
    int64_t stride;

    template <class L, int N>
    inline void run(int64_t x, int64_t begin, int64_t end) const {
      using V = typename L::V;
      const T* start[N];
      std::fill(start, start + N, conv.own.data());
      T* to = out + x * stride;
      convolve<L, N>(rows, conv, start, x, width, begin, end, to, stride);
      if (scale == nullptr) return;
      for (int64_t c = begin; c < end; c += L::width) {
        const V s = load<V>(scale + c), f = load<V>(shift + c);
        V value[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) value[i] = load<V>(to + i * stride + c) * s + f;
        gelu<T, L>(value);
        if (is_added_to)
#pragma GCC unroll 4
          for (int i = 0; i < N; ++i)
            value[i] += load<V>(rows.row[1] + (x + i) * rows.step[1] + c);
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) store(to + i * stride + c, value[i]);
      }
    }
  };

  // u of a piece from its n, or gelu(BN(u)), to which n may be added. `n` and `to` say where a
  // token lies, and the strides how far tokens are apart.
  template <class From, class To>
  void convolve_piece(const Piece& piece, const From& n, int64_t n_stride, const To& to,
                      int64_t stride, After after) const {
    layout_.each_line(piece.first, piece.last, [&](int64_t token, int64_t y) {
      walk_row<T>(layout_.size.width, h_,
                  Line{conv_,
                       Rows<T>(n(token), y, layout_.size, n_stride, zeros_.data()),
                       layout_.size.width,
                       after == kNothing ? nullptr : dw_.scale.data(), dw_.shift.data(),
                       after == kNormGeluAdd, to(token), stride});
    });
  }

  // W2 and b2.
  void project(const T* product, int64_t stride, int64_t tokens, const T* bias, T* y) const {
    multiply<T>({product, tokens, h_, stride}, w2_.t(), {y, tokens, out_dim_, out_dim_}, {bias});
  }

  const Layout layout_;
  const int64_t batch_, dim_, out_dim_, w_, h_;
  const bool is_training_;
  const T* const x_;
  const Matrix<const T> w1_, w2_;
  const T *const b1_, *const own_;
  const T* const norms_[4];
  const Convolution<T> conv_;
  const std::vector<T> zeros_, ones_;
  std::vector<T> alpha_, beta_, gamma_, theta_;
  Norm<T> dw_;
  const int64_t budget_;  // tokens of a piece
};

}  // namespace mixerlab
