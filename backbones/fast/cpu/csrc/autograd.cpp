// The operators' gradients: what is kept, and which gradient is whose. In Python this would take as
// long as a small map does.

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <utility>

#include "dispatch.h"

namespace mixerlab {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

// Whether there is anything to do; an error where nothing was kept, or more is asked for.
bool has_work(const AutogradContext* ctx, const variable_list& grads, const Tensor& kept,
              const Tensor& tokens, const char* name) {
  if (!grads[0].defined()) return false;
  TORCH_CHECK(!at::GradMode::is_enabled(), "mixerlab::", name,
              " has no second derivative; compute what shall be differentiated twice under `with "
              "backbones.fast.switched_off():`");
  TORCH_CHECK(!is_batched(grads[0]), "mixerlab::", name,
              " has no gradients in many directions at once; compute what shall be differentiated so "
              "under `with backbones.fast.switched_off():`");
  TORCH_CHECK(kept.sym_size(0) == tokens.sym_size(0), "mixerlab::", name,
              " has no gradient where keep is false");
  return true;
}

Tensor of(const Tensor& parameter, const Tensor& value) {
  return parameter.defined() ? value : Tensor();
}
OptionalTensor maybe(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}
Tensor or_none(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }

// Taps (9, h) as a kernel (h, 1, 3, 3).
Tensor as_kernel(const Tensor& taps, const Tensor& kernel) {
  return taps.t().reshape_symint(kernel.sym_sizes());
}

struct Gated : torch::autograd::Function<Gated> {
  using Forward = std::tuple<Tensor, Tensor>(
      const Tensor&, c10::SymInt, c10::SymInt, c10::SymInt, at::TensorList, at::IntArrayRef,
      const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
      const OptionalTensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&, bool);
  using Backward = std::tuple<Tensor, std::vector<Tensor>, Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, c10::SymInt,
      at::TensorList, at::IntArrayRef, const OptionalTensor&, const OptionalTensor&, const Tensor&,
      const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&);

  // The operator without a gradient.
  template <class... Given>
  static std::tuple<Tensor, Tensor> plain(Given&&... given) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto call = operation<Forward>("mixerlab::gated_mixer");
    return call.call(std::forward<Given>(given)...);
  }

  static variable_list forward(AutogradContext* ctx, const Tensor& tokens, c10::SymInt prefix,
                               c10::SymInt height, c10::SymInt width, at::TensorList weights,
                               at::IntArrayRef blocks, const OptionalTensor& before_a,
                               const OptionalTensor& before_b, const Tensor& kernel_a,
                               const Tensor& kernel_b, const OptionalTensor& own_a,
                               const OptionalTensor& own_b, const Tensor& proj,
                               const OptionalTensor& proj_bias, bool keep) {
    auto [y, kept] = plain(tokens, prefix, height, width, weights, blocks, before_a, before_b,
                           kernel_a, kernel_b, own_a, own_b, proj, proj_bias, keep);
    variable_list saved{kept, tokens, or_none(before_a), or_none(before_b), kernel_a, kernel_b,
                        or_none(own_a), or_none(own_b), proj};
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["prefix"] = prefix;
    ctx->saved_data["height"] = height;
    ctx->saved_data["width"] = width;
    ctx->saved_data["blocks"] = blocks.vec();
    ctx->saved_data["has_bias"] = proj_bias.has_value();
    ctx->set_materialize_grads(false);
    ctx->mark_non_differentiable({kept});
    return {y, kept};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const std::vector<Tensor> weights(saved.begin() + 9, saved.end());
    const Tensor &kept = saved[0], &tokens = saved[1];
    variable_list out(14 + weights.size());
    if (!has_work(ctx, grads, kept, tokens, "gated_mixer")) return out;
    const Tensor grad = grads[0].contiguous();
    static const auto call = operation<Backward>("mixerlab::gated_mixer_backward");
    auto [grad_tokens, grad_weights, grad_before, grad_taps, grad_own, grad_proj] = call.call(
        grad, kept, tokens, ctx->saved_data["prefix"].toSymInt(),
        ctx->saved_data["height"].toSymInt(), ctx->saved_data["width"].toSymInt(), weights,
        ctx->saved_data["blocks"].toIntVector(), maybe(saved[2]), maybe(saved[3]), saved[4],
        saved[5], maybe(saved[6]), maybe(saved[7]), saved[8]);
    out[0] = grad_tokens;
    std::copy(grad_weights.begin(), grad_weights.end(), out.begin() + 4);
    auto* rest = &out[4 + weights.size()];
    rest[1] = of(saved[2], grad_before[0]), rest[2] = of(saved[3], grad_before[1]);
    rest[3] = as_kernel(grad_taps[0], saved[4]), rest[4] = as_kernel(grad_taps[1], saved[5]);
    rest[5] = of(saved[6], grad_own[0]), rest[6] = of(saved[7], grad_own[1]);
    rest[7] = grad_proj;
    if (ctx->saved_data["has_bias"].toBool()) rest[8] = grad.sum(at::IntArrayRef{0, 1});
    return out;
  }
};

