// y = W2 gelu(BN(DW(n))) + b2, n = BN(concat_i beta_i gelu(alpha_i z + gamma_i) + theta_i),
// z = W1 x + b1: IFFN.
//
// Where norms are affine maps and no gradient is asked for, a piece of the tokens goes through all
// steps while it is in the cache. Otherwise every norm asks for all tokens before the first can go
// on; kept for the backward pass are x, z, the convolution's output u and the statistics, and all
// else is computed again.

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <array>

#include "branches.h"

namespace mixerlab {
namespace {

// Rows of the statistics: a value near the mean of each activation, and both norms' own.
enum Statistic { kCentre, kMeanMid, kVarMid, kMeanDw, kVarDw, kStatistics };
template <class T>
using Statistics = std::array<const T*, kStatistics>;
// values * scale + shift.
template <class T>
struct Affine {
  const T *values, *scale, *shift;
  T* out;
  int64_t from_stride, stride;

  template <class L, int N>
  inline void run(int64_t x, int64_t begin, int64_t end) const {
    using V = typename L::V;
    for (int64_t c = begin; c < end; c += L::width) {
      const V s = load<V>(scale + c), f = load<V>(shift + c);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i)
        store(out + (x + i) * stride + c, load<V>(values + (x + i) * from_stride + c) * s + f);
    }
  }
};

// The sum of grad * (values - centre).
template <class T>
struct Dot {
  const T *grad, *values, *centre;
  int64_t stride;
  T* dot;

  template <class L, int N>
  inline void run(int64_t x, int64_t begin, int64_t end) const {
    using V = typename L::V;
    for (int64_t c = begin; c < end; c += L::width) {
      const V m = load<V>(centre + c);
      V two = load<V>(dot + c);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        const int64_t at = (x + i) * stride + c;
        two += load<V>(grad + at) * (load<V>(values + at) - m);
      }
      store(dot + c, two);
    }
  }
};

// From the gradient of a norm's output to that of z, of which a branch adds its share, and the sums
// that alpha and gamma want.
template <class T>
struct ActivateBack {
  const T* z;
  const T* grad;
  int64_t z_stride, stride, branch;
  const T *alpha, *gamma, *a, *b, *c, *centre;
  T* grad_z;
  int64_t out_stride;
  T *sum_alpha, *sum_gamma;

  template <class L, int N>
  inline void run(int64_t x, int64_t begin, int64_t end) const {
    using V = typename L::V;
    for (int64_t k = begin; k < end; k += L::width) {
      const V al = load<V>(alpha + k), ga = load<V>(gamma + k), ka = load<V>(a + k),
              kb = load<V>(b + k), kc = load<V>(c + k), m = load<V>(centre + k);
      V one = load<V>(sum_alpha + k), two = load<V>(sum_gamma + k);
      V in[N], value[N], slope[N];
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        in[i] = load<V>(z + (x + i) * z_stride + k - branch);
        value[i] = in[i] * al + ga;
      }
      gelu_and_slope<T, L>(value, slope);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) {
        const V before = load<V>(grad + (x + i) * stride + k) * ka + kb;
        const V g = (before + kc * (value[i] - m)) * slope[i];
        T* to = grad_z + (x + i) * out_stride + k - branch;
        store(to, branch ? load<V>(to) + g * al : g * al);
        one += g * in[i];
        two += g;
      }
      store(sum_alpha + k, one);
      store(sum_gamma + k, two);
    }
  }
};

// The operation on plain memory.
template <class T>
class BranchedMixer : Branches<T> {
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
  using Base::ones_;
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
  using Base::activate_some;
  using Base::convolve_piece;
  using Base::project;
  using Base::kNothing;
  using Base::kNormGelu;

 public:
  // `norms` are weight and bias of both. The rows of `statistics` are null before those of the
  // batch are known; `is_training` says whether they are the batch's, or the norms' running ones.
  BranchedMixer(const Tensor& tokens, MapSize size, const Tensor& w1, const Tensor& b1,
                at::TensorList coefficients, at::TensorList norms, double eps_mid, double eps_dw,
                bool is_training, const Tensor& kernel, const Tensor& own, const Tensor& w2,
                const Statistics<T>& statistics)
      : Base(tokens, size, w1, b1, coefficients, norms, eps_dw, is_training, kernel, own, w2),
        mid_(h_) {
    mid_.eps = eps_mid;
    mid_.is_batch = is_training;
    if (statistics[kMeanMid] == nullptr) return;
    for (int64_t c = 0; c < h_; ++c) {
      const auto of = [&](Statistic row) { return statistics[row] ? statistics[row][c] : T(0); };
      set_mid(c, of(kMeanMid), of(kVarMid), of(kCentre));
      set_dw(c, of(kMeanDw), of(kVarDw));
    }
  }

