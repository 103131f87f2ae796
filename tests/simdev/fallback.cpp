// Every other operator: shapes from the meta kernel, values from the CPU kernel, run on the device's memory
// when the queue comes to it. at::native::cpu_fallback will not do, since it moves tensors to the CPU
// silently and so hides the mixed-device bugs that tests are after.
#include "runtime.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DefaultDtype.h>
#include <torch/library.h>

#include <algorithm>
#include <unordered_map>

namespace simdev {

namespace {
using at::IValue;
using at::Tensor;
using torch::jit::Stack;

bool on_device(const Tensor& tensor) {
  return tensor.device().type() == kDevice;
}

// Calls visit(tensor, index of the argument) for each defined tensor, those in lists too.
template <class F>
void visit_tensors(const Stack& values, F visit) {
  for (size_t i = 0; i < values.size(); i++) {
    const IValue& value = values[i];
    if (value.isTensor()) {
      if (value.toTensor().defined())
        visit(value.toTensor(), i);
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector())
        if (tensor.defined())
          visit(tensor, i);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        if (tensor && tensor->defined())
          visit(*tensor, i);
    }
  }
}

// The same values with each defined tensor replaced by change(tensor).
template <class F>
Stack map_tensors(Stack values, F change) {
  auto changed = [&](const Tensor& tensor) { return tensor.defined() ? change(tensor) : tensor; };
  for (IValue& value : values) {
    if (value.isTensor()) {
      value = changed(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector())
        list.push_back(changed(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<Tensor>(changed(*tensor)) : std::nullopt);
      value = list;
    }
  }
  return values;
}

void move_devices_and_generators(Stack& values, c10::DeviceType to) {
  for (IValue& value : values) {
    if (value.isDevice())
      value = c10::Device(to);
    else if (value.isGenerator() && value.toGenerator().device().type() == kDevice)
      value = cpu_generator(value.toGenerator());
  }
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// ---- memoised shapes ------------------------------------------------------------------------------------

// Meta kernels, many of them in Python, are the slowest part of a call, so what they answer is kept.
struct TensorSpec {
  bool defined = false;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
};
struct ShapeRecord {
  std::vector<TensorSpec> results;
  std::vector<std::vector<int64_t>> written; // sizes of the written inputs afterwards
};

std::unordered_map<std::string, ShapeRecord>& shape_records() {
  static auto* records = new std::unordered_map<std::string, ShapeRecord>;
  return *records;
}

class ShapeKey {
 public:
  ShapeKey(const std::string& name, const Stack& args) : text_(name) {
    put((int64_t)c10::get_default_dtype_as_scalartype());
    for (const IValue& value : args)
      add(value);
  }
  // None if some argument cannot be part of a key.
  std::optional<std::string> text() const {
    return valid_ ? std::optional<std::string>(text_) : std::nullopt;
  }

 private:
  template <class T>
  void put(T value) {
    text_.append((const char*)&value, sizeof value);
  }
  void tag(char letter) {
    text_.push_back(letter);
  }
  void add(const Tensor& tensor) {
    tag(on_device(tensor) ? 'd' : 'c');
    tag(tensor.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : 't');
    put((int64_t)tensor.scalar_type());
    put(tensor.dim());
    for (int64_t size : tensor.sizes())
      put(size);
    for (int64_t stride : tensor.strides())
      put(stride);
  }
  void add(const IValue& value) {
    tag('|');
    if (value.isTensor()) {
      if (value.toTensor().defined())
        add(value.toTensor());
      else
        tag('u');
    } else if (value.isNone()) {
      tag('n');
    } else if (value.isBool()) {
      tag(value.toBool() ? 'T' : 'F');
    } else if (value.isInt()) {
      tag('i');
      put(value.toInt());
    } else if (value.isDouble()) {
      tag('f');
      put(value.toDouble());
    } else if (value.isString()) {
      tag('s');
      text_ += value.toStringRef();
    } else if (value.isDevice()) {
      tag('D');
    } else if (value.isList()) {
      tag('[');
      for (const IValue& element : value.toListRef())
        add(element);
      tag(']');
    } else {
      valid_ = false;
    }
  }

  std::string text_;
  bool valid_ = true;
};

// ---- one call -------------------------------------------------------------------------------------------

class OperatorCall {
 public:
  OperatorCall(const c10::OperatorHandle& op, const Stack& stack)
      : op_(op), schema_(op.schema()), name_(schema_.name()) {
    if (!schema_.overload_name().empty())
      name_ += "." + schema_.overload_name();
    args_.assign(stack.end() - (ptrdiff_t)schema_.arguments().size(), stack.end());
    gather_inputs();
  }

  Stack run() {
    raise_pending_error();
    c10::DeviceGuard guard(device_);
    if (writes_arguments_only())
      return queue_kernel({});
    auto shapes = infer_results();
    return shapes ? queue_kernel(*shapes) : run_kernel_now();
  }

 private:
  struct Input {
    Tensor tensor;
    bool write;
  };

  // -- inputs --

  void gather_inputs() {
    std::optional<c10::Device> device;
    std::vector<Tensor> on_host;
    visit_tensors(args_, [&](const Tensor& tensor, size_t i) {
      if (!on_device(tensor)) {
        on_host.push_back(tensor);
        return;
      }
      if (device && *device != tensor.device())
        refuse_devices(*device, tensor.device());
      device = tensor.device();
      inputs_.push_back({tensor, is_written(schema_.arguments()[i])});
    });
    for (const IValue& value : args_)
      if (!device && value.isDevice() && value.toDevice().type() == kDevice)
        device = value.toDevice();
    device_ = device.value_or(c10::Device(kDevice));
    if (!device_.has_index())
      device_ = c10::Device(kDevice, (c10::DeviceIndex)current_device());
    for (const Tensor& tensor : on_host)
      if (tensor.dim() > 0 && !takes_host_indices())
        refuse_devices(device_, tensor.device());
    for (const c10::Argument& result : schema_.returns())
      TORCH_CHECK_NOT_IMPLEMENTED(
          !result.alias_info() || result.alias_info()->isWrite(),
          "simulated device: the view operator ",
          name_,
          " has no kernel");
  }

  void refuse_devices(c10::Device one, c10::Device other) const {
    TORCH_CHECK(
        false,
        "Expected all tensors to be on the same device, but found at least two devices, ",
        one,
        " and ",
        other,
        "! (",
        name_,
        ")");
  }

  // As on CUDA, indices may be on the host; so may scalars anywhere.
  bool takes_host_indices() const {
    const std::string& name = schema_.name();
    return name == "aten::index" || name == "aten::_unsafe_index" || name == "aten::index_put_" ||
        name == "aten::_index_put_impl_";
  }

  // The arguments for a CPU kernel: aliases of device memory, and copies of what the host might change
  // meanwhile.
  Stack cpu_arguments() const {
    Stack args = map_tensors(args_, [](const Tensor& tensor) {
      if (on_device(tensor))
        return cpu_alias(tensor);
      PlainDispatch plain;
      Tensor copy = tensor.clone();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
        copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    });
    move_devices_and_generators(args, at::kCPU);
    return args;
  }

  // -- results --

  // The argument that result i is, for in-place and out= operators; otherwise None.
  IValue written_argument(size_t i) const {
    const auto* result = schema_.returns()[i].alias_info();
    if (!result || !result->isWrite())
      return {};
    for (size_t k = 0; k < args_.size(); k++) {
      const auto* argument = schema_.arguments()[k].alias_info();
      if (argument && argument->isWrite() && argument->beforeSets() == result->beforeSets())
        return args_[k];
    }
    return {};
  }

  // No result has to be allocated or resized. An out= tensor that is not empty is trusted to have the right
  // shape.
  bool writes_arguments_only() const {
    bool writes = false, has_out = false, has_empty = false;
    for (const c10::Argument& argument : schema_.arguments()) {
      writes |= is_written(argument);
      has_out |= is_written(argument) && argument.is_out();
    }
    for (const Input& input : inputs_)
      has_empty |= input.write && input.tensor.numel() == 0;
    bool all_results = std::all_of(schema_.returns().begin(), schema_.returns().end(), is_written);
    return writes && all_results && !(has_out && has_empty);
  }

  // The results as meta tensors; none if only the kernel can tell, or has to say what is wrong with the
  // arguments.
  std::optional<Stack> infer_results() {
    auto key = ShapeKey(name_, args_).text();
    if (const ShapeRecord* record = key ? recall(*key) : nullptr)
      return replay(*record);
    auto shapes = run_meta_kernel();
    if (shapes && key)
      remember(*key, *shapes);
    for (const IValue& value : shapes.value_or(Stack()))
      if (!value.isTensor() && !value.isTensorList())
        return std::nullopt;
    return shapes;
  }

  static const ShapeRecord* recall(const std::string& key) {
    SIMDEV_LOCK();
    auto found = shape_records().find(key);
    return found == shape_records().end() ? nullptr : &found->second; // records are never removed
  }

  void remember(const std::string& key, const Stack& shapes) const {
    ShapeRecord record;
    for (const IValue& value : shapes) {
      if (!value.isTensor())
        return;
      const Tensor& tensor = value.toTensor();
      if (tensor.defined())
        record.results.push_back({true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()});
      else
        record.results.emplace_back();
    }
    for (const Input& input : inputs_)
      if (input.write)
        record.written.push_back(input.tensor.sizes().vec());
    SIMDEV_LOCK();
    shape_records().emplace(key, std::move(record));
  }

  Stack replay(const ShapeRecord& record) const {
    Stack shapes;
    PlainDispatch plain;
    for (const TensorSpec& spec : record.results) {
      if (spec.defined)
        shapes.emplace_back(at::detail::empty_strided_meta(spec.sizes, spec.strides, spec.dtype));
      else
        shapes.emplace_back(Tensor());
    }
    size_t next = 0;
    for (const Input& input : inputs_)
      if (input.write)
        resize_if_needed(input.tensor, record.written[next++]);
    return shapes;
  }

  static void resize_if_needed(const Tensor& tensor, c10::IntArrayRef sizes) {
    if (tensor.sizes() != sizes)
      resize_tensor(tensor, sizes, std::nullopt);
  }

  bool has_meta_kernel() const {
    return op_.hasKernelForDispatchKey(c10::DispatchKey::Meta) ||
        op_.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
        op_.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
  }

  std::optional<Stack> run_meta_kernel() const {
    if (!has_meta_kernel())
      return std::nullopt;
    try {
      PlainDispatch plain;
      std::vector<Tensor> twins; // of inputs_, in order
      Stack shapes = map_tensors(args_, [&](const Tensor& tensor) {
        if (!on_device(tensor) && tensor.dim() == 0)
          return tensor;
        auto options = tensor.options().device(at::kMeta).pinned_memory(false);
        Tensor twin = at::empty_strided(tensor.sizes(), tensor.strides(), options);
        if (on_device(tensor))
          twins.push_back(twin);
        return twin;
      });
      move_devices_and_generators(shapes, at::kMeta);
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &shapes);
      for (size_t i = 0; i < inputs_.size(); i++)
        if (inputs_[i].write)
          resize_if_needed(inputs_[i].tensor, twins[i].sizes());
      return shapes;
    } catch (const std::exception&) { // no shape without values, or an error that the CPU kernel says better
      return std::nullopt;
    }
  }

  Tensor allocate_like(const Tensor& model) const {
    if (!model.defined())
      return model;
    return new_strided(model.sizes(), model.strides(), model.scalar_type(), {}, device_, false);
  }

  // -- execution --

  Stack queue_kernel(const Stack& shapes) {
    Stack results;
    std::vector<Tensor> fresh; // in the order of the results, undefined ones too
    std::vector<bool> is_argument;
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      IValue argument = written_argument(i);
      is_argument.push_back(!argument.isNone());
      if (!argument.isNone()) {
        results.push_back(argument);
      } else if (shapes[i].isTensor()) {
        fresh.push_back(allocate_like(shapes[i].toTensor()));
        results.emplace_back(fresh.back());
      } else {
        c10::List<Tensor> list;
        for (const Tensor& shape : shapes[i].toTensorVector()) {
          fresh.push_back(allocate_like(shape));
          list.push_back(fresh.back());
        }
        results.emplace_back(list);
      }
    }

    SIMDEV_LOCK();
    count();
    std::vector<Use> uses = input_uses();
    std::vector<Tensor> targets;
    int64_t bytes = 0;
    for (const Input& input : inputs_)
      bytes += (int64_t)input.tensor.nbytes();
    for (const Tensor& tensor : fresh) {
      targets.push_back(tensor.defined() ? cpu_alias(tensor) : tensor);
      if (!tensor.defined())
        continue;
      uses.push_back(use_of(tensor, true));
      bytes += (int64_t)tensor.nbytes();
    }
    auto& settings = runtime().settings;
    double busy = std::max(bytes / settings.mem_bw, flop_estimate(fresh) / settings.flops);
    auto work = [op = op_, stack = cpu_arguments(), targets, is_argument]() mutable {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      size_t next = 0;
      auto store = [&](const Tensor& value) {
        Tensor& target = targets[next++];
        if (target.defined() && target.numel())
          target.copy_(value);
      };
      for (size_t i = 0; i < stack.size(); i++) {
        if (is_argument[i])
          continue;
        if (stack[i].isTensor())
          store(stack[i].toTensor());
        else
          for (const Tensor& value : stack[i].toTensorVector())
            store(value);
      }
    };
    submit(stream(), kCompute, name_, settings.latency + busy, bytes, std::move(uses), std::move(work));
    return results;
  }

  // The shape of the result depends on values, or no meta kernel knows it: the host has to wait, as on CUDA.
  Stack run_kernel_now() {
    SIMDEV_LOCK();
    auto& r = runtime();
    count();
    r.counters["sync_ops"]++;
    r.counters["op:sync:" + name_]++;
    submit(stream(), kCompute, name_, r.settings.latency, 0, input_uses(), [] {});
    synchronize(stream());
    Stack values = cpu_arguments();
    {
      PlainDispatch plain;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &values);
    }
    auto upload = [&](const Tensor& value) {
      Tensor result = allocate_like(value);
      if (value.defined() && value.numel()) {
        PlainDispatch plain;
        cpu_alias(result).copy_(value);
        submit(stream(), kCompute, name_, 0, 0, {use_of(result, true)}, [] {});
      }
      return result;
    };
    Stack results = map_tensors(values, upload);
    for (size_t i = 0; i < results.size(); i++)
      if (IValue argument = written_argument(i); !argument.isNone())
        results[i] = argument;
    return results;
  }

