// y = W2 (n + gelu(BN(DW(n)))) + b2, n = LN(concat_i beta_i gelu(alpha_i z + gamma_i) + theta_i),
// z = W1 x + b1: IFFN as its authors released it.
//
// A layer norm asks for one token at a time, so that a piece of the tokens goes on to the
// convolution while it is in the cache, and where that norm is an affine map, to the end. Kept for
// the backward pass are x, z, n, the convolution's output u, and what both norms found.

#include <ATen/Dispatch.h>
#include <torch/library.h>

#include "branches.h"
#include "rows.h"

namespace mixerlab {
namespace {

// The sum of some channels.
template <class T>
struct Total {
  const T* values;
  T sum;

  template <class L, int N>
  inline void run(int64_t c) {
    typename L::V all{};
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) all += load<typename L::V>(values + c + i * L::width);
    sum += total(all);
  }
};

// A token's channels after its layer norm, in their place.
template <class T>
struct Normalise {
  T* values;
  const T *weight, *bias;
  T mean, inverse;

  template <class L, int N>
  inline void run(int64_t c) {
    using V = typename L::V;
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      const int64_t at = c + i * L::width;
      const V normal = (load<V>(values + at) - mean) * inverse;
      store(values + at, normal * load<V>(weight + at) + load<V>(bias + at));
    }
  }
};

// The gradient of n, to which the shortcut's is added in its place; its sums over the channels,
// times the weight and times n without the bias, are what a layer norm's backward pass asks for.
template <class T>
struct NormSums {
  T* grad;
  const T *shortcut, *n, *weight, *bias;
  T sum, product;

  template <class L, int N>
  inline void run(int64_t c) {
    using V = typename L::V;
    V one{}, two{};
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      const int64_t at = c + i * L::width;
      const V value = load<V>(grad + at) + load<V>(shortcut + at);
      store(grad + at, value);
      one += value * load<V>(weight + at);
      two += value * (load<V>(n + at) - load<V>(bias + at));
    }
    sum += total(one);
    product += total(two);
  }
};

// Rows of the gradients that the branches and their layer norm add up over all tokens.
enum BranchSum { kSumAlpha, kSumBeta, kSumGamma, kSumTheta, kSumWeight, kSumBias, kBranchSums };

// From the gradient of n to that of z, of which a branch adds its share, and the sums.
template <class T>
struct LayerBack {
  const T *z, *grad;
  int64_t z_stride, stride, branch;
  const T *alpha, *beta, *gamma, *theta, *weight;
  const T *mean, *inverse, *sum, *product;  // of each token
  T* grad_z;
  T* sums;  // (kBranchSums, stride)

  template <class L, int N>
  inline void run(int64_t x, int64_t begin, int64_t end) const {
    using V = typename L::V;
    for (int64_t k = begin; k < end; k += L::width) {
      const V al = load<V>(alpha + k), be = load<V>(beta + k), ga = load<V>(gamma + k),
              th = load<V>(theta + k), w = load<V>(weight + k);
      V all[kBranchSums], in[N], value[N], slope[N];
#pragma GCC unroll 6
      for (int j = 0; j < kBranchSums; ++j) all[j] = load<V>(sums + j * stride + k);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        in[i] = load<V>(z + (x + i) * z_stride + k - branch);
        value[i] = in[i] * al + ga;
      }
      gelu_and_slope<T, L>(value, slope);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        const V g = load<V>(grad + (x + i) * stride + k);
        const V normal = (value[i] * be + th - mean[x + i]) * inverse[x + i];
        const V t = (g * w - sum[x + i] - normal * product[x + i]) * inverse[x + i];
        const V before = t * be * slope[i];
        T* to = grad_z + (x + i) * z_stride + k - branch;
        store(to, branch ? load<V>(to) + before * al : before * al);
        all[kSumAlpha] += before * in[i];
        all[kSumBeta] += t * value[i];
        all[kSumGamma] += before;
        all[kSumTheta] += t;
        all[kSumWeight] += g * normal;
        all[kSumBias] += g;
      }
#pragma GCC unroll 6
      for (int j = 0; j < kBranchSums; ++j) store(sums + j * stride + k, all[j]);
    }
  }
};