  // y where nothing is kept and no norm asks for the batch.
  void forward(const T* bias, T* y) const {
    Window<T> z(layout_.window(budget_), w_), n(layout_.window(budget_), h_ + kPadding),
        product(layout_.window(budget_), h_ + kPadding);
    layout_.each_piece(batch_, budget_, [&](const Piece& piece) {
      const int64_t start = piece.image * layout_.count(), fresh = piece.until - piece.fresh;
      n.slide(piece);
      map(start + piece.fresh, fresh, z.at(0));
      activate(z.at(0), fresh, mid_.scale.data(), mid_.shift.data(), n.at(piece.fresh), n.stride);
      convolve_piece(piece, [&](int64_t token) { return n.at(token); }, n.stride,
                     [&](int64_t token) { return product.at(token - piece.first); },
                     product.stride, kNormGelu);
      project(product.at(0), product.stride, piece.last - piece.first, bias,
              y + (start + piece.first) * out_dim_);
    });
  }

  // y, and for the backward pass z and u, (B, H W, w) and (B, H W, h), and the statistics.
  void forward(const T* bias, T* y, T* z, T* u, T* statistics) {
    const int64_t tokens = batch_ * layout_.count();
    Moments<T> moments(h_);
    each_run(tokens, [&](int64_t at, int64_t count) {
      map(at, count, z + at * w_);
      if (!is_training_) return;
      // u has room for what the convolution shall read.
      activate(z + at * w_, count, ones_.data(), zeros_.data(), u + at * h_, h_);
      moments.add(u + at * h_, count, h_);
    });
    if (is_training_)
      for (int64_t c = 0; c < h_; ++c) {
        const double mean = moments.mean(c), beta = beta_[c];
        set_mid(c, beta * mean + theta_[c], beta * beta * moments.variance(c), mean);
        statistics[kCentre * h_ + c] = mean;
        statistics[kMeanMid * h_ + c] = beta * mean + theta_[c];
        statistics[kVarMid * h_ + c] = beta * beta * moments.variance(c);
      }
    moments = Moments<T>(h_);
    Window<T> n(layout_.window(budget_), h_ + kPadding);
    layout_.each_piece(batch_, budget_, [&](const Piece& piece) {
      const int64_t start = piece.image * layout_.count(), fresh = piece.until - piece.fresh;
      n.slide(piece);
      const int64_t at = start + piece.fresh;
      if (is_training_)
        each_token(fresh, [&](int64_t from, int64_t count) {
          walk_row<T>(count, h_,
                      Affine<T>{u + (at + from) * h_, mid_.scale.data(), mid_.shift.data(),
                                n.at(piece.fresh + from), h_, n.stride});
        });
      else
        activate(z + at * w_, fresh, mid_.scale.data(), mid_.shift.data(), n.at(piece.fresh),
                 n.stride);
      convolve_piece(piece, [&](int64_t token) { return n.at(token); }, n.stride,
                     [&](int64_t token) { return u + (start + token) * h_; }, h_, kNothing);
      if (is_training_)
        moments.add(u + (start + piece.first) * h_, piece.last - piece.first, h_);
    });
    if (is_training_)
      for (int64_t c = 0; c < h_; ++c) {
        set_dw(c, moments.mean(c), moments.variance(c));
        statistics[kMeanDw * h_ + c] = moments.mean(c);
        statistics[kVarDw * h_ + c] = moments.variance(c);
      }
    Window<T> product(budget_, h_ + kPadding);
    each_run(tokens, [&](int64_t at, int64_t count) {
      each_token(count, [&](int64_t from, int64_t some) {
        walk_row<T>(some, h_,
                    NormGelu<T>{u + (at + from) * h_, dw_.scale.data(), dw_.shift.data(), nullptr,
                                product.at(from), h_, product.stride});
      });
      project(product.at(0), product.stride, count, bias, y + at * out_dim_);
    });
  }