struct Branched : torch::autograd::Function<Branched> {
  using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, c10::SymInt, c10::SymInt, const Tensor&, const Tensor&, at::TensorList,
      at::TensorList, at::TensorList, double, double, bool, const Tensor&, const Tensor&,
      const Tensor&, const Tensor&, bool);
  using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt,
      c10::SymInt, const Tensor&, const Tensor&, at::TensorList, at::TensorList, double, double,
      bool, const Tensor&, const Tensor&, const Tensor&);

  // The operator without a gradient.
  template <class... Given>
  static std::tuple<Tensor, Tensor, Tensor, Tensor> plain(Given&&... given) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto call = operation<Forward>("mixerlab::branched_mixer");
    return call.call(std::forward<Given>(given)...);
  }

  static variable_list forward(AutogradContext* ctx, const Tensor& tokens, c10::SymInt height,
                               c10::SymInt width, const Tensor& w1, const Tensor& b1,
                               at::TensorList coefficients, at::TensorList norms,
                               at::TensorList running, double eps_mid, double eps_dw, bool training,
                               const Tensor& kernel, const Tensor& own, const Tensor& w2,
                               const Tensor& b2, bool keep) {
    auto [y, z, u, statistics] =
        plain(tokens, height, width, w1, b1, coefficients, norms, running, eps_mid, eps_dw,
              training, kernel, own, w2, b2, keep);
    variable_list saved{z, u, statistics, tokens, w1, b1, kernel, own, w2};
    saved.insert(saved.end(), norms.begin(), norms.end());
    saved.insert(saved.end(), coefficients.begin(), coefficients.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["height"] = height;
    ctx->saved_data["width"] = width;
    ctx->saved_data["eps_mid"] = eps_mid;
    ctx->saved_data["eps_dw"] = eps_dw;
    ctx->saved_data["training"] = training;
    ctx->set_materialize_grads(false);
    ctx->mark_non_differentiable({z, u, statistics});
    return {y, z, u, statistics};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const std::vector<Tensor> norms(saved.begin() + 9, saved.begin() + 13);
    const std::vector<Tensor> coefficients(saved.begin() + 13, saved.end());
    const Tensor &z = saved[0], &tokens = saved[3], &w1 = saved[4], &kernel = saved[6];
    const size_t count = coefficients.size();
    variable_list out(21 + count);  // each argument of the forward pass, lists by the piece
    if (!has_work(ctx, grads, z, tokens, "branched_mixer")) return out;
    const Tensor grad = grads[0].contiguous();
    static const auto call = operation<Backward>("mixerlab::branched_mixer_backward");
    auto [grad_x, grad_w1, grad_b1, rows, grad_w2] = call.call(
        grad, z, saved[1], saved[2], tokens, ctx->saved_data["height"].toSymInt(),
        ctx->saved_data["width"].toSymInt(), w1, saved[5], coefficients, norms,
        ctx->saved_data["eps_mid"].toDouble(), ctx->saved_data["eps_dw"].toDouble(),
        ctx->saved_data["training"].toBool(), kernel, saved[7], saved[8]);
    out[0] = grad_x, out[3] = grad_w1, out[4] = grad_b1;
    const auto width = w1.sym_size(0);
    for (size_t i = 0; i < count; ++i)
      out[5 + i] = rows[i % 4].narrow_symint(0, width * static_cast<int64_t>(i / 4), width);
    for (int64_t i = 0; i < 4; ++i) out[5 + count + i] = rows[4 + i];
    auto* rest = &out[5 + count + 8 + 3];  // behind the norms' running statistics and three options
    rest[0] = as_kernel(rows.slice(0, 9), kernel), rest[1] = rows[8];
    rest[2] = grad_w2, rest[3] = grad.sum(at::IntArrayRef{0, 1});
    return out;
  }
};

