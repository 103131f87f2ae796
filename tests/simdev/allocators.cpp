// Device memory with a capacity and exact accounting, and pinned host memory with a limit. Both are NaN in
// every float type until written; device memory is so again once it is freed.
#include "runtime.h"

#include <cstring>

namespace simdev {

namespace {
constexpr size_t kRound = 512; // as the CUDA caching allocator
constexpr int kPoison = 0xFF; // all bits set is a NaN in fp8 e4m3 and e5m2, fp16, bf16, fp32 and fp64
constexpr size_t kAggregate = 0;

void ignore(void*) {}

size_t power_of_two_at_least(size_t bytes) {
  size_t power = 1;
  while (power < bytes)
    power *= 2;
  return power;
}

// Gives back the memory whose recorded streams are through; waits for them if `block`.
void finish_deferred_frees(bool block) {
  auto& r = runtime();
  decltype(r.deferred_frees) rest;
  for (auto& [memory, events] : r.deferred_frees) {
    bool done = true;
    for (auto& event : events) {
      if (block && !event->done)
        host_wait(event);
      done &= event->done;
    }
    if (done)
      r.stats[memory->device].active_bytes[kAggregate].decrease(memory->size);
    else
      rest.emplace_back(memory, events);
  }
  r.deferred_frees.swap(rest);
}

void free_device_memory(void* context) {
  std::unique_ptr<BlockPtr> owner((BlockPtr*)context);
  SIMDEV_LOCK();
  auto& r = runtime();
  BlockPtr block = *owner;
  auto& stats = r.stats[block->device];
  stats.allocated_bytes[kAggregate].decrease(block->size);
  stats.requested_bytes[kAggregate].decrease(block->requested);
  stats.allocation[kAggregate].decrease(1);
  stats.active[kAggregate].decrease(1);
  stats.num_device_free++;

  size_t home = block->home_stream;
  Clock known = r.streams[home].clock;
  join(known, r.host_clock);
  check_free(*block, known);

  std::vector<EventPtr> events;
  for (size_t stream : block->recorded_streams)
    if (stream != home)
      events.push_back(record_event(stream));
  for (auto& event : events)
    if (!event->done)
      r.streams[home].queue.push_back({++r.streams[home].sequence, nullptr, event, nullptr});
  enqueue(home, [block] { memset(block->base, kPoison, block->size); });
  if (events.empty())
    stats.active_bytes[kAggregate].decrease(block->size);
  else
    r.deferred_frees.emplace_back(block, events);
}

void free_pinned_memory(void* context) {
  // A queued copy keeps the block: as with CUDA's pinned pool, freeing it early is no error.
  std::unique_ptr<BlockPtr> owner((BlockPtr*)context);
  SIMDEV_LOCK();
  discharge_pinned(**owner);
}

struct SimDeviceAllocator final : c10::DeviceAllocator {
  using DeviceStats = c10::CachingDeviceAllocator::DeviceStats;

  at::DataPtr allocate(size_t bytes) override {
    int device = current_device();
    c10::Device where(kDevice, (c10::DeviceIndex)device);
    if (!bytes)
      return {nullptr, nullptr, &ignore, where};
    SIMDEV_LOCK();
    auto& r = runtime();
    auto& stats = r.stats[device];
    size_t size = (bytes + kRound - 1) / kRound * kRound;
    reserve(stats, bytes, size);

    auto block = std::make_shared<Block>();
    block->requested = bytes;
    block->size = size;
    block->device = device;
    block->home_stream = current_stream(device);
    map_block(block);
    memset(block->base, kPoison, size);

    stats.allocated_bytes[kAggregate].increase(size);
    stats.active_bytes[kAggregate].increase(size);
    stats.requested_bytes[kAggregate].increase(bytes);
    stats.allocation[kAggregate].increase(1);
    stats.active[kAggregate].increase(1);
    stats.num_device_alloc++;
    auto& reserved = stats.reserved_bytes[kAggregate];
    int64_t active = stats.active_bytes[kAggregate].current;
    if (reserved.current < active)
      reserved.increase(active - reserved.current);
    return {block->base, new BlockPtr(block), &free_device_memory, where};
  }