  // All gradients, from that of y and what the forward pass kept.
  void backward(const T* grad_y, const T* z, const T* u, const Tensor& grad_x,
                const Tensor& grad_w1, const Tensor& grad_b1, const Tensor& per_channel,
                const Tensor& grad_w2) const {
    const int64_t tokens = batch_ * layout_.count();
    const int64_t blocks = (h_ + kChannelBlock - 1) / kChannelBlock;
    const auto options = grad_x.options();
    const Tensor memory = at::empty({tokens, h_}, options);
    T *grad_u = memory.mutable_data_ptr<T>(), *grad_n = grad_u;  // n's replaces u's, piece by piece
    std::vector<T> sum(h_), dot(h_);
    std::vector<double> sums(h_), dots(h_);
    const auto clear = [&] {
      std::fill(sum.begin(), sum.end(), T(0)), std::fill(dot.begin(), dot.end(), T(0));
    };
    const auto add_up = [&] {
      for (int64_t c = 0; c < h_; ++c) sums[c] += sum[c], dots[c] += dot[c];
    };
    const auto each_block = [&](const auto& use) {
      at::parallel_for(0, blocks, 1, [&](int64_t from, int64_t until) {
        use(from * kChannelBlock, std::min(h_, until * kChannelBlock));
      });
    };
    const auto row = [&](int index) { return per_channel[index].template mutable_data_ptr<T>(); };
    const auto put = [&](int index, const std::vector<double>& values) {
      std::copy(values.begin(), values.end(), row(index));
    };

    {  // W2 and GELU
      Window<T> product(budget_, h_ + kPadding), grad(budget_, h_ + kPadding);
      each_run(tokens, [&](int64_t at, int64_t count) {
        const Matrix<const T> out{grad_y + at * out_dim_, count, out_dim_, out_dim_};
        multiply<T>(out, w2_, {grad.at(0), count, h_, grad.stride});
        clear();
        each_block([&](int64_t begin, int64_t end) {
          for (int64_t c = begin; c < end; c += kChannelBlock)
            walk_channels<T>(
                count, c, std::min(end, c + kChannelBlock),
                NormGeluBack<T>{u + at * h_, dw_.scale.data(), dw_.shift.data(), dw_.centre.data(),
                                nullptr, grad.at(0), product.at(0), grad_u + at * h_, h_, grad.stride, grad.stride, h_,
                                sum.data(), dot.data()});
        });
        add_up();
        multiply_onto<T>(out.t(), {product.at(0), count, h_, product.stride},
                         {grad_w2.mutable_data_ptr<T>(), out_dim_, h_, h_});
      });
    }
    const NormBack<T> back_dw(dw_, sums, dots, tokens);
    put(kWeightDw, back_dw.weight), put(kBiasDw, back_dw.bias);

    // The convolution. Lines of n are made again, and of g, which is n before its norm.
    std::fill(sums.begin(), sums.end(), 0), std::fill(dots.begin(), dots.end(), 0);
    const int64_t width = layout_.size.width, threads = at::get_num_threads();
    std::vector<std::vector<T>> lines(threads, std::vector<T>(2 * width * h_)),
        dots_of(threads, std::vector<T>(h_));
    std::vector<double> taps(9 * h_), own(h_);
    Window<T> grad(layout_.window(budget_), h_ + kPadding);
    layout_.each_piece(batch_, budget_, [&](const Piece& piece) {
      const int64_t start = piece.image * layout_.count();
      grad.slide(piece);
      each_token(piece.until - piece.fresh, [&](int64_t from, int64_t count) {
        const int64_t at = (start + piece.fresh + from) * h_;
        walk_row<T>(count, h_,
                    Centred<T>{grad_u + at, u + at, h_, back_dw.a.data(), back_dw.b.data(),
                               back_dw.c.data(), dw_.centre.data(), grad.at(piece.fresh + from),
                               grad.stride});
      });
      std::vector<Sums<T>> parts(threads, Sums<T>(h_));
      for (auto& one : dots_of) std::fill(one.begin(), one.end(), T(0));
      layout_.each_line(piece.first, piece.last, [&](int64_t token, int64_t y) {
        const int64_t thread = at::get_thread_num(), at = start + token;
        T *g = lines[thread].data(), *n = g + width * h_;
        activate_some(z + at * w_, width, ones_.data(), zeros_.data(), g, h_);
        walk_row<T>(width, h_, Affine<T>{g, mid_.scale.data(), mid_.shift.data(), n, h_, h_});
        const Rows<T> rows(grad.at(token), y, layout_.size, grad.stride, zeros_.data());
        convolve_back(rows, n, h_, grad_n + at * h_, h_, conv_, width, parts[thread]);
        walk_row<T>(width, h_, Dot<T>{grad_n + at * h_, g, mid_.centre.data(), h_,
                                      dots_of[thread].data()});
      });
      for (int64_t thread = 0; thread < threads; ++thread)
        for (int64_t c = 0; c < h_; ++c) {
          sums[c] += parts[thread].before[c], dots[c] += dots_of[thread][c];
          own[c] += parts[thread].own[c];
          for (int64_t k = 0; k < 9; ++k) taps[k * h_ + c] += parts[thread].taps[k * h_ + c];
        }
    });
    const NormBack<T> back_mid(mid_, sums, dots, tokens);
    put(kWeightMid, back_mid.weight), put(kBiasMid, back_mid.bias);
    put(kBeta, back_mid.beta), put(kTheta, back_mid.theta);
    put(kOwn, own), put(kTaps, taps);

    // The branches and W1.
    std::fill(sums.begin(), sums.end(), 0), std::fill(dots.begin(), dots.end(), 0);
    Window<T> grad_z(budget_, w_);
    T* to_b1 = grad_b1.mutable_data_ptr<T>();
    std::vector<double> sum_b1(w_);
    each_run(tokens, [&](int64_t at, int64_t count) {
      clear();
      at::parallel_for(0, w_, kChannelBlock, [&](int64_t from, int64_t until) {
        for (int64_t c = from; c < until; c += kChannelBlock)
          for (int64_t branch = 0; branch < h_; branch += w_)
            walk_channels<T>(count, branch + c, branch + std::min(until, c + kChannelBlock),
                             ActivateBack<T>{z + at * w_, grad_n + at * h_, w_, h_, branch,
                                             alpha_.data(), gamma_.data(), back_mid.a.data(),
                                             back_mid.b.data(), back_mid.c.data(),
                                             mid_.centre.data(), grad_z.at(0), w_, sum.data(),
                                             dot.data()});
      });
      add_up();
      const Matrix<const T> grad{grad_z.at(0), count, w_, w_};
      multiply<T>(grad, w1_, {grad_x.mutable_data_ptr<T>() + at * dim_, count, dim_, dim_});
      multiply_onto<T>(grad.t(), {x_ + at * dim_, count, dim_, dim_},
                       {grad_w1.mutable_data_ptr<T>(), w_, dim_, dim_});
    });
    put(kAlpha, sums), put(kGamma, dots);
    for (int64_t branch = 0; branch < h_; branch += w_)
      for (int64_t c = 0; c < w_; ++c) sum_b1[c] += dots[branch + c] * alpha_[branch + c];
    std::copy(sum_b1.begin(), sum_b1.end(), to_b1);
  }

