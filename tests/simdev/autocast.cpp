// Autocast as on CUDA: torch's own lists of what runs in lower precision, in fp32, or in the widest dtype.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at::autocast {

#define SIMDEV_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIMDEV_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIMDEV_FP32_OPTIONAL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIMDEV_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIMDEV_LOWER_PRECISION)
  AT_FORALL_FP32(SIMDEV_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIMDEV_FP32_OPTIONAL)
  AT_FORALL_PROMOTE(SIMDEV_PROMOTE)
}

} // namespace at::autocast