// The operation on plain memory.
template <class T>
class LayeredMixer : Branches<T> {
  using Base = Branches<T>;
  using Base::layout_;
  using Base::batch_;
  using Base::dim_;
  using Base::out_dim_;
  using Base::w_;
  using Base::h_;
  using Base::is_training_;
  using Base::x_;
  using Base::w1_;
  using Base::w2_;
  using Base::norms_;
  using Base::conv_;
  using Base::zeros_;
  using Base::alpha_;
  using Base::beta_;
  using Base::gamma_;
  using Base::theta_;
  using Base::dw_;
  using Base::budget_;
  using Base::set_dw;
  using Base::each_run;
  using Base::each_token;
  using Base::map;
  using Base::activate;
  using Base::convolve_piece;
  using Base::project;
  using Base::kNothing;
  using Base::kNormGeluAdd;

 public:
  // `mean` and `variance` are those of the norm behind the convolution; null before they are known.
  LayeredMixer(const Tensor& tokens, MapSize size, const Tensor& w1, const Tensor& b1,
               at::TensorList coefficients, at::TensorList norms, double eps_mid, double eps_dw,
               bool is_training, const Tensor& kernel, const Tensor& own, const Tensor& w2,
               const T* mean, const T* variance)
      : Base(tokens, size, w1, b1, coefficients, norms, eps_dw, is_training, kernel, own, w2),
        eps_(eps_mid) {
    if (mean != nullptr)
      for (int64_t c = 0; c < h_; ++c) set_dw(c, mean[c], variance[c]);
  }

  // y where nothing is kept and the norm behind the convolution does not ask for the batch.
  void forward(const T* bias, T* y) const {
    Window<T> z(layout_.window(budget_), w_), n(layout_.window(budget_), h_ + kPadding),
        product(layout_.window(budget_), h_ + kPadding);
    layout_.each_piece(batch_, budget_, [&](const Piece& piece) {
      const int64_t start = piece.image * layout_.count(), fresh = piece.until - piece.fresh;
      n.slide(piece);
      map(start + piece.fresh, fresh, z.at(0));
      activate(z.at(0), fresh, beta_.data(), theta_.data(), n.at(piece.fresh), n.stride);
      normalise(n.at(piece.fresh), fresh, n.stride, nullptr, nullptr);
      convolve_piece(piece, [&](int64_t token) { return n.at(token); }, n.stride,
                     [&](int64_t token) { return product.at(token - piece.first); },
                     product.stride, kNormGeluAdd);
      project(product.at(0), product.stride, piece.last - piece.first, bias,
              y + (start + piece.first) * out_dim_);
    });
  }

  // y, and for the backward pass z, n and u, (B, H W, w) and (B, H W, h), the layer norm's means
  // and inverse deviations (2, B, H W), and the other norm's mean and variance (2, h).
  void forward(const T* bias, T* y, T* z, T* n, T* u, T* found, T* statistics) {
    const int64_t tokens = batch_ * layout_.count();
    Moments<T> moments(h_);
    layout_.each_piece(batch_, budget_, [&](const Piece& piece) {
      const int64_t start = piece.image * layout_.count(), fresh = piece.until - piece.fresh;
      const int64_t at = start + piece.fresh;
      map(at, fresh, z + at * w_);
      activate(z + at * w_, fresh, beta_.data(), theta_.data(), n + at * h_, h_);
      normalise(n + at * h_, fresh, h_, found + at, found + tokens + at);
      convolve_piece(piece, [&](int64_t token) { return n + (start + token) * h_; }, h_,
                     [&](int64_t token) { return u + (start + token) * h_; }, h_, kNothing);
      if (is_training_)
        moments.add(u + (start + piece.first) * h_, piece.last - piece.first, h_);
    });
    if (is_training_)
      for (int64_t c = 0; c < h_; ++c) {
        set_dw(c, moments.mean(c), moments.variance(c));
        statistics[c] = moments.mean(c);
        statistics[h_ + c] = moments.variance(c);
      }
    Window<T> product(budget_, h_ + kPadding);
    each_run(tokens, [&](int64_t at, int64_t count) {
      each_token(count, [&](int64_t from, int64_t some) {
        walk_row<T>(some, h_,
                    NormGelu<T>{u + (at + from) * h_, dw_.scale.data(), dw_.shift.data(),
                                n + (at + from) * h_, product.at(from), h_, product.stride});
      });
      project(product.at(0), product.stride, count, bias, y + at * out_dim_);
    });
  }

