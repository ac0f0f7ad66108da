// Operators that call each other by way of torch, so that its profiler and others see them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace mixerlab {

template <class Signature>
c10::TypedOperatorHandle<Signature> operation(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace mixerlab
