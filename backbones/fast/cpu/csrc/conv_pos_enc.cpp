// x + DW(x) on maps (B, H, W, C), channels last, where no gradient is recorded: once over the map,
// which torch convolves in one pass and adds in another.

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "depthwise.h"

namespace mixerlab {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Numbers of a map that are worth a thread.
constexpr int64_t kShare = 1 << 15;

template <class T>
void encode(const T* x, int64_t images, MapSize size, const Convolution<T>& conv, T* out) {
  const std::vector<T> zeros(conv.h);
  const int64_t line = size.width * conv.h;
  const int64_t share = std::max<int64_t>(1, kShare / std::max<int64_t>(1, line));
  at::parallel_for(0, images * size.height, share, [&](int64_t from, int64_t until) {
    for (int64_t at = from; at < until; ++at) {
      const int64_t y = at % size.height;
      walk_row<T>(size.width, conv.h,
                  ConvolvedRow<T>{conv, Rows<T>(x + at * line, y, size, conv.h, zeros.data()),
                                  edges(y, size.height), size.width, out + at * line});
    }
  });
}

// x (B, H, W, C), kernel (C, 1, 3, 3) and bias (C).
Tensor conv_pos_enc(const Tensor& x, const Tensor& kernel, const OptionalTensor& bias) {
  TORCH_CHECK(x.dim() == 4 && x.is_contiguous(),
              "mixerlab::conv_pos_enc needs a contiguous map (B, H, W, C), got ", x.sizes());
  const int64_t channels = x.size(3);
  TORCH_CHECK(kernel.sizes() == at::IntArrayRef({channels, 1, 3, 3}) && kernel.is_contiguous() &&
                  (!bias || (bias->numel() == channels && bias->is_contiguous())),
              "mixerlab::conv_pos_enc needs a kernel (", channels, ", 1, 3, 3), got ",
              kernel.sizes(), ", and a bias of ", channels);
  TORCH_CHECK(kernel.scalar_type() == x.scalar_type() &&
                  (!bias || bias->scalar_type() == x.scalar_type()),
              "mixerlab::conv_pos_enc needs weights of ", x.scalar_type(), ", got ",
              kernel.scalar_type());
  Tensor out = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "conv_pos_enc", [&] {
    const MapSize size{x.size(1), x.size(2)};
    Convolution<scalar_t> conv(kernel.const_data_ptr<scalar_t>(), nullptr,
                               bias ? bias->const_data_ptr<scalar_t>() : nullptr, channels, size);
    // The map itself is what a 1 in the middle adds.
    for (int64_t c = 0; c < channels; ++c) conv.taps[4 * channels + c] += 1;
    encode<scalar_t>(x.const_data_ptr<scalar_t>(), x.size(0), size, conv,
                     out.mutable_data_ptr<scalar_t>());
  });
  return out;
}

}  // namespace
}  // namespace mixerlab

TORCH_LIBRARY_FRAGMENT(mixerlab, m) {
  m.def("conv_pos_enc(Tensor x, Tensor kernel, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(mixerlab, CPU, m) { m.impl("conv_pos_enc", &mixerlab::conv_pos_enc); }
