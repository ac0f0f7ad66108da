// y = x W^T + b by products of this room, for mixers between whose layers something else happens.
//
// The rows go in pieces that stay in the cache between the product and GELU. A gradient is
// differentiable again: then, and only then, it is made of torch's own products.

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "normal.h"
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
  return {tensor.const_data_ptr<T>(), tensor.numel() / std::max<int64_t>(columns, 1), columns,
          tensor.dim() == 2 ? tensor.stride(0) : columns};
}

// GELU of what is there, in place.
template <class T>
void apply_gelu(T* values, int64_t count) {
  const auto apply = [&]<class L, int N>(int64_t at) {
    typename L::V some[N];
    for (int i = 0; i < N; ++i) some[i] = load<typename L::V>(values + at + i * L::width);
    gelu<T, L>(some);
    for (int i = 0; i < N; ++i) store(values + at + i * L::width, some[i]);
  };
  at::parallel_for(0, count, 1 << 14, [&](int64_t begin, int64_t end) {
    constexpr int64_t four = 4 * Lanes<T>::width;
    int64_t i = begin;
    for (; i + four <= end; i += four) apply.template operator()<Lanes<T>, 4>(i);
    for (; i < end; ++i) apply.template operator()<One<T>, 1>(i);
  });
}

// out = left right, or out = bias + left right, or GELU of that, a piece of the rows after the other.
template <class T>
void multiply_rows(Matrix<const T> left, Matrix<const T> right, const T* bias, T* out,
                   bool with_gelu = false) {
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
    if (with_gelu) apply_gelu(to, (until - from) * columns);
  }
}

Tensor product(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
               bool with_gelu) {
  TORCH_CHECK(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1), "a weight of ",
              weight.sizes(), " cannot multiply ", x.sizes(), ", whose last axis should be its columns");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0)), "a bias of ",
              bias ? bias->sizes() : at::IntArrayRef(), " does not fit a weight of ", weight.sizes());
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  Tensor y = at::empty(sizes, x.options());
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "linear", [&] {
    multiply_rows<scalar_t>(rows_of<scalar_t>(x), rows_of<scalar_t>(weight).t(),
                            bias ? bias->const_data_ptr<scalar_t>() : nullptr,
                            y.mutable_data_ptr<scalar_t>(), with_gelu);
  });
  return y;
}

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  return product(x, weight, bias, false);
}

// For passes without gradients, which need neither what GELU is given nor its slope.
Tensor linear_gelu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  return product(x, weight, bias, true);
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

template <class Signature>
c10::TypedOperatorHandle<Signature> operation(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
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
      return one.dim() == 1 ? one.unsqueeze(0) : one.flatten(0, -2);
    };
    if (has_bias && ctx->needs_input_grad(2)) out[2] = rows(grads[0]).sum(0);
    if (at::GradMode::is_enabled()) {
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
  m.def("linear_gelu(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "linear_backward(Tensor grad, Tensor x, Tensor weight, bool needs_x, bool needs_weight) "
      "-> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(mixerlab, CPU, m) {
  m.impl("linear", &mixerlab::linear);
  m.impl("linear_gelu", &mixerlab::linear_gelu);
  m.impl("linear_backward", &mixerlab::linear_backward);
}

TORCH_LIBRARY_IMPL(mixerlab, Autograd, m) { m.impl("linear", &mixerlab::differentiable); }
