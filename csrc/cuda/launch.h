// Where and how kernels start: device, stream, error check.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "checks.h"

// torch's own check needs a symbol of libtorch_cuda, which this module must not link (see current_stream).
#define SYLVIE_CUDA_CHECK(call)                                              \
  do {                                                                       \
    const cudaError_t error = (call);                                        \
    SYLVIE_CHECK(error == cudaSuccess, "CUDA: ", cudaGetErrorString(error)); \
  } while (false)

namespace sylvie {

// The stream on which torch works now on this device.
//
// torch 2.10 to 2.12 tell it only through a function of libtorch_cuda. This module can not link that library:
// it is built, linked and load-tested where torch is a CPU build. Nor can it leave the symbol undefined, because
// Python opens torch's libraries with RTLD_LOCAL. So the function is taken from the library that is already in
// the process; RTLD_NOLOAD never brings a second one in. Whoever holds a CUDA tensor has loaded it.
inline cudaStream_t current_stream(int32_t device_index) {
  using Function = int32_t (*)(int32_t, void**);  // aoti_torch_get_current_cuda_stream of torch's C interface
  static const Function function = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* const symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<Function>(symbol);
  }();
  SYLVIE_CHECK(function != nullptr, "found no CUDA build of torch in this process");
  void* stream = nullptr;
  SYLVIE_CHECK(function(device_index, &stream) == 0, "torch has no current stream for cuda:", device_index);
  return static_cast<cudaStream_t>(stream);
}

// Makes a tensor's device the current one while it lives, and gives its stream.
class DeviceScope {
 public:
  explicit DeviceScope(const torch::stable::Tensor& tensor) : guard_(tensor.get_device_index()) {
    // The CUDA runtime is linked statically, so this module has its own copy: tell that one too. The guard puts
    // torch's device back, and with it the thread's context, which all copies follow.
    SYLVIE_CUDA_CHECK(cudaSetDevice(tensor.get_device_index()));
    stream_ = current_stream(tensor.get_device_index());
  }

  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace sylvie