  size_t stream() const {
    return current_stream(device_.index());
  }
  void count() const {
    runtime().counters["op:" + name_]++;
  }
  std::vector<Use> input_uses() const {
    std::vector<Use> uses;
    for (const Input& input : inputs_)
      uses.push_back(use_of(input.tensor, input.write));
    return uses;
  }

  double flop_estimate(const std::vector<Tensor>& results) const {
    auto named = [&](const char* part) { return name_.find(part) != std::string::npos; };
    auto product = [&](size_t a, size_t b) {
      if (std::max(a, b) >= inputs_.size() || inputs_[a].tensor.dim() < 2 || inputs_[b].tensor.dim() < 2)
        return 0.0;
      return 2.0 * inputs_[a].tensor.numel() * inputs_[b].tensor.size(-1);
    };
    if (named("addmm") || named("baddbmm"))
      return product(1, 2);
    if (named("::mm") || named("::bmm"))
      return product(0, 1);
    if (named("scaled_dot_product") && inputs_.size() >= 2 && inputs_[1].tensor.dim() >= 2)
      return 4.0 * inputs_[0].tensor.numel() * inputs_[1].tensor.size(-2);
    if (named("::convolution") && inputs_.size() >= 2 && results.size() == 1 && inputs_[1].tensor.size(0) > 0)
      return 2.0 * results[0].numel() * inputs_[1].tensor.numel() / inputs_[1].tensor.size(0);
    return 0;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  std::string name_;
  Stack args_;
  std::vector<Input> inputs_; // the tensors on the device
  c10::Device device_{kDevice};
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Stack results = OperatorCall(op, *stack).run();
  stack->erase(stack->end() - (ptrdiff_t)op.schema().arguments().size(), stack->end());
  for (IValue& value : results)
    stack->push_back(std::move(value));
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // torch would take these apart for a device it does not know; they must reach the CPU's fused kernels
  // whole, or results are not equal bit for bit.
  for (const char* name :
       {"scaled_dot_product_attention", "native_layer_norm", "native_group_norm", "convolution"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

} // namespace simdev