struct Layered : torch::autograd::Function<Layered> {
  using Kept = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
  using Forward = Kept(
      const Tensor&, c10::SymInt, c10::SymInt, const Tensor&, const Tensor&, at::TensorList,
      at::TensorList, at::TensorList, double, double, bool, const Tensor&, const Tensor&,
      const Tensor&, const Tensor&, bool);
  using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
      const Tensor&, c10::SymInt, c10::SymInt, const Tensor&, const Tensor&, at::TensorList,
      at::TensorList, double, double, bool, const Tensor&, const Tensor&, const Tensor&);

  // The operator without a gradient.
  template <class... Given>
  static Kept plain(Given&&... given) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto call = operation<Forward>("mixerlab::layered_mixer");
    return call.call(std::forward<Given>(given)...);
  }

  static variable_list forward(AutogradContext* ctx, const Tensor& tokens, c10::SymInt height,
                               c10::SymInt width, const Tensor& w1, const Tensor& b1,
                               at::TensorList coefficients, at::TensorList norms,
                               at::TensorList running, double eps_mid, double eps_dw, bool training,
                               const Tensor& kernel, const Tensor& own, const Tensor& w2,
                               const Tensor& b2, bool keep) {
    auto [y, z, n, u, found, statistics] =
        plain(tokens, height, width, w1, b1, coefficients, norms, running, eps_mid, eps_dw,
              training, kernel, own, w2, b2, keep);
    variable_list saved{z, n, u, found, statistics, tokens, w1, b1, kernel, own, w2};
    saved.insert(saved.end(), norms.begin(), norms.end());
    saved.insert(saved.end(), coefficients.begin(), coefficients.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["height"] = height;
    ctx->saved_data["width"] = width;
    ctx->saved_data["eps_mid"] = eps_mid;
    ctx->saved_data["eps_dw"] = eps_dw;
    ctx->saved_data["training"] = training;
    ctx->set_materialize_grads(false);
    ctx->mark_non_differentiable({z, n, u, found, statistics});
    return {y, z, n, u, found, statistics};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const std::vector<Tensor> norms(saved.begin() + 11, saved.begin() + 15);
    const std::vector<Tensor> coefficients(saved.begin() + 15, saved.end());
    const Tensor &z = saved[0], &tokens = saved[5], &w1 = saved[6], &kernel = saved[8];
    const size_t count = coefficients.size();
    variable_list out(19 + count);  // each argument of the forward pass, lists by the piece
    if (!has_work(ctx, grads, z, tokens, "layered_mixer")) return out;
    const Tensor grad = grads[0].contiguous();
    static const auto call = operation<Backward>("mixerlab::layered_mixer_backward");
    auto [grad_x, grad_w1, grad_b1, rows, grad_w2] = call.call(
        grad, z, saved[1], saved[2], saved[3], saved[4], tokens,
        ctx->saved_data["height"].toSymInt(), ctx->saved_data["width"].toSymInt(), w1, saved[7],
        coefficients, norms,
        ctx->saved_data["eps_mid"].toDouble(), ctx->saved_data["eps_dw"].toDouble(),
        ctx->saved_data["training"].toBool(), kernel, saved[9], saved[10]);
    out[0] = grad_x, out[3] = grad_w1, out[4] = grad_b1;
    const auto width = w1.sym_size(0);
    for (size_t i = 0; i < count; ++i)
      out[5 + i] = rows[i % 4].narrow_symint(0, width * static_cast<int64_t>(i / 4), width);
    for (int64_t i = 0; i < 4; ++i) out[5 + count + i] = rows[4 + i];
    auto* rest = &out[5 + count + 6 + 3];  // behind the norms' running statistics and three options
    rest[0] = as_kernel(rows.slice(0, 9), kernel), rest[1] = rows[8];
    rest[2] = grad_w2, rest[3] = grad.sum(at::IntArrayRef{0, 1});
    return out;
  }
};

