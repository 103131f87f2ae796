// What Python may ask of the device, as torch operators, so that the build needs no Python headers.
#include "runtime.h"

#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <iomanip>
#include <sstream>

namespace simdev {

namespace {
using at::Tensor;

const std::map<std::string, double Settings::*>& setting_table() {
  static const std::map<std::string, double Settings::*> table = {
      {"lazy_copy", &Settings::lazy_copy},
      {"lazy_compute", &Settings::lazy_compute},
      {"race_mode", &Settings::race_mode},
      {"tracing", &Settings::tracing},
      {"capacity", &Settings::capacity},
      {"pinned_capacity", &Settings::pinned_capacity},
      {"h2d_bw", &Settings::h2d_bw},
      {"d2h_bw", &Settings::d2h_bw},
      {"mem_bw", &Settings::mem_bw},
      {"flops", &Settings::flops},
      {"latency", &Settings::latency},
      {"host_op", &Settings::host_op},
      {"sticky_errors", &Settings::sticky_errors},
  };
  return table;
}

int64_t install() {
  install_hooks();
  return runtime().device_count;
}

void set_setting(std::string name, double value) {
  auto entry = setting_table().find(name);
  TORCH_CHECK(entry != setting_table().end(), "simulated device: no setting ", name);
  SIMDEV_LOCK();
  runtime().settings.*(entry->second) = value;
}

c10::Dict<std::string, double> get_settings(bool defaults) {
  SIMDEV_LOCK();
  c10::Dict<std::string, double> values;
  const Settings settings = defaults ? Settings() : runtime().settings;
  for (const auto& [name, member] : setting_table())
    values.insert(name, settings.*member);
  return values;
}

c10::List<std::string> take_races(bool clear) {
  SIMDEV_LOCK();
  c10::List<std::string> messages;
  for (const std::string& message : runtime().races)
    messages.push_back(message);
  if (clear)
    runtime().races.clear();
  return messages;
}

c10::Dict<std::string, int64_t> get_counters(bool clear) {
  SIMDEV_LOCK();
  auto& r = runtime();
  c10::Dict<std::string, int64_t> values;
  for (const auto& [name, count] : r.counters)
    values.insert(name, count);
  values.insert("streams", (int64_t)r.streams.size());
  values.insert("registrations", (int64_t)r.registrations.size());
  values.insert("pinned_bytes", (int64_t)r.pinned.current);
  values.insert("pinned_peak", (int64_t)r.pinned.peak);
  values.insert("pinned_pow2_bytes", (int64_t)r.pinned_pow2.current);
  values.insert("pinned_pow2_peak", (int64_t)r.pinned_pow2.peak);
  for (size_t i = 0; i < r.stats.size(); i++) {
    values.insert("allocated:" + std::to_string(i), r.stats[i].allocated_bytes[0].current);
    values.insert("peak:" + std::to_string(i), r.stats[i].allocated_bytes[0].peak);
  }
  if (clear) {
    r.counters.clear();
    r.pinned.peak = r.pinned.current;
    r.pinned_pow2.peak = r.pinned_pow2.current;
  }
  return values;
}

// One line an entry: stream, engine, name, begin, end, bytes.
c10::List<std::string> take_trace(bool clear) {
  SIMDEV_LOCK();
  c10::List<std::string> lines;
  for (const TraceEntry& entry : runtime().trace) {
    std::ostringstream line;
    line << std::setprecision(17) << entry.stream << "\t" << entry.engine << "\t" << entry.name << "\t"
         << entry.begin << "\t" << entry.end << "\t" << entry.bytes;
    lines.push_back(line.str());
  }
  if (clear)
    runtime().trace.clear();
  return lines;
}

double host_time() {
  SIMDEV_LOCK();
  return runtime().host_time;
}

int64_t pending(int64_t stream) {
  SIMDEV_LOCK();
  return (int64_t)runtime().streams.at(stream).queue.size();
}

void clear_pending_error() {
  SIMDEV_LOCK();
  runtime().pending_error.clear();
}

void host_access(const Tensor& tensor, bool write) {
  TORCH_CHECK(tensor.device().is_cpu(), "simulated device: the host has no access to ", tensor.device());
  SIMDEV_LOCK();
  check_host_access(use_of(tensor, write));
}

bool here_or_on_cpu(const Tensor& tensor) {
  return tensor.is_cpu() || tensor.device().type() == kDevice;
}

// What `Tensor.data =` does, without its list of devices, which leaves PrivateUse1 out.
void set_data(const Tensor& self, const Tensor& data) {
  TORCH_CHECK(
      here_or_on_cpu(self) && here_or_on_cpu(data),
      "Attempted to call `variable.set_data(tensor)`, but `variable` and `tensor` have "
      "incompatible tensor type.");
  TORCH_CHECK(
      !self.requires_grad() || torch::autograd::isDifferentiableType(data.scalar_type()),
      "data set to a tensor that requires gradients must be floating point or complex dtype");
  if (auto* meta = torch::autograd::impl::get_autograd_meta(self)) {
    std::lock_guard<std::mutex> guard(meta->mutex_);
    meta->grad_accumulator_.reset(); // it remembers the device and dtype
  }
  self.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

} // namespace

TORCH_LIBRARY(simdev, m) {
  m.def("install() -> int", &install);
  m.def("set(str name, float value) -> ()", &set_setting);
  m.def("settings(bool defaults) -> Dict(str, float)", &get_settings);
  m.def("races(bool clear) -> str[]", &take_races);
  m.def("counters(bool clear) -> Dict(str, int)", &get_counters);
  m.def("trace(bool clear) -> str[]", &take_trace);
  m.def("host_time() -> float", &host_time);
  m.def("pending(int stream) -> int", &pending);
  m.def("clear_pending_error() -> ()", &clear_pending_error);
  m.def("host_access(Tensor tensor, bool write) -> ()", &host_access);
  m.def("host_register(int pointer, int bytes, int flags) -> int", &host_register);
  m.def("host_unregister(int pointer) -> int", &host_unregister);
  m.def("set_data(Tensor self, Tensor data) -> ()", &set_data);
}

} // namespace simdev
