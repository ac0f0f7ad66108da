// A batch norm of beta g + theta, as what it is to g: one scale and shift per channel, and backwards.
#pragma once

#include <ATen/Parallel.h>

#include <cmath>
#include <vector>

#include "depthwise.h"
#include "rows.h"

namespace mixerlab {

// Mean and variance per channel of values that come by the piece.
template <class T>
class Moments {
 public:
  explicit Moments(int64_t h) : count_(0), mean_(h), squares_(h) {}

  // Add some tokens' channels, which lie `stride` apart. Sums are taken from a value near the mean.
  void add(const T* values, int64_t tokens, int64_t stride) {
    if (tokens == 0) return;
    const int64_t h = mean_.size(), blocks = (h + kChannelBlock - 1) / kChannelBlock;
    at::parallel_for(0, blocks, 1, [&](int64_t from, int64_t until) {
      std::vector<T> near(h), sum(h), square(h);
      for (int64_t block = from; block < until; ++block) {
        const int64_t begin = block * kChannelBlock, end = std::min(h, begin + kChannelBlock);
        const int64_t first = std::min<int64_t>(tokens, 8);
        for (int64_t token = 0; token < first; ++token)
          for (int64_t c = begin; c < end; ++c) near[c] += values[token * stride + c] / first;
        walk_channels<T>(tokens, begin, end,
                         Step{values, stride, near.data(), sum.data(), square.data()});
        for (int64_t c = begin; c < end; ++c) take(c, tokens, near[c], sum[c], square[c]);
      }
    });
    count_ += tokens;
  }

  double mean(int64_t c) const { return mean_[c]; }
  double variance(int64_t c) const { return squares_[c] / count_; }

 private:
  struct Step {
    const T* values;
    int64_t stride;
    const T* near;
    T *sum, *square;

    template <class L, int N>
    inline void run(int64_t x, int64_t begin, int64_t end) const {
      using V = typename L::V;
      for (int64_t c = begin; c < end; c += L::width) {
        V one = load<V>(sum + c), two = load<V>(square + c);
        const V centre = load<V>(near + c);
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
          const V value = load<V>(values + (x + i) * stride + c) - centre;
          one += value;
          two += value * value;
        }
        store(sum + c, one);
        store(square + c, two);
      }
    }
  };

  // Two sets of values make one: Chan, Golub and LeVeque, 1983.
  void take(int64_t c, double tokens, double near, double sum, double square) {
    const double shift = near + sum / tokens - mean_[c], all = count_ + tokens;
    squares_[c] += square - sum * sum / tokens + shift * shift * count_ * tokens / all;
    mean_[c] += shift * tokens / all;
  }

  double count_;
  std::vector<double> mean_, squares_;  // squares of the distance to the mean, summed
};

// weight (beta g + theta - mean) / sqrt(variance + eps) + bias = scale g + shift.
template <class T>
struct Norm {
  std::vector<T> scale, shift;
  std::vector<T> centre;  // a value that sums over g are taken from: its mean, or 0
  std::vector<double> weight, inverse, beta, offset;  // offset: beta centre + theta - mean
  double eps;
  bool is_batch;  // whether mean and variance are the batch's own

  Norm(int64_t h) : scale(h), shift(h), centre(h), weight(h), inverse(h), beta(h), offset(h) {}

  void set(int64_t c, double w, double bias, double b, double theta, double mean, double variance,
           double near) {
    weight[c] = w, beta[c] = b, centre[c] = near;
    inverse[c] = inverse_deviation(variance, eps);
    offset[c] = is_batch ? 0 : b * near + theta - mean;
    scale[c] = w * inverse[c] * b;
    shift[c] = bias + w * inverse[c] * (theta - mean);
  }
};

// The backward pass of a norm, from sums over all tokens: grad_g = a grad + b + c (g - centre).
template <class T>
struct NormBack {
  std::vector<T> a, b, c;
  std::vector<double> weight, bias, beta, theta;  // gradients

  // `sum` of the gradient and `product`, of gradient times (g - centre), over `tokens`.
  NormBack(const Norm<T>& norm, const std::vector<double>& sum, const std::vector<double>& product,
           double tokens)
      : a(sum.size()), b(a), c(a), weight(sum.size()), bias(sum), beta(weight), theta(weight) {
    for (size_t i = 0; i < sum.size(); ++i) {
      const double inner = norm.weight[i] * norm.inverse[i], own = norm.beta[i] * norm.inverse[i];
      weight[i] = own * product[i] + norm.inverse[i] * norm.offset[i] * sum[i];
      a[i] = inner * norm.beta[i];
      if (norm.is_batch) {
        b[i] = -inner * norm.beta[i] * sum[i] / tokens;
        c[i] = -inner * norm.beta[i] * own * own * product[i] / tokens;
        // 1 - beta^2 var(g) / (var + eps), without the difference.
        beta[i] = inner * product[i] * norm.eps * norm.inverse[i] * norm.inverse[i];
      } else {
        beta[i] = inner * (product[i] + norm.centre[i] * sum[i]);
        theta[i] = inner * sum[i];
      }
    }
  }
};

}  // namespace mixerlab
