// Copies between the host and the device, and reading one element back.
#include "runtime.h"

#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace simdev {

namespace {
using at::Tensor;

constexpr double kPageableSlowdown = 2; // a pageable copy goes through a pinned buffer of the driver

void copy_on_device(const Tensor& src, const Tensor& dst) {
  TORCH_CHECK(src.device() == dst.device(), "simulated device: copies between devices are not simulated");
  SIMDEV_LOCK();
  auto& settings = runtime().settings;
  int64_t bytes = (int64_t)dst.nbytes();
  submit(
      current_stream(current_device()),
      kCompute,
      "copy_d2d",
      settings.latency + 2 * bytes / settings.mem_bw,
      bytes,
      {use_of(src, false), use_of(dst, true)},
      [from = cpu_alias(src), to = cpu_alias(dst)]() mutable { to.copy_(from); });
}

// One side is on the host; both are dense, with the same dtype and layout.
void copy_bytes(const Tensor& src, const Tensor& dst, bool non_blocking) {
  SIMDEV_LOCK();
  auto& r = runtime();
  bool upload = dst.device().type() == kDevice;
  int64_t bytes = dst.numel() * dst.element_size();
  const void* from = src.const_data_ptr();
  void* to = dst.mutable_data_ptr();
  bool pinned = find_pinned_range(upload ? from : to, bytes) != nullptr;

  std::string name = upload ? "h2d" : "d2h";
  double bandwidth = upload ? r.settings.h2d_bw : r.settings.d2h_bw;
  if (!pinned) {
    name += "_pageable";
    bandwidth /= kPageableSlowdown;
  }
  r.counters[name]++;
  r.counters[name + "_bytes"] += bytes;
  size_t stream = current_stream(current_device());
  submit(
      stream,
      upload ? kHostToDevice : kDeviceToHost,
      name,
      r.settings.latency + bytes / bandwidth,
      bytes,
      {use_of(src, false), use_of(dst, true)},
      [=] { memcpy(to, from, bytes); });
  if (!non_blocking || !pinned) {
    r.counters[upload ? "blocking_h2d" : "blocking_d2h"]++;
    synchronize(stream);
  }
}

// Whether equal indices are at equal offsets: the strides of dimensions of one element do not matter.
bool same_layout(const Tensor& one, const Tensor& other) {
  for (int64_t i = 0; i < one.dim(); i++)
    if (one.size(i) > 1 && one.stride(i) != other.stride(i))
      return false;
  return one.is_non_overlapping_and_dense();
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Tensor src = self.sizes() == dst.sizes() ? self : self.expand(dst.sizes());
  if (!dst.numel())
    return dst;
  bool from_device = src.device().type() == kDevice, to_device = dst.device().type() == kDevice;
  c10::DeviceGuard guard(to_device ? dst.device() : src.device());
  if (from_device && to_device) {
    copy_on_device(src, dst);
    return dst;
  }
  if (src.scalar_type() == dst.scalar_type() && same_layout(src, dst)) {
    copy_bytes(src, dst, non_blocking);
    return dst;
  }

  // As CUDA does: convert on the source's side, send contiguous bytes, lay them out on the other side.
  {
    SIMDEV_LOCK();
    runtime().counters["staged_copies"]++;
  }
  Tensor packed = src.to(dst.scalar_type()).contiguous();
  Tensor landing = dst.is_contiguous() ? dst : at::empty(dst.sizes(), dst.options());
  bool own_source = packed.is_same(src), own_target = landing.is_same(dst);
  copy_from(packed, landing, non_blocking && (to_device ? own_source : own_target));
  if (!own_target)
    const_cast<Tensor&>(dst).copy_(landing, true);
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  const_cast<Tensor&>(dst).copy_(self);
  return dst;
}

at::Scalar read_scalar(const Tensor& self) {
  SIMDEV_LOCK();
  auto& r = runtime();
  c10::DeviceGuard guard(self.device());
  size_t stream = current_stream(current_device());
  r.counters["item_syncs"]++;
  int64_t bytes = (int64_t)self.element_size();
  submit(stream, kDeviceToHost, "item", r.settings.latency, bytes, {use_of(self, false)}, [] {});
  synchronize(stream);
  PlainDispatch plain;
  return at::native::_local_scalar_dense_cpu(cpu_alias(self));
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read_scalar);
}

} // namespace simdev
