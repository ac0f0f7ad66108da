// y = x W^T + b by products of this room, for mixers between whose layers something else happens.
//
// A gradient is differentiable again: then, and only then, it is made of torch's own products.

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "dispatch.h"
#include "products.h"

namespace mixerlab {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

// Bytes of x and y in a piece, per thread: half of a second-level cache.
constexpr int64_t kPieceBytes = 1 << 19;
constexpr int64_t kFewestRows = 512;

// All but the last axis as rows: of a contiguous tensor, or of some columns of a matrix.
template <class T>
Matrix<const T> rows_of(const Tensor& tensor) {
  const int64_t columns = tensor.size(-1);
  int64_t rows = 1;
  for (int64_t axis = 0; axis + 1 < tensor.dim(); ++axis) rows *= tensor.size(axis);
  // The stride of a single row may be any number.
  const bool lies_apart = tensor.dim() == 2 && rows > 1;
  return {tensor.const_data_ptr<T>(), rows, columns, lies_apart ? tensor.stride(0) : columns};
}

// out = left right, or out = bias + left right, a piece of the rows after the other.
template <class T>
void multiply_rows(Matrix<const T> left, Matrix<const T> right, const T* bias, T* out) {
  const int64_t columns = right.width();
  const int64_t bytes = sizeof(T) * std::max<int64_t>(left.columns + columns, 1);
  // Each piece brings the right matrix into another order, which few rows are not worth.
  const int64_t most = std::max<int64_t>(kPieceBytes / bytes, kFewestRows) * at::get_num_threads();
  const int64_t pieces = (left.rows + most - 1) / most;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t from = left.rows * piece / pieces, until = left.rows * (piece + 1) / pieces;
    T* to = out + from * columns;
    multiply<T>({left.data + from * left.stride, until - from, left.columns, left.stride}, right,
                {to, until - from, columns, columns}, {bias});
  }
}

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1), "a weight of ",
              weight.sizes(), " cannot multiply ", x.sizes(),
              ", whose last axis should be its columns");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0)), "a bias of ",
              bias ? bias->sizes() : at::IntArrayRef(), " does not fit a weight of ",
              weight.sizes());
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  Tensor y = at::empty(sizes, x.options());
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "linear", [&] {
    multiply_rows<scalar_t>(rows_of<scalar_t>(x), rows_of<scalar_t>(weight).t(),
                            bias ? bias->const_data_ptr<scalar_t>() : nullptr,
                            y.mutable_data_ptr<scalar_t>());
  });
  return y;
}

// Gradients of x and of the weight; one that nobody needs is empty.
std::tuple<Tensor, Tensor> linear_backward(const Tensor& grad, const Tensor& x,
                                           const Tensor& weight, bool needs_x, bool needs_weight) {
  Tensor grad_x = at::empty(needs_x ? x.sizes() : at::IntArrayRef{0}, x.options());
  Tensor grad_weight = at::empty(needs_weight ? weight.sizes() : at::IntArrayRef{0}, x.options());
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "linear_backward", [&] {
    const auto rows = rows_of<scalar_t>(grad);
    if (needs_x)
      multiply_rows<scalar_t>(rows, rows_of<scalar_t>(weight), nullptr,
                              grad_x.mutable_data_ptr<scalar_t>());
    if (needs_weight)
      multiply<scalar_t>(rows.t(), rows_of<scalar_t>(x),
                         {grad_weight.mutable_data_ptr<scalar_t>(), weight.size(0), weight.size(1),
                          weight.size(1)});
  });
  return {grad_x, grad_weight};
}

struct Linear : torch::autograd::Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value();  // one that is not there has no number below
    static const auto call =
        operation<Tensor(const Tensor&, const Tensor&, const OptionalTensor&)>("mixerlab::linear");
    return call.call(x, weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return {Tensor(), Tensor(), Tensor()};
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1];
    const bool needs_x = ctx->needs_input_grad(0), needs_weight = ctx->needs_input_grad(1);
    variable_list out(3);
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    const auto rows = [](const Tensor& one) {
      const auto sizes = one.sizes().slice(0, one.dim() - 1);
      return one.reshape({c10::multiply_integers(sizes), one.size(-1)});
    };
    if (has_bias && ctx->needs_input_grad(2)) out[2] = rows(grads[0]).sum(0);
    if (at::GradMode::is_enabled() || is_batched(grads[0])) {
      if (needs_x) out[0] = grads[0].matmul(weight);
      if (needs_weight) out[1] = rows(grads[0]).t().matmul(rows(x));
      return out;
    }
    static const auto call = operation<std::tuple<Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, bool, bool)>("mixerlab::linear_backward");
    const auto [grad_x, grad_weight] =
        call.call(grads[0].contiguous(), x, weight, needs_x, needs_weight);
    if (needs_x) out[0] = grad_x;
    if (needs_weight) out[1] = grad_weight;
    return out;
  }
};

Tensor differentiable(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  return Linear::apply(x, weight, bias);
}

}  // namespace
}  // namespace mixerlab

TORCH_LIBRARY_FRAGMENT(mixerlab, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "linear_backward(Tensor grad, Tensor x, Tensor weight, bool needs_x, bool needs_weight) "
      "-> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(mixerlab, CPU, m) {
  m.impl("linear", &mixerlab::linear);
  m.impl("linear_backward", &mixerlab::linear_backward);
}

TORCH_LIBRARY_IMPL(mixerlab, Autograd, m) { m.impl("linear", &mixerlab::differentiable); }
