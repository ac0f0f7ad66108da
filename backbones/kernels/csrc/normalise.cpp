// A batch norm in evaluation, in place: torch's is a new map, or five small operations.

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace mixerlab {
namespace {

using at::Tensor;

// y (..., C) = (y - mean) / sqrt(variance + eps) * weight + bias, of (C,) each.
void normalise_(const Tensor& y, const Tensor& weight, const Tensor& bias, const Tensor& mean,
                const Tensor& variance, double eps) {
  TORCH_CHECK(y.is_contiguous() && y.dim() > 0, "mixerlab::normalise_ needs a contiguous map");
  const int64_t channels = y.size(-1);
  for (const Tensor* part : {&weight, &bias, &mean, &variance})
    TORCH_CHECK(part->scalar_type() == y.scalar_type() && part->is_contiguous() &&
                    part->numel() == channels,
                "mixerlab::normalise_ needs ", channels, " numbers of ", y.scalar_type(), "; got ",
                part->sizes(), " of ", part->scalar_type());
  AT_DISPATCH_FLOATING_TYPES(y.scalar_type(), "normalise_", [&] {
    std::vector<scalar_t> scale(channels), shift(channels);
    const auto *w = weight.const_data_ptr<scalar_t>(), *b = bias.const_data_ptr<scalar_t>(),
               *m = mean.const_data_ptr<scalar_t>(), *v = variance.const_data_ptr<scalar_t>();
    for (int64_t c = 0; c < channels; ++c) {
      scale[c] = w[c] / std::sqrt(v[c] + static_cast<scalar_t>(eps));
      shift[c] = b[c] - m[c] * scale[c];
    }
    const int64_t tokens = channels ? y.numel() / channels : 0;
    const int64_t share = std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, channels));
    auto* data = y.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, tokens, share, [&](int64_t from, int64_t until) {
      const scalar_t *__restrict s = scale.data(), *__restrict f = shift.data();
      for (int64_t token = from; token < until; ++token) {
        scalar_t* __restrict to = data + token * channels;
        for (int64_t c = 0; c < channels; ++c) to[c] = to[c] * s[c] + f[c];
      }
    });
  });
}

}  // namespace
}  // namespace mixerlab

TORCH_LIBRARY_FRAGMENT(mixerlab, m) {
  m.def(
      "normalise_(Tensor(a!) y, Tensor weight, Tensor bias, Tensor mean, Tensor variance, float "
      "eps) -> ()");
}

TORCH_LIBRARY_IMPL(mixerlab, CPU, m) { m.impl("normalise_", &mixerlab::normalise_); }
