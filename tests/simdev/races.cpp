// The race detector. Each access to a block is compared, when it is submitted, with the accesses before it:
// two that overlap, one of them a write, must be ordered by the clocks. So a missing wait is seen in every
// run.
#include "runtime.h"

#include <sstream>

namespace simdev {

namespace {
std::string describe(const Access& access) {
  std::ostringstream text;
  text << "'" << access.what << "' on stream " << access.stream;
  return text.str();
}

// `access` stands for itself no longer once `later` does: whoever is ordered after `later` is ordered after
// it too.
bool is_covered(const Access& access, const Use& later, size_t stream, bool ordered) {
  bool inside = later.begin <= access.begin && access.end <= later.end;
  return inside && ordered && (later.write || (!access.write && access.stream == stream));
}

std::string range_of(const Use& use) {
  std::ostringstream text;
  text << use.block->kind_name() << " block of " << use.block->requested << " bytes, offset "
       << (use.begin - use.block->base) << ".." << (use.end - use.block->base);
  return text.str();
}
} // namespace

void report(const std::string& message, bool may_throw) {
  auto& r = runtime();
  if (r.settings.race_mode == 0)
    return;
  r.races.push_back(message);
  TORCH_CHECK(r.settings.race_mode != 2 || !may_throw, "simulated device: ", message);
}

void check_access(size_t stream, const Use& use, const std::string& what) {
  if (!use.block || use.begin >= use.end)
    return;
  auto& state = runtime().streams[stream];
  const Clock& host = runtime().host_clock;
  std::vector<Access> kept;
  std::string message;
  for (const Access& earlier : use.block->accesses) {
    if (tick_of(host, earlier.stream) >= earlier.tick)
      continue; // the host has waited for it, and all that it submits from now on comes after
    bool ordered = tick_of(state.clock, earlier.stream) >= earlier.tick;
    bool overlap = earlier.begin < use.end && use.begin < earlier.end;
    if (overlap && !ordered && (earlier.write || use.write) && message.empty()) {
      std::ostringstream text;
      text << "race: " << (use.write ? "write" : "read") << " by '" << what << "' on stream " << stream
           << " is not ordered after the " << (earlier.write ? "write" : "read") << " by "
           << describe(earlier) << " (" << range_of(use) << ")";
      message = text.str();
    }
    if (!is_covered(earlier, use, stream, ordered))
      kept.push_back(earlier);
  }
  uint64_t tick = tick_of(state.clock, stream);
  kept.push_back({use.begin, use.end, stream, tick, state.sequence + 1, use.write, what});
  use.block->accesses.swap(kept);
  if (!message.empty())
    report(message, true);
}

void check_free(const Block& block, const Clock& known) {
  for (const Access& access : block.accesses) {
    bool recorded = block.recorded_streams.count(access.stream) != 0;
    if (access.stream == block.home_stream || recorded || tick_of(known, access.stream) >= access.tick)
      continue;
    std::ostringstream text;
    text << "race: block of " << block.requested << " bytes freed while " << describe(access)
         << " may still use it (allocated on stream " << block.home_stream
         << "; no event, host sync or record_stream)";
    return report(text.str(), false); // called from a destructor
  }
}

void check_unregister(const Block& block) {
  for (const Access& access : block.accesses) {
    if (tick_of(runtime().host_clock, access.stream) >= access.tick)
      continue;
    std::ostringstream text;
    text << "race: host memory of " << block.requested << " bytes unregistered while " << describe(access)
         << " may still use it (the host has not waited for it)";
    return report(text.str(), true);
  }
}

void check_host_access(const Use& use) {
  if (!use.block)
    return;
  for (const Access& access : use.block->accesses) {
    bool ordered = tick_of(runtime().host_clock, access.stream) >= access.tick;
    bool overlap = access.begin < use.end && use.begin < access.end;
    if (ordered || !overlap || !(access.write || use.write))
      continue;
    std::ostringstream text;
    text << "race: " << (use.write ? "write" : "read") << " by the host is not ordered after the "
         << (access.write ? "write" : "read") << " by " << describe(access) << " (" << range_of(use) << ")";
    return report(text.str(), true);
  }
}

} // namespace simdev