  // All gradients, from that of y and what the forward pass kept.
  void backward(const T* grad_y, const T* z, const T* n, const T* u, const T* found,
                const Tensor& grad_x, const Tensor& grad_w1, const Tensor& grad_b1,
                const Tensor& per_channel, const Tensor& grad_w2) const {
    const int64_t tokens = batch_ * layout_.count();
    const auto options = grad_x.options();
    const Tensor memory = at::empty({2, tokens, h_}, options);
    T *grad_v = memory.mutable_data_ptr<T>(), *grad_u = grad_v + tokens * h_;
    T* grad_n = grad_u;  // n's replaces u's, piece by piece
    const auto row = [&](int index) { return per_channel[index].template mutable_data_ptr<T>(); };
    const auto put = [&](int index, const std::vector<double>& values) {
      std::copy(values.begin(), values.end(), row(index));
    };

    std::vector<double> sums(h_), dots(h_);
    {  // W2 and GELU
      std::vector<T> sum(h_), dot(h_);
      Window<T> product(budget_, h_ + kPadding);
      each_run(tokens, [&](int64_t at, int64_t count) {
        const Matrix<const T> out{grad_y + at * out_dim_, count, out_dim_, out_dim_};
        T* grad = grad_v + at * h_;
        multiply<T>(out, w2_, {grad, count, h_, h_});
        std::fill(sum.begin(), sum.end(), T(0)), std::fill(dot.begin(), dot.end(), T(0));
        each_block(h_, [&](int64_t begin, int64_t end) {
          walk_channels<T>(
              count, begin, end,
              NormGeluBack<T>{u + at * h_, dw_.scale.data(), dw_.shift.data(), dw_.centre.data(),
                              n + at * h_, grad, product.at(0), grad_u + at * h_, h_, h_,
                              product.stride, h_, sum.data(), dot.data()});
        });
        for (int64_t c = 0; c < h_; ++c) sums[c] += sum[c], dots[c] += dot[c];
        multiply_onto<T>(out.t(), {product.at(0), count, h_, product.stride},
                         {grad_w2.mutable_data_ptr<T>(), out_dim_, h_, h_});
      });
    }
    const NormBack<T> back_dw(dw_, sums, dots, tokens);
    put(kWeightDw, back_dw.weight), put(kBiasDw, back_dw.bias);

    // The convolution.
    std::vector<double> taps(9 * h_), own(h_);
    Window<T> window(layout_.window(budget_), h_ + kPadding);
    layout_.each_piece(batch_, budget_, [&](const Piece& piece) {
      const int64_t start = piece.image * layout_.count();
      window.slide(piece);
      each_token(piece.until - piece.fresh, [&](int64_t from, int64_t count) {
        const int64_t at = (start + piece.fresh + from) * h_;
        walk_row<T>(count, h_,
                    Centred<T>{grad_u + at, u + at, h_, back_dw.a.data(), back_dw.b.data(),
                               back_dw.c.data(), dw_.centre.data(),
                               window.at(piece.fresh + from), window.stride});
      });
      std::vector<Sums<T>> parts(at::get_num_threads(), Sums<T>(h_));
      layout_.each_line(piece.first, piece.last, [&](int64_t token, int64_t y) {
        const int64_t at = (start + token) * h_;
        const Rows<T> rows(window.at(token), y, layout_.size, window.stride, zeros_.data());
        convolve_back(rows, n + at, h_, grad_n + at, h_, conv_, layout_.size.width,
                      parts[at::get_thread_num()]);
      });
      for (const auto& part : parts)
        for (int64_t c = 0; c < h_; ++c) {
          own[c] += part.own[c];
          for (int64_t k = 0; k < 9; ++k) taps[k * h_ + c] += part.taps[k * h_ + c];
        }
    });
    put(kOwn, own), put(kTaps, taps);

    // The layer norm, the branches and W1.
    std::vector<T> some(kBranchSums * h_), of_token(2 * budget_);
    std::vector<std::vector<double>> all(kBranchSums, std::vector<double>(h_));
    Window<T> grad_z(budget_, w_);
    each_run(tokens, [&](int64_t at, int64_t count) {
      T *sum = of_token.data(), *product = sum + budget_;
      each_token(count, [&](int64_t from, int64_t part) {
        for (int64_t token = from; token < from + part; ++token) {
          const int64_t here = (at + token) * h_;
          NormSums<T> both{grad_n + here, grad_v + here, n + here, norms_[0], norms_[1], 0, 0};
          each_channel<T>(h_, both);
          sum[token] = both.sum / h_, product[token] = both.product / h_;
        }
      });
      std::fill(some.begin(), some.end(), T(0));
      each_block(w_, [&](int64_t begin, int64_t end) {
        for (int64_t branch = 0; branch < h_; branch += w_)
          walk_channels<T>(count, branch + begin, branch + end,
                           LayerBack<T>{z + at * w_, grad_n + at * h_, w_, h_, branch,
                                        alpha_.data(), beta_.data(), gamma_.data(), theta_.data(),
                                        norms_[0], found + at, found + tokens + at, sum, product,
                                        grad_z.at(0), some.data()});
      });
      for (int64_t j = 0; j < kBranchSums; ++j)
        for (int64_t c = 0; c < h_; ++c) all[j][c] += some[j * h_ + c];
      const Matrix<const T> grad{grad_z.at(0), count, w_, w_};
      multiply<T>(grad, w1_, {grad_x.mutable_data_ptr<T>() + at * dim_, count, dim_, dim_});
      multiply_onto<T>(grad.t(), {x_ + at * dim_, count, dim_, dim_},
                       {grad_w1.mutable_data_ptr<T>(), w_, dim_, dim_});
    });
    put(kAlpha, all[kSumAlpha]), put(kBeta, all[kSumBeta]);
    put(kGamma, all[kSumGamma]), put(kTheta, all[kSumTheta]);
    put(kWeightMid, all[kSumWeight]), put(kBiasMid, all[kSumBias]);
    std::vector<double> of_b1(w_);
    for (int64_t c = 0; c < h_; ++c) of_b1[c % w_] += all[kSumGamma][c] * alpha_[c];
    std::copy(of_b1.begin(), of_b1.end(), grad_b1.mutable_data_ptr<T>());
  }