std::tuple<Tensor, Tensor> gated(const Tensor& tokens, c10::SymInt prefix, c10::SymInt height,
                                 c10::SymInt width, at::TensorList weights, at::IntArrayRef blocks,
                                 const OptionalTensor& before_a, const OptionalTensor& before_b,
                                 const Tensor& kernel_a, const Tensor& kernel_b,
                                 const OptionalTensor& own_a, const OptionalTensor& own_b,
                                 const Tensor& proj, const OptionalTensor& proj_bias, bool keep) {
  // What autograd would note costs as much as a small map.
  if (!at::GradMode::is_enabled())
    return Gated::plain(tokens, prefix, height, width, weights, blocks, before_a, before_b,
                        kernel_a, kernel_b, own_a, own_b, proj, proj_bias, keep);
  auto out = Gated::apply(tokens, prefix, height, width, weights, blocks, before_a, before_b,
                          kernel_a, kernel_b, own_a, own_b, proj, proj_bias, keep);
  return {out[0], out[1]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> branched(
    const Tensor& tokens, c10::SymInt height, c10::SymInt width, const Tensor& w1, const Tensor& b1,
    at::TensorList coefficients, at::TensorList norms, at::TensorList running, double eps_mid,
    double eps_dw, bool training, const Tensor& kernel, const Tensor& own, const Tensor& w2,
    const Tensor& b2, bool keep) {
  if (!at::GradMode::is_enabled())
    return Branched::plain(tokens, height, width, w1, b1, coefficients, norms, running, eps_mid,
                           eps_dw, training, kernel, own, w2, b2, keep);
  auto out = Branched::apply(tokens, height, width, w1, b1, coefficients, norms, running, eps_mid,
                             eps_dw, training, kernel, own, w2, b2, keep);
  return {out[0], out[1], out[2], out[3]};
}

Layered::Kept layered(
    const Tensor& tokens, c10::SymInt height, c10::SymInt width, const Tensor& w1, const Tensor& b1,
    at::TensorList coefficients, at::TensorList norms, at::TensorList running, double eps_mid,
    double eps_dw, bool training, const Tensor& kernel, const Tensor& own, const Tensor& w2,
    const Tensor& b2, bool keep) {
  if (!at::GradMode::is_enabled())
    return Layered::plain(tokens, height, width, w1, b1, coefficients, norms, running, eps_mid,
                           eps_dw, training, kernel, own, w2, b2, keep);
  auto out = Layered::apply(tokens, height, width, w1, b1, coefficients, norms, running, eps_mid,
                             eps_dw, training, kernel, own, w2, b2, keep);
  return {out[0], out[1], out[2], out[3], out[4], out[5]};
}

}  // namespace
}  // namespace mixerlab

TORCH_LIBRARY_IMPL(mixerlab, Autograd, m) {
  m.impl("gated_mixer", &mixerlab::gated);
  m.impl("branched_mixer", &mixerlab::branched);
  m.impl("layered_mixer", &mixerlab::layered);
}