 private:
  void set_mid(int64_t c, double mean, double variance, double centre) {
    mid_.set(c, norms_[0][c], norms_[1][c], beta_[c], theta_[c], mean, variance, centre);
  }
  Norm<T> mid_;
};

// Where rows lie; those that are not there are null.
template <class T>
Statistics<T> rows_of(const std::vector<Tensor>& rows) {
  Statistics<T> out{};
  for (size_t i = 0; i < rows.size(); ++i)
    if (rows[i].defined()) out[i] = rows[i].const_data_ptr<T>();
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> branched_mixer(
    const Tensor& tokens, int64_t height, int64_t width, const Tensor& w1, const Tensor& b1,
    at::TensorList coefficients, at::TensorList norms, at::TensorList running, double eps_mid,
    double eps_dw, bool training, const Tensor& kernel, const Tensor& own, const Tensor& w2,
    const Tensor& b2, bool keep) {
  const int64_t batch = tokens.size(0), count = tokens.size(1), kept = keep ? batch : 0;
  TORCH_CHECK(keep || !training, "mixerlab::branched_mixer keeps what it computes in training");
  auto y = at::empty({batch, count, w2.size(0)}, tokens.options());
  auto z = at::empty({kept, count, w1.size(0)}, tokens.options());
  auto u = at::empty({kept, count, w2.size(1)}, tokens.options());
  auto statistics = at::empty({keep ? kStatistics : 0, w2.size(1)}, tokens.options());
  std::vector<Tensor> rows(kStatistics);  // of evaluation
  for (int64_t row = 0; !training && row < 4; ++row) {
    TORCH_CHECK(running[row].is_cpu() && running[row].numel() == w2.size(1),
                "mixerlab::branched_mixer needs running statistics of ", w2.size(1),
                " channels on the CPU; got ", running[row].sizes(), " on ", running[row].device());
    rows[kMeanMid + row] = running[row].to(tokens.scalar_type()).contiguous();
  }
  if (keep && !training) {  // for the backward pass
    statistics[kCentre].zero_();
    for (int64_t row = 0; row < 4; ++row) statistics[kMeanMid + row].copy_(rows[kMeanMid + row]);
  }
  AT_DISPATCH_FLOATING_TYPES(tokens.scalar_type(), "branched_mixer", [&] {
    BranchedMixer<scalar_t> mixer(tokens, {height, width}, w1, b1, coefficients, norms, eps_mid,
                                  eps_dw, training, kernel, own, w2,
                                  rows_of<scalar_t>(rows));
    const scalar_t* bias = b2.const_data_ptr<scalar_t>();
    if (keep)
      mixer.forward(bias, y.mutable_data_ptr<scalar_t>(), z.mutable_data_ptr<scalar_t>(),
                    u.mutable_data_ptr<scalar_t>(), statistics.mutable_data_ptr<scalar_t>());
    else
      mixer.forward(bias, y.mutable_data_ptr<scalar_t>());
  });
  return {y, z, u, statistics};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> branched_mixer_backward(
    const Tensor& grad, const Tensor& z, const Tensor& u, const Tensor& statistics,
    const Tensor& tokens, int64_t height, int64_t width, const Tensor& w1, const Tensor& b1,
    at::TensorList coefficients, at::TensorList norms, double eps_mid, double eps_dw, bool training,
    const Tensor& kernel, const Tensor& own, const Tensor& w2) {
  auto grad_x = at::empty_like(tokens), grad_w1 = at::zeros_like(w1), grad_b1 = at::empty_like(b1);
  auto per_channel = at::zeros({kPerChannel, w2.size(1)}, tokens.options());
  auto grad_w2 = at::zeros_like(w2);
  AT_DISPATCH_FLOATING_TYPES(tokens.scalar_type(), "branched_mixer_backward", [&] {
    const BranchedMixer<scalar_t> mixer(tokens, {height, width}, w1, b1, coefficients, norms,
                                        eps_mid, eps_dw, training, kernel, own, w2,
                                        rows_of<scalar_t>(statistics.unbind()));
    mixer.backward(grad.const_data_ptr<scalar_t>(), z.const_data_ptr<scalar_t>(),
                   u.const_data_ptr<scalar_t>(), grad_x, grad_w1, grad_b1, per_channel, grad_w2);
  });
  return {grad_x, grad_w1, grad_b1, per_channel, grad_w2};
}

}  // namespace
}  // namespace mixerlab

TORCH_LIBRARY_FRAGMENT(mixerlab, m) {
  m.def(
      "branched_mixer(Tensor tokens, SymInt height, SymInt width, Tensor w1, Tensor b1, "
      "Tensor[] coefficients, Tensor[] norms, Tensor[] running, float eps_mid, float eps_dw, "
      "bool training, Tensor kernel, Tensor own, Tensor w2, Tensor b2, bool keep) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "branched_mixer_backward(Tensor grad, Tensor z, Tensor u, Tensor statistics, Tensor tokens, "
      "SymInt height, SymInt width, Tensor w1, Tensor b1, Tensor[] coefficients, Tensor[] norms, "
      "float eps_mid, float eps_dw, bool training, Tensor kernel, Tensor own, Tensor w2) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(mixerlab, CPU, m) {
  m.impl("branched_mixer", &mixerlab::branched_mixer);
  m.impl("branched_mixer_backward", &mixerlab::branched_mixer_backward);
}
