// Operators that deal in storage and metadata rather than values: allocation, views, resizing, `.data =`.
#include "runtime.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace simdev {

using at::Tensor;

// The same memory as a CPU tensor that owns nothing.
Tensor cpu_alias(const Tensor& tensor) {
  return at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()),
      tensor.sizes(),
      tensor.strides(),
      [](void*) {},
      tensor.options().device(at::kCPU));
}

Tensor new_strided(
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  c10::DispatchKeySet keys(kKey);
  return at::detail::empty_strided_generic(
      sizes, strides, &device_allocator(), keys, c10::dtype_or_default(dtype));
}

const Tensor& resize_tensor(
    const Tensor& self,
    c10::IntArrayRef sizes,
    std::optional<c10::MemoryFormat> memory_format) {
  auto* impl = self.unsafeGetTensorImpl();
  c10::Storage storage = impl->unsafe_storage();
  int64_t numel = 1;
  for (int64_t size : sizes)
    numel *= size;
  size_t bytes = (numel + impl->storage_offset()) * impl->itemsize();
  if (numel && bytes > storage.nbytes()) {
    c10::DeviceGuard guard(self.device());
    auto fresh = device_allocator().allocate(bytes);
    if (size_t kept = storage.nbytes()) {
      SIMDEV_LOCK();
      void *to = fresh.get(), *from = storage.mutable_data();
      submit(
          current_stream(current_device()),
          kCompute,
          "resize_",
          runtime().settings.latency,
          (int64_t)kept,
          {use_of(from, kept, false), use_of(to, kept, true)},
          [=] { memcpy(to, from, kept); });
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(sizes);
  auto format = memory_format.value_or(c10::MemoryFormat::Contiguous);
  if (format != c10::MemoryFormat::Contiguous && format != c10::MemoryFormat::Preserve)
    impl->empty_tensor_restride(format);
  return self;
}

namespace {

Tensor empty_memory_format(
    c10::IntArrayRef sizes,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> memory_format) {
  TORCH_CHECK(!pin_memory.value_or(false), "only CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  c10::DispatchKeySet keys(kKey);
  return at::detail::empty_generic(
      sizes, &device_allocator(), keys, c10::dtype_or_default(dtype), memory_format);
}

Tensor as_strided(
    const Tensor& self,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}
Tensor view(const Tensor& self, c10::IntArrayRef sizes) {
  return at::native::view(self, sizes);
}
Tensor reshape_alias(const Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}
Tensor& set_storage(Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}
Tensor& set_storage_offset(
    Tensor& self,
    at::Storage source,
    int64_t offset,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, source, offset, sizes, strides);
}
Tensor& set_empty(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, &device_allocator(), true);
  return at::native::set_storage_cpu_(self, storage, 0, {0}, {});
}

// Module.to() asks this to decide between `param.data =` and a new Parameter; on CUDA it is true.
bool has_compatible_shallow_copy_type(const Tensor&, const Tensor&) {
  return true;
}

void record_tensor_stream(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream.id());
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", new_strided);
  m.impl("resize_", resize_tensor);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_", set_empty);
  m.impl("record_stream", record_tensor_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

} // namespace simdev
