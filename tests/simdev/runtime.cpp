// The process-wide state, and the map from addresses to blocks.
#include "runtime.h"

#include <sys/mman.h>
#include <cstdlib>
#include <string>

namespace simdev {

namespace {
constexpr size_t kPage = 4096;

thread_local int this_device = 0;
thread_local std::vector<int64_t> this_stream; // -1: the default stream

size_t whole_pages(size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

// The system hands out only free addresses, so a registration found there was left behind by memory that is
// gone.
void drop_stale_registrations(char* begin, char* end) {
  auto& registrations = runtime().registrations;
  for (auto entry = registrations.begin(); entry != registrations.end();) {
    BlockPtr block = entry->second;
    ++entry;
    if (block->base < end && begin < block->base + block->size) {
      report("race: host memory of " + std::to_string(block->size) + " bytes freed while registered", false);
      drop_registration(block);
    }
  }
}
} // namespace

Runtime::Runtime() {
  if (const char* count = std::getenv("SIM_DEVICES"))
    device_count = std::max(1, std::atoi(count));
  stats.resize(device_count);
  for (int i = 0; i < device_count; i++) {
    streams.emplace_back();
    streams.back().device = i;
  }
}

Runtime& runtime() {
  static Runtime* instance = new Runtime; // never destroyed: tensors may outlive any static object
  return *instance;
}

int current_device() {
  return this_device;
}
void set_current_device(int device) {
  this_device = device;
}
size_t current_stream(int device) {
  bool chosen = device < (int)this_stream.size() && this_stream[device] >= 0;
  return chosen ? this_stream[device] : device;
}
void set_current_stream(int device, size_t stream) {
  if ((int)this_stream.size() <= device)
    this_stream.resize(device + 1, -1);
  this_stream[device] = (int64_t)stream;
}

Block::~Block() {
  if (!base || kind == BlockKind::registered)
    return;
  SIMDEV_LOCK();
  munmap(base, whole_pages(size));
  forget_block(*this);
}

void map_block(const BlockPtr& block) {
  // Pages of its own for each block: an access out of bounds faults, and no block is reused behind a test's
  // back.
  size_t bytes = whole_pages(block->size);
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(pages != MAP_FAILED, "simulated device: the host has no ", bytes, " bytes left");
  block->base = (char*)pages;
  drop_stale_registrations(block->base, block->base + bytes);
  runtime().blocks[block->base] = block;
}

void forget_block(const Block& block) {
  // Another block may stand at the same address by now.
  auto& blocks = runtime().blocks;
  auto entry = blocks.find(block.base);
  if (entry == blocks.end())
    return;
  BlockPtr current = entry->second.lock();
  if (!current || current.get() == &block)
    blocks.erase(entry);
}

const char* Block::kind_name() const {
  switch (kind) {
    case BlockKind::device:
      return "device";
    case BlockKind::pinned:
      return "pinned";
    default:
      return "registered";
  }
}

BlockPtr find_block(const void* pointer) {
  auto& blocks = runtime().blocks;
  auto entry = blocks.upper_bound((char*)pointer);
  if (entry == blocks.begin())
    return nullptr;
  BlockPtr block = (--entry)->second.lock();
  return block && (char*)pointer < block->base + block->size ? block : nullptr;
}

BlockPtr find_pinned_range(const void* begin, size_t bytes) {
  char* first = (char*)begin;
  BlockPtr block = find_block(first);
  if (block && block->is_host() && first + bytes <= block->base + block->size)
    return block;
  bool touches = block && block->is_host();
  auto& blocks = runtime().blocks;
  for (auto next = blocks.upper_bound(first); next != blocks.end() && next->first < first + bytes; ++next) {
    BlockPtr other = next->second.lock();
    touches |= other && other->is_host();
  }
  TORCH_CHECK(
      !touches,
      "simulated device: invalid argument: the host side of this copy (",
      bytes,
      " bytes) is pinned in part or spans two pinned ranges; copy from each range by itself");
  return nullptr;
}

Use use_of(const at::Tensor& tensor, bool write) {
  if (!tensor.numel())
    return {nullptr, nullptr, nullptr, write};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); i++)
    last += (tensor.size(i) - 1) * tensor.stride(i);
  char* begin = (char*)tensor.const_data_ptr();
  return use_of(begin, (last + 1) * tensor.element_size(), write);
}

Use use_of(void* begin, size_t bytes, bool write) {
  return {(char*)begin, (char*)begin + bytes, find_block(begin), write};
}

} // namespace simdev
