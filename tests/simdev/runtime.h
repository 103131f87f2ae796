// What all parts of the simulated device share: blocks of memory, streams, events, settings, and the
// functions that act on them. There is one Runtime per process and one lock. Nothing here knows an operator
// by name.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace simdev {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;

// ---- vector clocks --------------------------------------------------------------------------------------

// Entry i is the latest operation of stream i that is known to have happened.
using Clock = std::vector<uint64_t>;

void join(Clock& into, const Clock& from);
uint64_t tick_of(const Clock& clock, size_t stream);

// ---- memory ---------------------------------------------------------------------------------------------

// One use of a range of a block by an operation. `tick` places it on its stream's clock, `sequence` in its
// queue.
struct Access {
  char* begin;
  char* end;
  size_t stream;
  uint64_t tick;
  uint64_t sequence;
  bool write;
  std::string what;
};

enum class BlockKind {
  device,      // allocated by the device allocator
  pinned,      // allocated by the host allocator
  registered,  // the caller's memory, between host_register and host_unregister
};

struct Block {
  BlockKind kind = BlockKind::device;
  char* base = nullptr;
  size_t requested = 0;
  size_t size = 0;  // what is accounted: `requested`, rounded up for device memory
  int device = 0;
  size_t home_stream = 0;  // the stream it was allocated on
  std::vector<Access> accesses;
  std::set<size_t> recorded_streams;

  Block() = default;
  Block(const Block&) = delete;
  ~Block();
  bool is_host() const {
    return kind != BlockKind::device;
  }
  const char* kind_name() const;
};
using BlockPtr = std::shared_ptr<Block>;

// Bounding range of one tensor, and whether the operation writes it.
struct Use {
  char* begin;
  char* end;
  BlockPtr block;
  bool write;
};
Use use_of(const at::Tensor& tensor, bool write);
Use use_of(void* begin, size_t bytes, bool write);

// Gives the block pages of its own and enters it into the map of blocks.
void map_block(const BlockPtr& block);
void forget_block(const Block& block);
BlockPtr find_block(const void* pointer);
// The pinned or registered block that holds the whole range; none when no byte of the range is pinned.
// Throws on a range that is pinned in part or spans two blocks, which CUDA answers with "invalid argument".
BlockPtr find_pinned_range(const void* begin, size_t bytes);

// ---- streams and events ---------------------------------------------------------------------------------

struct EventState {
  size_t stream = 0;
  uint64_t sequence = 0;
  Clock clock;
  double time = 0;
  bool done = false;
};
using EventPtr = std::shared_ptr<EventState>;

struct QueueItem {
  uint64_t sequence;
  std::function<void()> work;
  EventPtr wait_for;
  EventPtr mark_done;
};

struct StreamState {
  int device = 0;
  std::deque<QueueItem> queue;
  Clock clock;
  double time = 0;
  uint64_t sequence = 0;
};

enum Engine { kHostToDevice = 0, kDeviceToHost = 1, kCompute = 2 };

struct TraceEntry {
  size_t stream;
  const char* engine;
  std::string name;
  double begin;
  double end;
  int64_t bytes;
};

// ---- runtime --------------------------------------------------------------------------------------------

// All of one type, so that Python can read and write them by name (see control.cpp).
struct Settings {
  double lazy_copy = 0;
  double lazy_compute = 0;
  double race_mode = 1;  // 0 off, 1 collect, 2 raise
  double tracing = 0;
  double capacity = double(uint64_t(1) << 34);         // bytes, of each device
  double pinned_capacity = double(uint64_t(1) << 50);  // bytes
  double h2d_bw = 25e3;                                // bytes per microsecond
  double d2h_bw = 25e3;
  double mem_bw = 2e6;
  double flops = 4e8;  // per microsecond
  double latency = 5;  // microseconds, of each operation on the device
  double host_op = 2;  // microseconds the host spends to submit one operation
  double sticky_errors = 1;  // an error of cudaHostRegister is raised again by the next kernel, as on CUDA
};

