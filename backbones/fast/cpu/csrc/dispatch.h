// Operators that call each other by way of torch, so that its profiler and others see them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace mixerlab {

template <class Signature>
c10::TypedOperatorHandle<Signature> operation(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Whether it stands for a batch of tensors: of gradients, where a whole Jacobian is asked for.
inline bool is_batched(const at::Tensor& tensor) {
  using c10::DispatchKey;
  const auto keys = tensor.key_set();
  return keys.has(DispatchKey::Batched) || keys.has(DispatchKey::FuncTorchBatched);
}

}  // namespace mixerlab

