// How torch drives the device: current device and stream, events, synchronisation, pinned memory, generators.
#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace simdev {

namespace {

c10::Stream torch_stream(size_t id) {
  SIMDEV_LOCK();
  auto index = (c10::DeviceIndex)runtime().streams[id].device;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, index), (c10::StreamId)id);
}

int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

void set_device_checked(int index) {
  TORCH_CHECK(
      index >= 0 && index < runtime().device_count,
      "simulated device: invalid device ordinal ",
      index,
      " (there are ",
      runtime().device_count,
      ")");
  set_current_device(index);
}

// What a torch.Event owns; without a state until it is recorded.
struct EventHandle {
  EventPtr state;
};

EventPtr state_of(void* event) {
  return event ? ((EventHandle*)event)->state : nullptr;
}

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  SimGuard() = default;
  explicit SimGuard(c10::DeviceType) {}

  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::Device getDevice() const override {
    return {kDevice, (c10::DeviceIndex)current_device()};
  }
  void setDevice(c10::Device device) const override {
    if (device.has_index())
      set_device_checked(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index())
      set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return (c10::DeviceIndex)runtime().device_count;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }

  c10::Stream getStream(c10::Device device) const override {
    return torch_stream(current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return torch_stream(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    SIMDEV_LOCK();
    return torch_stream(new_stream(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int device = stream.device_index();
    auto previous = torch_stream(current_stream(device));
    set_current_stream(device, stream.id());
    return previous;
  }
  bool queryStream(const c10::Stream& stream) const override {
    SIMDEV_LOCK();
    auto& state = runtime().streams[stream.id()];
    if (state.queue.empty()) {
      host_learns(state.clock, 0);
      return true;
    }
    run_until(stream.id(), state.sequence); // so that a loop that polls comes to an end
    return false;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    SIMDEV_LOCK();
    runtime().counters["stream_syncs"]++;
    synchronize(stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    SIMDEV_LOCK();
    auto& r = runtime();
    r.counters["device_syncs"]++;
    for (size_t stream = 0; stream < r.streams.size(); stream++)
      if (r.streams[stream].device == device)
        synchronize(stream);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer, stream.id());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    SIMDEV_LOCK();
    if (!*event)
      *event = new EventHandle;
    ((EventHandle*)*event)->state = record_event(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    SIMDEV_LOCK();
    if (auto state = state_of(event))
      wait_event(stream.id(), state);
  }
  bool queryEvent(void* event) const override {
    SIMDEV_LOCK();
    auto state = state_of(event);
    if (!state)
      return true;
    if (state->done) {
      host_learns(state->clock, 0);
      return true;
    }
    run_until(state->stream, state->sequence);
    return false;
  }
  void synchronizeEvent(void* event) const override {
    SIMDEV_LOCK();
    runtime().counters["event_syncs"]++;
    if (auto state = state_of(event))
      host_wait(state);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    SIMDEV_LOCK();
    auto begin = state_of(first), end = state_of(second);
    TORCH_CHECK(begin && end, "both events must be recorded");
    return (end->time - begin->time) / 1e3;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    SIMDEV_LOCK();
    delete (EventHandle*)event;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

// A generator of the device draws from a CPU generator of its own, so that equal seeds give the CPU's
// numbers.
struct SimGenerator final : at::CPUGeneratorImpl {
  at::Generator cpu;

  explicit SimGenerator(int index) : cpu(at::detail::createCPUGenerator()) {
    device_ = c10::Device(kDevice, (c10::DeviceIndex)std::max(index, 0));
    key_set_ = c10::DispatchKeySet(kKey);
  }
  void set_current_seed(uint64_t seed) override {
    cpu.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    return cpu.current_seed();
  }
  uint64_t seed() override {
    return cpu.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
};

struct SimHooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return (c10::DeviceIndex)runtime().device_count;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return (c10::DeviceIndex)current_device();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_device_checked(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto previous = getCurrentDevice();
    setCurrentDevice(device);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device >= 0 ? exchangeDevice(device) : getCurrentDevice();
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &host_allocator();
  }
  bool isPinnedPtr(const void* pointer) const override {
    SIMDEV_LOCK();
    auto block = find_block(pointer);
    return block && block->is_host();
  }
  at::Device getDeviceFromPtr(void* pointer) const override {
    SIMDEV_LOCK();
    auto block = find_block(pointer);
    TORCH_CHECK(block && !block->is_host(), "simulated device: this is no pointer to device memory");
    return {kDevice, (c10::DeviceIndex)block->device};
  }
  at::Generator getNewGenerator(c10::DeviceIndex index = -1) const override {
    return at::make_generator<SimGenerator>(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex = -1) const override {
    static at::Generator generator = getNewGenerator(0);
    return generator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = device_allocator().allocate(bytes);
    if (size_t kept = std::min(bytes, storage.nbytes())) {
      SIMDEV_LOCK();
      void *to = fresh.get(), *from = storage.mutable_data();
      submit(
          current_stream(current_device()),
          kCompute,
          "storage_resize",
          runtime().settings.latency,
          (int64_t)kept,
          {use_of(from, kept, false), use_of(to, kept, true)},
          [=] { memcpy(to, from, kept); });
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

} // namespace

at::Generator cpu_generator(const at::Generator& generator) {
  return generator.get<SimGenerator>()->cpu;
}

void install_hooks() {
  c10::SetAllocator(kDevice, &device_allocator(), 10);
  at::setHostAllocator(kDevice, &host_allocator(), 10);
  if (!at::isPrivateUse1HooksRegistered())
    at::RegisterPrivateUse1HooksInterface(new SimHooks);
}

} // namespace simdev