 private:
  // Call `use(begin, end)`, in parallel, for all blocks of some channels.
  template <class Use>
  static void each_block(int64_t channels, const Use& use) {
    at::parallel_for(0, channels, kChannelBlock, [&](int64_t from, int64_t until) {
      for (int64_t c = from; c < until; c += kChannelBlock)
        use(c, std::min(until, c + kChannelBlock));
    });
  }

  // Apply the layer norm to some tokens in place; note what it found where that is wanted.
  void normalise(T* n, int64_t tokens, int64_t stride, T* means, T* inverses) const {
    each_token(tokens, [&](int64_t from, int64_t count) {
      for (int64_t token = from; token < from + count; ++token) {
        T* own = n + token * stride;
        Total<T> all{own, 0};
        each_channel<T>(h_, all);
        Squares<T> squares{own, all.sum / h_, 0};
        each_channel<T>(h_, squares);
        Normalise<T> norm{own, norms_[0], norms_[1], squares.mean,
                          inverse_deviation(squares.sum / h_, eps_)};
        each_channel<T>(h_, norm);
        if (means != nullptr) means[token] = norm.mean, inverses[token] = norm.inverse;
      }
    });
  }

  const T eps_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> layered_mixer(
    const Tensor& tokens, int64_t height, int64_t width, const Tensor& w1, const Tensor& b1,
    at::TensorList coefficients, at::TensorList norms, at::TensorList running, double eps_mid,
    double eps_dw, bool training, const Tensor& kernel, const Tensor& own, const Tensor& w2,
    const Tensor& b2, bool keep) {
  const int64_t batch = tokens.size(0), count = tokens.size(1), kept = keep ? batch : 0;
  const int64_t h = w2.size(1);
  TORCH_CHECK(keep || !training, "mixerlab::layered_mixer keeps what it computes in training");
  auto y = at::empty({batch, count, w2.size(0)}, tokens.options());
  auto z = at::empty({kept, count, w1.size(0)}, tokens.options());
  auto n = at::empty({kept, count, h}, tokens.options()), u = at::empty_like(n);
  auto found = at::empty({2, kept, count}, tokens.options());
  auto statistics = at::empty({2, h}, tokens.options());
  for (int64_t row = 0; !training && row < 2; ++row) {
    TORCH_CHECK(running[row].is_cpu() && running[row].numel() == h,
                "mixerlab::layered_mixer needs running statistics of ", h,
                " channels on the CPU; got ", running[row].sizes(), " on ", running[row].device());
    statistics[row].copy_(running[row]);
  }
  AT_DISPATCH_FLOATING_TYPES(tokens.scalar_type(), "layered_mixer", [&] {
    scalar_t* both = statistics.mutable_data_ptr<scalar_t>();
    LayeredMixer<scalar_t> mixer(tokens, {height, width}, w1, b1, coefficients, norms, eps_mid,
                                 eps_dw, training, kernel, own, w2, training ? nullptr : both,
                                 both + h);
    const scalar_t* bias = b2.const_data_ptr<scalar_t>();
    if (keep)
      mixer.forward(bias, y.mutable_data_ptr<scalar_t>(), z.mutable_data_ptr<scalar_t>(),
                    n.mutable_data_ptr<scalar_t>(), u.mutable_data_ptr<scalar_t>(),
                    found.mutable_data_ptr<scalar_t>(), both);
    else
      mixer.forward(bias, y.mutable_data_ptr<scalar_t>());
  });
  return {y, z, n, u, found, statistics};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> layered_mixer_backward(
    const Tensor& grad, const Tensor& z, const Tensor& n, const Tensor& u, const Tensor& found,
    const Tensor& statistics, const Tensor& tokens, int64_t height, int64_t width, const Tensor& w1,
    const Tensor& b1, at::TensorList coefficients, at::TensorList norms, double eps_mid,
    double eps_dw, bool training, const Tensor& kernel, const Tensor& own, const Tensor& w2) {
  auto grad_x = at::empty_like(tokens), grad_w1 = at::zeros_like(w1), grad_b1 = at::empty_like(b1);
  auto per_channel = at::zeros({kPerChannel, w2.size(1)}, tokens.options());
  auto grad_w2 = at::zeros_like(w2);
  AT_DISPATCH_FLOATING_TYPES(tokens.scalar_type(), "layered_mixer_backward", [&] {
    const scalar_t* both = statistics.const_data_ptr<scalar_t>();
    const LayeredMixer<scalar_t> mixer(tokens, {height, width}, w1, b1, coefficients, norms,
                                       eps_mid, eps_dw, training, kernel, own, w2, both,
                                       both + w2.size(1));
    mixer.backward(grad.const_data_ptr<scalar_t>(), z.const_data_ptr<scalar_t>(),
                   n.const_data_ptr<scalar_t>(), u.const_data_ptr<scalar_t>(),
                   found.const_data_ptr<scalar_t>(), grad_x, grad_w1, grad_b1, per_channel,
                   grad_w2);
  });
  return {grad_x, grad_w1, grad_b1, per_channel, grad_w2};
}

}  // namespace
}  // namespace mixerlab

TORCH_LIBRARY_FRAGMENT(mixerlab, m) {
  m.def(
      "layered_mixer(Tensor tokens, SymInt height, SymInt width, Tensor w1, Tensor b1, "
      "Tensor[] coefficients, Tensor[] norms, Tensor[] running, float eps_mid, float eps_dw, "
      "bool training, Tensor kernel, Tensor own, Tensor w2, Tensor b2, bool keep) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "layered_mixer_backward(Tensor grad, Tensor z, Tensor n, Tensor u, Tensor found, "
      "Tensor statistics, Tensor tokens, SymInt height, SymInt width, Tensor w1, Tensor b1, "
      "Tensor[] coefficients, Tensor[] norms, float eps_mid, float eps_dw, bool training, "
      "Tensor kernel, Tensor own, Tensor w2) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(mixerlab, CPU, m) {
  m.impl("layered_mixer", &mixerlab::layered_mixer);
  m.impl("layered_mixer_backward", &mixerlab::layered_mixer_backward);
}
