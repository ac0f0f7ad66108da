// y_g = W_g x_g + b: a product for each group, whose matrices are as small as a window's tokens.
//
// For passes without gradients: training takes torch's own products.

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "products.h"

namespace mixerlab {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// (G, M, K), (G, K, N) and (M) -> (G, M, N), contiguous all of them.
Tensor batched(const Tensor& left, const Tensor& right, const OptionalTensor& bias) {
  const int64_t groups = left.size(0), rows = left.size(1), depth = left.size(2),
                columns = right.size(2);
  TORCH_CHECK(right.size(0) == groups && right.size(1) == depth, "groups of ", left.sizes(),
              " cannot multiply ", right.sizes());
  TORCH_CHECK(!bias || bias->numel() == rows, "a bias of ",
              bias ? bias->sizes() : at::IntArrayRef(),
              " does not fit groups of ", left.sizes());
  Tensor out = at::empty({groups, rows, columns}, left.options());
  AT_DISPATCH_FLOATING_TYPES(left.scalar_type(), "batched", [&] {
    const auto* from = left.const_data_ptr<scalar_t>();
    const auto* with = right.const_data_ptr<scalar_t>();
    const auto* begin = bias ? bias->const_data_ptr<scalar_t>() : nullptr;
    auto* to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, groups, 1, [&](int64_t first, int64_t last) {
      for (int64_t group = first; group < last; ++group) {
        scalar_t* y = to + group * rows * columns;
        if (begin != nullptr)
          for (int64_t row = 0; row < rows; ++row)
            std::fill_n(y + row * columns, columns, begin[row]);
        multiply<scalar_t>({from + group * rows * depth, rows, depth, depth},
                           {with + group * depth * columns, depth, columns, columns},
                           {y, rows, columns, columns}, {begin ? y : nullptr, columns});
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace mixerlab

TORCH_LIBRARY_FRAGMENT(mixerlab, m) {
  m.def("batched(Tensor left, Tensor right, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(mixerlab, CPU, m) { m.impl("batched", &mixerlab::batched); }