  at::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* dest, const void* src, size_t bytes) const override {
    SIMDEV_LOCK();
    for (size_t stream = 0; stream < runtime().streams.size(); stream++)
      synchronize(stream);
    memcpy(dest, src, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    SIMDEV_LOCK();
    finish_deferred_frees(true);
    for (auto& stats : runtime().stats) {
      auto& reserved = stats.reserved_bytes[kAggregate];
      reserved.decrease(reserved.current - stats.active_bytes[kAggregate].current);
    }
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_stream(pointer, stream.id());
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    SIMDEV_LOCK();
    return runtime().stats.at(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    SIMDEV_LOCK();
    size_t total = (size_t)runtime().settings.capacity;
    size_t active = runtime().stats.at(device).active_bytes[kAggregate].current;
    return {total > active ? total - active : 0, total};
  }

 private:
  static void reserve(DeviceStats& stats, size_t bytes, size_t size) {
    auto& r = runtime();
    size_t capacity = (size_t)r.settings.capacity;
    auto fits = [&] { return stats.active_bytes[kAggregate].current + size <= capacity; };
    finish_deferred_frees(false);
    if (!fits()) {
      r.counters["alloc_retries"]++;
      stats.num_alloc_retries++;
      finish_deferred_frees(true);
    }
    if (fits())
      return;
    stats.num_ooms++;
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        false,
        "simulated device out of memory. Tried to allocate ",
        bytes,
        " bytes; capacity ",
        capacity,
        ", allocated ",
        stats.allocated_bytes[kAggregate].current,
        ", active ",
        stats.active_bytes[kAggregate].current);
  }

  template <class F>
  static void for_each_stat(c10::DeviceIndex device, F change) {
    SIMDEV_LOCK();
    auto& stats = runtime().stats.at(device);
    for (auto* stat :
         {&stats.allocated_bytes,
          &stats.active_bytes,
          &stats.reserved_bytes,
          &stats.requested_bytes,
          &stats.allocation,
          &stats.active})
      change((*stat)[kAggregate]);
  }
};

struct SimHostAllocator final : at::HostAllocator {
  at::DataPtr allocate(size_t bytes) override {
    if (!bytes)
      return {nullptr, nullptr, &ignore, at::Device(at::kCPU)};
    SIMDEV_LOCK();
    auto& r = runtime();
    TORCH_CHECK(
        !pin_would_exceed(bytes),
        "simulated device: cannot pin ",
        bytes,
        " more bytes of host memory (",
        r.pinned.current,
        " pinned, limit ",
        (size_t)r.settings.pinned_capacity,
        ")");
    auto block = std::make_shared<Block>();
    block->kind = BlockKind::pinned;
    block->requested = block->size = bytes;
    map_block(block);
    memset(block->base, kPoison, bytes);
    r.counters["pinned_allocs"]++;
    charge_pinned(*block);
    return {block->base, new BlockPtr(block), &free_pinned_memory, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* dest, const void* src, size_t bytes) const override {
    memcpy(dest, src, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override {
    return true; // the queue keeps what it uses
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {
    SIMDEV_LOCK();
    runtime().pinned.peak = runtime().pinned.current;
    runtime().pinned_pow2.peak = runtime().pinned_pow2.current;
  }
};

SimDeviceAllocator device_memory;
SimHostAllocator host_memory;
} // namespace

c10::DeviceAllocator& device_allocator() {
  return device_memory;
}
at::HostAllocator& host_allocator() {
  return host_memory;
}

void charge_pinned(const Block& block) {
  runtime().pinned.add(block.requested);
  runtime().pinned_pow2.add(power_of_two_at_least(block.requested));
}
void discharge_pinned(const Block& block) {
  runtime().pinned.subtract(block.requested);
  runtime().pinned_pow2.subtract(power_of_two_at_least(block.requested));
}
bool pin_would_exceed(size_t bytes) {
  return runtime().pinned.current + bytes > (size_t)runtime().settings.pinned_capacity;
}

void record_stream(const c10::DataPtr& pointer, size_t stream) {
  SIMDEV_LOCK();
  if (BlockPtr block = find_block(pointer.get()))
    block->recorded_streams.insert(stream);
}

} // namespace simdev