// A sum with its high-water mark.
struct Tally {
  size_t current = 0;
  size_t peak = 0;
  void add(size_t n) {
    current += n;
    peak = std::max(peak, current);
  }
  void subtract(size_t n) {
    current -= n;
  }
};

struct Runtime {
  std::recursive_mutex mutex;
  Settings settings;

  int device_count = 1;
  std::deque<StreamState> streams;  // the id of a stream is its index; the first ones are the default streams
  std::map<char*, std::weak_ptr<Block>> blocks;  // by base address
  std::map<char*, BlockPtr> registrations;
  std::vector<c10::CachingDeviceAllocator::DeviceStats> stats;
  std::vector<std::pair<BlockPtr, std::vector<EventPtr>>> deferred_frees;
  std::string pending_error;
  Tally pinned;
  Tally pinned_pow2;  // what a pool of power-of-two blocks would have locked for the same requests

  Clock host_clock;
  double host_time = 0;
  double engine_time[3] = {0, 0, 0};

  std::vector<std::string> races;
  std::vector<TraceEntry> trace;
  std::map<std::string, int64_t> counters;

  Runtime();
};

Runtime& runtime();
using Lock = std::lock_guard<std::recursive_mutex>;
#define SIMDEV_LOCK() ::simdev::Lock lock(::simdev::runtime().mutex)

// The calling thread's current device, and its current stream on each device.
int current_device();
void set_current_device(int device);
size_t current_stream(int device);
void set_current_stream(int device, size_t stream);

// Runs CPU kernels plainly, whatever modes and dispatch keys the calling thread has on.
struct PlainDispatch {
  c10::impl::ForceDispatchKeyGuard reset{c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{})};
  c10::impl::ExcludeDispatchKeyGuard exclude{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
};

// ---- scheduler.cpp (call with the lock held) ------------------------------------------------------------

size_t new_stream(int device);
// Checks the uses for races, charges virtual time, and queues the work or runs it, as the settings say.
void submit(
    size_t stream,
    Engine engine,
    const std::string& name,
    double microseconds,
    int64_t bytes,
    std::vector<Use> uses,
    std::function<void()> work);
void enqueue(size_t stream, std::function<void()> work);
void run_until(size_t stream, uint64_t sequence);
void synchronize(size_t stream);
EventPtr record_event(size_t stream);
void wait_event(size_t stream, const EventPtr& event);
void host_wait(const EventPtr& event);
void host_learns(const Clock& clock, double time);

// ---- races.cpp (call with the lock held) ----------------------------------------------------------------

void report(const std::string& message, bool may_throw);
void check_access(size_t stream, const Use& use, const std::string& what);
void check_free(const Block& block, const Clock& known);
void check_unregister(const Block& block);
void check_host_access(const Use& use);

// ---- allocators.cpp, registration.cpp, guard.cpp --------------------------------------------------------

c10::DeviceAllocator& device_allocator();
at::HostAllocator& host_allocator();
void charge_pinned(const Block& block);
void discharge_pinned(const Block& block);
bool pin_would_exceed(size_t bytes);
void record_stream(const c10::DataPtr& pointer, size_t stream);
// Return codes of CUDA's runtime.
int64_t host_register(int64_t pointer, int64_t bytes, int64_t flags);
int64_t host_unregister(int64_t pointer);
void drop_registration(const BlockPtr& block);
// Throws what a failed registration left behind, once.
void raise_pending_error();
void install_hooks();

// ---- kernels.cpp, copies.cpp, fallback.cpp --------------------------------------------------------------

at::Tensor cpu_alias(const at::Tensor& tensor);
at::Tensor new_strided(
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory);
const at::Tensor& resize_tensor(
    const at::Tensor& self,
    c10::IntArrayRef sizes,
    std::optional<c10::MemoryFormat> memory_format);
// The CPU generator that stands behind a generator of the device.
at::Generator cpu_generator(const at::Generator& generator);

} // namespace simdev
