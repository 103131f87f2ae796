// Registration of the caller's host memory, with the interface and the return codes of CUDA's runtime.
#include "runtime.h"

#include <string>

namespace simdev {

namespace {
enum RuntimeCode : int64_t {
  kSuccess = 0,
  kInvalidValue = 1,
  kMemoryAllocation = 2,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
};

// A failed call leaves its code behind, and torch raises it at the next kernel launch, whoever does that.
int64_t fail(const char* call, RuntimeCode code) {
  if (runtime().settings.sticky_errors != 0)
    runtime().pending_error = std::string(call) + " returned " + std::to_string((int64_t)code);
  return code;
}

bool overlaps_a_block(char* begin, size_t bytes) {
  auto& blocks = runtime().blocks;
  if (find_block(begin))
    return true;
  auto next = blocks.upper_bound(begin);
  for (; next != blocks.end() && next->first < begin + bytes; ++next)
    if (!next->second.expired())
      return true;
  return false;
}
} // namespace

int64_t host_register(int64_t pointer, int64_t bytes, int64_t flags) {
  (void)flags; // portable, mapped, read-only: no difference here
  constexpr const char* name = "cudaHostRegister";
  SIMDEV_LOCK();
  if (pointer == 0 || bytes <= 0)
    return fail(name, kInvalidValue);
  auto& r = runtime();
  char* base = (char*)pointer;
  if (overlaps_a_block(base, bytes))
    return fail(name, kAlreadyRegistered);
  if (pin_would_exceed(bytes)) {
    r.counters["register_refused"]++;
    return fail(name, kMemoryAllocation);
  }
  auto block = std::make_shared<Block>();
  block->kind = BlockKind::registered;
  block->base = base;
  block->requested = block->size = bytes;
  r.blocks[base] = block;
  r.registrations[base] = block;
  r.counters["registers"]++;
  charge_pinned(*block);
  return kSuccess;
}

void drop_registration(const BlockPtr& block) {
  runtime().registrations.erase(block->base);
  forget_block(*block);
  discharge_pinned(*block);
}

int64_t host_unregister(int64_t pointer) {
  SIMDEV_LOCK();
  auto& r = runtime();
  auto entry = r.registrations.find((char*)pointer);
  if (entry == r.registrations.end())
    return fail("cudaHostUnregister", kNotRegistered);
  BlockPtr block = entry->second;
  r.counters["unregisters"]++;
  drop_registration(block);
  // The caller may unmap the memory next, so nothing queued may be left that would touch it.
  for (const Access& access : block->accesses)
    run_until(access.stream, access.sequence);
  check_unregister(*block);
  return kSuccess;
}

void raise_pending_error() {
  SIMDEV_LOCK();
  std::string error;
  error.swap(runtime().pending_error);
  TORCH_CHECK(
      error.empty(),
      "simulated device: ",
      error,
      ", and as with CUDA that error surfaces now, at the next kernel: after a refusal, launch one operator "
      "and discard its error");
}

} // namespace simdev
