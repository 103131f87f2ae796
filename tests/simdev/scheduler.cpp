// Streams as queues. Work may be deferred and then runs when something forces it: never out of its stream's
// order, never before an event it waits for, otherwise as late as possible. Clocks say what is ordered,
// whenever it runs.
#include "runtime.h"

#include <algorithm>

namespace simdev {

namespace {
const char* const kEngineNames[] = {"h2d", "d2h", "compute"};

// Moves the stream's clock on by one operation, which is ordered after all that the host knows of.
void advance(StreamState& state, size_t stream) {
  join(state.clock, runtime().host_clock);
  if (state.clock.size() <= stream)
    state.clock.resize(stream + 1, 0);
  state.clock[stream]++;
}
} // namespace

void join(Clock& into, const Clock& from) {
  if (into.size() < from.size())
    into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); i++)
    into[i] = std::max(into[i], from[i]);
}

uint64_t tick_of(const Clock& clock, size_t stream) {
  return stream < clock.size() ? clock[stream] : 0;
}

size_t new_stream(int device) {
  auto& streams = runtime().streams;
  streams.emplace_back();
  streams.back().device = device;
  return streams.size() - 1;
}

void run_until(size_t stream, uint64_t sequence) {
  auto& queue = runtime().streams[stream].queue;
  while (!queue.empty() && queue.front().sequence <= sequence) {
    QueueItem item = std::move(queue.front());
    queue.pop_front();
    if (item.wait_for && !item.wait_for->done)
      run_until(item.wait_for->stream, item.wait_for->sequence);
    if (item.work) {
      PlainDispatch plain;
      item.work();
    }
    if (item.mark_done)
      item.mark_done->done = true;
  }
}

void enqueue(size_t stream, std::function<void()> work) {
  auto& state = runtime().streams[stream];
  if (state.queue.empty()) {
    PlainDispatch plain;
    work();
  } else {
    state.queue.push_back({++state.sequence, std::move(work), nullptr, nullptr});
  }
}

void submit(
    size_t stream,
    Engine engine,
    const std::string& name,
    double microseconds,
    int64_t bytes,
    std::vector<Use> uses,
    std::function<void()> work) {
  auto& r = runtime();
  auto& state = r.streams[stream];
  advance(state, stream);
  for (const Use& use : uses)
    check_access(stream, use, name);

  r.host_time += r.settings.host_op;
  double begin = std::max({state.time, r.host_time, r.engine_time[engine]});
  double end = begin + microseconds;
  state.time = r.engine_time[engine] = end;
  if (r.settings.tracing != 0)
    r.trace.push_back({stream, kEngineNames[engine], name, begin, end, bytes});

  // The queue keeps blocks alive, not tensors: dropping a tensor that Python knows takes the GIL, which the
  // thread that waits for our lock may hold.
  auto keep_alive = std::make_shared<std::vector<Use>>(std::move(uses));
  auto guarded = [keep_alive, work = std::move(work)] { work(); };
  state.queue.push_back({++state.sequence, std::move(guarded), nullptr, nullptr});
  bool deferred = (engine == kCompute ? r.settings.lazy_compute : r.settings.lazy_copy) != 0;
  if (!deferred)
    run_until(stream, state.sequence);
}

void host_learns(const Clock& clock, double time) {
  auto& r = runtime();
  join(r.host_clock, clock);
  r.host_time = std::max(r.host_time, time);
}

void synchronize(size_t stream) {
  auto& state = runtime().streams[stream];
  run_until(stream, state.sequence);
  host_learns(state.clock, state.time);
}

EventPtr record_event(size_t stream) {
  auto& r = runtime();
  auto& state = r.streams[stream];
  advance(state, stream);
  auto event = std::make_shared<EventState>();
  event->stream = stream;
  event->clock = state.clock;
  event->time = std::max(state.time, r.host_time);
  event->done = state.queue.empty();
  event->sequence = event->done ? state.sequence : ++state.sequence;
  if (!event->done)
    state.queue.push_back({event->sequence, nullptr, nullptr, event});
  return event;
}

void wait_event(size_t stream, const EventPtr& event) {
  auto& state = runtime().streams[stream];
  join(state.clock, event->clock);
  state.time = std::max(state.time, event->time);
  if (!event->done)
    state.queue.push_back({++state.sequence, nullptr, event, nullptr});
}

void host_wait(const EventPtr& event) {
  run_until(event->stream, event->sequence);
  host_learns(event->clock, event->time);
}

} // namespace simdev
