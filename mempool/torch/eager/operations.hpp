// Operations in the interposer: traits, signatures, and storages. Included by interposer.cpp alone.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

// torch/csrc/profiler/orchestration/observer.h, which would need more headers
namespace torch::profiler::impl {
TORCH_API bool profilerEnabled();
}

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::impl::TorchDispatchModeTLS;

constexpr DispatchKey kKey = DispatchKey::DeferredInit;
constexpr std::size_t kMostKnown = std::size_t{1} << 16;  // signatures that are known at most
// Prefixes of composite operations whose kernels access memory themselves: of all arguments, which count as written, or
// of integers (lengths and offsets), which they only read.
constexpr std::array<std::string_view, 5> kAccessAll = {"_sobol_engine_", "_saturate_weight_to_fp16", "fbgemm_",
                                                        "choose_qparams_optimized", "_rowwise_prune"};
constexpr std::array<std::string_view, 6> kReadIntegers = {"lstm.",     "gru.",                 "rnn_tanh.",
                                                           "rnn_relu.", "_pad_packed_sequence", "tensor_split."};
// Prefixes of views that copy no sparse tensor; the same list as in operator_traits.py.
constexpr std::array<std::string_view, 6> kShareSparse = {"_indices.", "_values.", "indices.", "values.", "detach.", "alias."};
// Arguments that kernels update without a declaration in the schema, except in operations with these parts of names,
// and one argument of a single operation; the same lists as in mempool/recording/torch/operations.py.
constexpr std::array<std::string_view, 3> kUndeclared = {"running_mean", "running_var", "dropout_state"};
constexpr std::array<std::string_view, 4> kOnlyRead = {"backward", "functional", "no_training", "no_update"};

// Return whether an operation's kernel may write an argument.
bool is_written(const std::string& name, const c10::Argument& argument) {
  if (const auto* alias = argument.alias_info(); alias != nullptr) return alias->isWrite();
  if (std::find(kUndeclared.begin(), kUndeclared.end(), argument.name()) != kUndeclared.end())
    return std::none_of(kOnlyRead.begin(), kOnlyRead.end(), [&](auto part) { return name.find(part) != std::string::npos; });
  return name.starts_with("mkldnn_rnn_layer_backward.") && argument.name() == "workspace";
}

enum class Lent { kNothing, kIntegers, kAll };

struct Traits {
  bool composite;   // made of other operations, which arrive here themselves
  Lent lent;        // arguments that a composite operation accesses past the dispatcher
  bool writes;      // may write arguments
  bool inert;       // without tensors among arguments and results, such as profiler marks
  bool repeatable;  // neither writes arguments nor draws random numbers
  bool reads;       // reads a single number
  bool bare;  // of another library, without an autograd kernel: autograd records the inner operations
  bool aliases;  // PyTorch's own; returns only views of its arguments
  bool shares;  // an alias that returns views of sparse tensors, too; other aliases copy them
};

struct Operation {
  c10::OperatorName name;  // the schema's address may be reused by another operator
  std::uint64_t hash;      // of the name
  Traits traits;
  std::vector<std::size_t> written{};  // indices of the arguments that may be written
  // Learned from the mode:
  std::atomic<bool> views{false};
  std::atomic<bool> blank{false};        // leaves results unwritten
  std::atomic<bool> has_entries{false};  // ran on single entries, see entries.hpp
};

// Table of the operations seen so far, with stable addresses.
class Operations {
 public:
  Operation& of(const c10::OperatorHandle& op) {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<Operation>& found = known_[&op.schema()];
    if (found && found->name == op.operator_name()) return *found;
    if (found) ended_.push_back(std::move(found));
    found = made_of(op);
    return *found;
  }

  // Return a met operation, or null.
  Operation* find(const c10::FunctionSchema* schema) {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(schema);
    return found == known_.end() ? nullptr : found->second.get();
  }

 private:
  static std::unique_ptr<Operation> made_of(const c10::OperatorHandle& op) {
    const auto& tags = op.getTags();
    const bool draws = std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end();
    const auto is_number = [](const c10::Argument& one) {
      const std::string type = one.type()->str();
      return type.find("Tensor") == std::string::npos && type.find("Storage") == std::string::npos && type != "Any";
    };
    constexpr std::array<DispatchKey, 3> kAutograd = {DispatchKey::Autograd, DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA};
    const auto has_kernel = [&](DispatchKey key) { return op.hasKernelForDispatchKey(key); };
    const auto is_alias = [](const c10::Argument& one) { return one.alias_info() != nullptr; };
    const c10::FunctionSchema& schema = op.schema();
    const auto space = schema.getNamespace().value_or("");
    const bool known = space == "aten" || space == "prim" || space == "prims" || space == "profiler";
    const bool composite = op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    const std::string name = std::string(std::string_view(op.operator_name().name).substr(space.size() + 2)) + ".";
    const auto begins = [&](const auto& names) {
      return std::any_of(names.begin(), names.end(), [&](std::string_view one) { return name.starts_with(one); });
    };
    const bool updates = std::any_of(schema.arguments().begin(), schema.arguments().end(),
                                     [&](const c10::Argument& one) { return is_written(name, one); });
    const bool accesses = composite && (!known || begins(kAccessAll));
    std::unique_ptr<Operation> made(new Operation{
        .name = op.operator_name(),
        .hash = std::hash<c10::OperatorName>{}(op.operator_name()),
        .traits = {.composite = composite,
                   .lent = accesses                             ? Lent::kAll
                           : composite && begins(kReadIntegers) ? Lent::kIntegers
                                                                : Lent::kNothing,
                   .writes = !known || accesses || schema.is_mutable() || updates,
                   .inert = known && std::all_of(schema.arguments().begin(), schema.arguments().end(), is_number) &&
                            std::all_of(schema.returns().begin(), schema.returns().end(), is_number),
                   .repeatable = !draws && !schema.is_mutable() && !updates,
                   .reads = name.starts_with("_local_scalar_dense."),
                   .bare = !known && !composite && std::none_of(kAutograd.begin(), kAutograd.end(), has_kernel),
                   .aliases = space == "aten" && !composite && !schema.is_mutable() && !schema.returns().empty() &&
                              std::all_of(schema.returns().begin(), schema.returns().end(), is_alias),
                   .shares = space == "aten" && begins(kShareSparse)},
    });
    for (std::size_t at = 0; at < schema.arguments().size(); ++at) {
      if (!known || is_written(name, schema.arguments()[at])) made->written.push_back(at);
    }
    return made;
  }

  std::mutex mutex_;
  std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Operation>> known_;
  std::vector<std::unique_ptr<Operation>> ended_;  // of operators whose schema's address is reused; others may hold references
};

Operations& operations() {
  static auto* const made = new Operations;  // operations may run until the very end
  return *made;
}

bool requires_grad(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() && value.toTensor().requires_grad();
  if (!value.isList()) return false;
  const auto list = value.toListRef();
  return std::any_of(list.begin(), list.end(), requires_grad);
}

// Return whether autograd records the inner operations of an operation, which it would miss below the mode.
bool records_within(const c10::OperatorHandle& op, const Traits& traits, const torch::jit::Stack& stack) {
  if (!traits.bare || !at::GradMode::is_enabled()) return false;
  return std::any_of(stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()), stack.end(), requires_grad);
}

// Return whether a mode would receive a composite operation as a whole, as in inference mode and for tensors made
// there.
bool arrives_whole(const Traits& traits, DispatchKeySet below) {
  return traits.composite && !below.has_any(c10::autograd_dispatch_keyset);
}

using Storages = c10::SmallVector<const c10::Storage*, 8>;
using Addresses = c10::SmallVector<const c10::StorageImpl*, 8>;

Addresses addresses_of(const Storages& storages) {
  Addresses found;
  for (const c10::Storage* one : storages) found.push_back(one->unsafeGetStorageImpl());
  return found;
}

// Collect the storages of tensors on a device.
void add_storages(const c10::IValue& value, c10::DeviceType device, Storages& found) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.has_storage() && tensor.device().type() == device)
      found.push_back(&tensor.unsafeGetTensorImpl()->unsafe_storage());
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) add_storages(one, device, found);
  }
}

// Return the storages on a device that an operation may write.
Storages written_by(const Operation& operation, const c10::OperatorHandle& op, const torch::jit::Stack& stack, c10::DeviceType device) {
  Storages found;
  const auto begin = stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  for (const std::size_t one : operation.written) add_storages(*(begin + static_cast<std::ptrdiff_t>(one)), device, found);
  return found;
}

// Map of storages by address, whose entries have a weak reference `storage`.
template <class Entry>
class WeakStorages : public std::unordered_map<const c10::StorageImpl*, Entry> {
 public:
  // Remove the entries of ended storages if there are many new entries since the last removal.
  void sweep_if_large() {
    if (this->size() < sweep_at_) return;
    sweep();
    sweep_at_ = std::max(kLeastSwept, 2 * this->size());
  }
  void sweep() {
    std::erase_if(*this, [](const auto& one) { return one.second.storage.expired(); });
  }

 private:
  static constexpr std::size_t kLeastSwept = 4096;
  std::size_t sweep_at_ = kLeastSwept;
};

// Hash of everything that determines the memory footprint of an operation, and the storages among its arguments.
class Signature {
 public:
  Signature(c10::DeviceType device, const Operation& operation, Storages& storages) : device_(device), storages_(storages) {
    mix(operation.hash);
    mix(static_cast<std::uint64_t>(c10::typeMetaToScalarType(c10::get_default_dtype())));
  }

  // Return false for a value of an unsupported type.
  bool add(const c10::IValue& value) {
    if (value.isTensor()) return add(value.toTensor());
    if (value.isNone()) return mix(1);
    if (value.isInt()) return mix(2) && mix(static_cast<std::uint64_t>(value.toInt()));
    if (value.isBool()) return mix(value.toBool() ? 3 : 4);
    if (value.isDouble()) {
      const double number = value.toDouble();
      std::uint64_t bits = 0;
      std::memcpy(&bits, &number, sizeof bits);
      fractions_ = mixed(fractions_, bits);
      return mix(5);
    }
    if (value.isDevice()) return mix(10) && mix(static_cast<std::uint64_t>(value.toDevice().type()));
    if (value.isString()) return mix(11) && mix(std::hash<std::string_view>{}(value.toStringView()));
    if (value.isComplexDouble()) return mix(12);
    if (value.isGenerator()) return mix(13);
    if (value.isList()) {
      sized_ |= value.isIntList();
      mix(14);
      mix(value.toListRef().size());
      for (const c10::IValue& one : value.toListRef())
        if (!add(one)) return false;
      return true;
    }
    return false;
  }

  // Return the signature of all these values; 0 if one is of an unsupported type.
  template <class Iterator>
  std::uint64_t of(Iterator begin, Iterator end) {
    return std::all_of(begin, end, [&](const c10::IValue& one) { return add(one); }) ? value() : 0;
  }

 private:
  // Floats count only without other sizes, as for arange; in other operations they are parameters such as learning
  // rates.
  std::uint64_t value() const { return storages_.empty() && !sized_ ? mixed(hash_, fractions_) : hash_; }
  static std::uint64_t mixed(std::uint64_t hash, std::uint64_t value) {  // of splitmix64 (Steele et al., OOPSLA 2014)
    hash += 0x9e3779b97f4a7c15ULL ^ value;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9ULL;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebULL;
    return hash ^ (hash >> 31);
  }
  bool mix(std::uint64_t value) {
    hash_ = mixed(hash_, value);
    return true;
  }
  bool add(const at::Tensor& tensor) {
    if (!tensor.defined()) return mix(16);
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (impl.is_python_dispatch() || !impl.has_storage() || impl.has_symbolic_sizes_strides()) return false;
    mix(impl.is_contiguous() ? 17 : 18);
    mix(static_cast<std::uint64_t>(c10::typeMetaToScalarType(impl.dtype())));
    mix(static_cast<std::uint64_t>(impl.device_type()));
    mix(static_cast<std::uint64_t>(impl.dim()));
    for (const std::int64_t size : impl.sizes()) mix(static_cast<std::uint64_t>(size));
    if (!impl.is_contiguous())
      for (const std::int64_t stride : impl.strides()) mix(static_cast<std::uint64_t>(stride));
    const bool number = impl.is_wrapped_number();  // made for this operation alone
    if (impl.device_type() == device_ && !number && impl.unsafe_storage().nbytes() > 0) storages_.push_back(&impl.unsafe_storage());
    return true;
  }

  c10::DeviceType device_;
  std::uint64_t hash_ = 0, fractions_ = 0;
  bool sized_ = false;
  Storages& storages_;
};

// Deleter of parked storages: the host copy is freed by others.
void keep(void*) {}

bool is_parked(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get_deleter() == &keep;
}

// Return uint8[nbytes] over a storage, without an operation.
at::Tensor bytes_of(c10::Storage storage) {
  const auto size = static_cast<std::int64_t>(storage.nbytes());
  const DispatchKeySet keys(storage.device_type() == c10::DeviceType::CUDA ? DispatchKey::CUDA : DispatchKey::CPU);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, caffe2::TypeMeta::Make<std::uint8_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({size});
  return tensor;
}

bool is_any_parked(const Storages& storages) {
  return std::any_of(storages.begin(), storages.end(), [](const c10::Storage* one) { return is_parked(*one); });
}

c10::List<at::Tensor> parked_among(const Storages& storages) {
  c10::List<at::Tensor> found;
  for (const c10::Storage* one : storages)
    if (is_parked(*one)) found.push_back(bytes_of(*one));
  return found;
}

// Storages with a good copy on the host.
class Watched {
 public:
  void add(const c10::StorageImpl* storage) {
    const std::lock_guard lock(mutex_);
    if (storages_.size() >= kMost) storages_.clear();  // their copies then count as stale
    storages_.insert(storage);
  }
  void remove(const Storages& storages) {
    if (storages.empty()) return;
    const std::lock_guard lock(mutex_);
    if (storages_.empty()) return;
    for (const c10::Storage* one : storages) storages_.erase(one->unsafeGetStorageImpl());
  }
  bool has(const c10::StorageImpl* storage) {
    const std::lock_guard lock(mutex_);
    return storages_.contains(storage);
  }

 private:
  static constexpr std::size_t kMost = std::size_t{1} << 16;
  std::mutex mutex_;
  std::unordered_set<const c10::StorageImpl*> storages_;
};

Watched& watched() {
  static auto* const made = new Watched;
  return *made;
}

// Return the thread's current stream; nothing on a CPU.
std::optional<c10::Stream> current_stream(c10::DeviceType device) {
  if (device == c10::DeviceType::CPU) return {};
  const c10::impl::VirtualGuardImpl guard(device);
  return guard.getStream(guard.getDevice());
}

c10::StreamId stream_now(c10::DeviceType device) {
  const auto stream = current_stream(device);
  return stream ? stream->id() : 0;
}

// Number of unseen operations under way, number of those that may have written so far, and whether a storage is being
// parked.
std::atomic<int> unseen_operations{0};
std::atomic<std::uint64_t> unseen_writes{0};
std::atomic<bool> parking{false};

thread_local bool is_off_stack = false;  // the mode is off this thread's stack temporarily

// Guard that takes the mode off the stack and excludes the bypass key.
class Hidden {
 public:
  Hidden() : mode_(TorchDispatchModeTLS::pop_stack()) {}
  ~Hidden() {
    TorchDispatchModeTLS::push_non_infra_mode_onto_stack(std::move(mode_));
    is_off_stack = was_off_stack_;
  }
  Hidden(const Hidden&) = delete;
  Hidden& operator=(const Hidden&) = delete;

 private:
  bool was_off_stack_ = std::exchange(is_off_stack, true);
  c10::impl::ExcludeDispatchKeyGuard guard_{kKey};
  std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> mode_;
};

thread_local bool is_internal = false;  // this thread runs the offloading's own operations, or inside one that the mode handles

// Marks the mode's call of a program's operation, which profiles already have: profiles show only the inner operations
// of the call.
class Repeat {
 public:
  void begin() {
    end();
    if (!torch::profiler::impl::profilerEnabled() || !at::isRecordFunctionEnabled()) return;
    at::enableRecordFunction(false);
    was_excluded_ = c10::impl::tls_is_dispatch_key_excluded(kKey);
    c10::impl::tls_set_dispatch_key_excluded(kKey, false);  // so that the call arrives here
    is_on_ = true;
  }
  void end() {
    if (!std::exchange(is_on_, false)) return;
    c10::impl::tls_set_dispatch_key_excluded(kKey, was_excluded_);
    at::enableRecordFunction(true);
  }

 private:
  bool is_on_ = false, was_excluded_ = false;
};
thread_local Repeat repeat;

struct InternalScope {
  bool before = std::exchange(is_internal, true);
  InternalScope() = default;
  ~InternalScope() { is_internal = before; }
  InternalScope(const InternalScope&) = delete;
  InternalScope& operator=(const InternalScope&) = delete;
};

// PyTorch's records of this thread's operations. While there is any callback, such as this library's own, PyTorch makes a record of
// each operation, of its inner operations, and of each node of a backward pass, which takes as long as everything else that follows a
// schedule. The callback has no work in a thread whose operations arrive here, so such a thread makes no records while it follows
// a schedule, unless others have callbacks. A backward pass hands this state on to its threads.
class Records {
 public:
  // Make no more records, if nobody else has callbacks.
  void stop() {
    resume();
    if (!c10::impl::tls_is_dispatch_key_included(kKey) || TorchDispatchModeTLS::stack_len() == 0 || has_listeners()) return;
    have_stopped_ = true;
    at::enableRecordFunction(false);
  }
  // Make records again. Operations that did not arrive here meanwhile may have written.
  void resume() {
    if (!have_stopped_ || at::isRecordFunctionEnabled()) return;
    at::enableRecordFunction(true);
    if (!c10::impl::tls_is_dispatch_key_included(kKey)) ++unseen_writes;
  }
  // Make records again if the thread no longer follows a schedule, its operations no longer arrive here, or a profiler has begun. The
  // end of a backward pass may have restored the state of its beginning.
  void update(bool is_following) {
    if (!have_stopped_) return;
    if (!is_following || !c10::impl::tls_is_dispatch_key_included(kKey) || torch::profiler::impl::profilerEnabled()) resume();
  }

 private:
  static bool has_listeners() {
    for (std::size_t at = 0; at < static_cast<std::size_t>(at::RecordScope::NUM_SCOPES); ++at) {
      const auto scope = static_cast<at::RecordScope>(at);
      const auto found = at::getStepCallbacksUnlessEmpty(scope);
      const std::size_t own = scope == at::RecordScope::FUNCTION ? 1 : 0;
      if (found && found->callbacks_.size() > own) return true;
    }
    return false;
  }

  bool have_stopped_ = false;  // at any time
};
thread_local Records records;

// Call a function of interposer.py, and return the results.
torch::jit::Stack call_python(const c10::OperatorHandle& function, torch::jit::Stack arguments) {
  const InternalScope scope;
  function.callBoxedForDispatchKey(DispatchKey::CPU, arguments);
  return arguments;
}

c10::OperatorHandle function_named(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

// Return the only mode that would see the operation next, or null if a transform, autocast or Python hook of saved
// tensors comes before.
const void* only_mode(DispatchKeySet below) {
  static const std::uint64_t ordinary =
      (DispatchKeySet({DispatchKey::Dense, DispatchKey::BackendSelect, DispatchKey::Python, DispatchKey::ADInplaceOrView,
                       DispatchKey::AutogradOther, DispatchKey::AutogradFunctionality}) |
       DispatchKeySet({c10::BackendComponent::CPUBit, c10::BackendComponent::CUDABit}))
          .raw_repr();
  if (!below.has(DispatchKey::Python) || (below.raw_repr() & ~ordinary) != 0 || TorchDispatchModeTLS::stack_len() != 1) return nullptr;
  if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return nullptr;
  const auto& top = TorchDispatchModeTLS::get_stack_at(0);
  return top->ptr(&top->pyinterpreter());
}

// The program's operations that may skip the mode: those of one mode, device and stream.
struct Place {
  std::atomic<const void*> mode{nullptr};
  std::atomic<c10::DeviceType> device{c10::DeviceType::CPU};
  std::atomic<c10::StreamId> stream{0};

  void set(const void* new_mode, bool cuda) {
    device = cuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
    stream = stream_now(device);
    mode = new_mode;
  }
  // Return whether an operation that would reach the mode `only` (may be null) is of this mode, device and stream.
  bool is_here(const void* only) const { return only != nullptr && mode.load() == only && stream_now(device) == stream.load(); }
};

// Return whether a tensor of a class with its own dispatch is among the arguments.
bool has_dispatching_tensor(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() && value.toTensor().unsafeGetTensorImpl()->is_python_dispatch();
  if (!value.isList()) return false;
  const auto list = value.toListRef();
  return std::any_of(list.begin(), list.end(), has_dispatching_tensor);
}

// Run an operation without the mode. With `repeats`, an operation without memory leaves its arguments on the stack for
// another try, and returns false.
bool run_hidden(const c10::OperatorHandle& op, DispatchKeySet below, torch::jit::Stack* stack, bool repeats) {
  const auto given = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  c10::SmallVector<c10::IValue, 8> again;  // the arguments, which the call consumes
  if (repeats) again.append(given, stack->end());
  const auto others = given - stack->begin();
  try {
    const InternalScope scope;  // inner operations need no handling
    const Hidden hidden;
    op.redispatchBoxed(below.remove(DispatchKey::Python), stack);
    return true;
  } catch (const c10::OutOfMemoryError&) {
    if (again.empty()) throw;
  }
  stack->erase(stack->begin() + others, stack->end());
  stack->insert(stack->end(), again.begin(), again.end());
  return false;
}

bool is_on_cpu(const c10::IValue& value) { return !value.isTensor() || !value.toTensor().defined() || value.toTensor().is_cpu(); }

// Run an operation that makes views, or reads a number on the CPU, without the mode, since a parked storage has its
// size and bytes. Return false if the mode must see the operation.
bool run_view(const c10::OperatorHandle& op, const Traits& traits, DispatchKeySet below, torch::jit::Stack* stack) {
  const auto begin = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  if (std::any_of(begin, stack->end(), has_dispatching_tensor)) return false;
  if (traits.reads && !std::all_of(begin, stack->end(), is_on_cpu)) return false;  // its stream may have to wait
  return run_hidden(op, below, stack, false);
}

// Return the signature of an operation, for comparison with learned signatures, and collect the storages.
std::uint64_t signature_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const Operation& operation,
                           c10::DeviceType device, Storages& storages) {
  if (operation.traits.inert) return operation.hash | 1;
  Signature sign(device, operation, storages);
  return sign.of(stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()), stack.end());
}

// Operation on its way to the mode, which may let the bypass learn it.
struct Awaited {
  const c10::FunctionSchema* schema;
  std::uint64_t signature;  // for bypass and follower; 0: they learn nothing of this operation
  std::uint64_t entry = 0;  // for loops over single entries
};
thread_local std::vector<Awaited> awaited;

// Run an operation that the mode will see and may let the interposer learn.
void run_awaited(const c10::OperatorHandle& op, DispatchKeySet below, torch::jit::Stack* stack, std::uint64_t signature,
                 std::uint64_t entry = 0) {
  struct Waiting {
    explicit Waiting(const Awaited& one) { awaited.push_back(one); }
    ~Waiting() { awaited.pop_back(); }
  };
  const Waiting waiting({&op.schema(), signature, entry});
  op.redispatchBoxed(below, stack);
}

// Return the operation on its way to the mode if it has this name, else null.
Operation* awaited_operation(const char* name, const char* overload) {
  if (awaited.empty()) return nullptr;
  const c10::FunctionSchema* schema = awaited.back().schema;
  if (schema->name() != name || schema->overload_name() != overload) return nullptr;
  return operations().find(schema);
}

}  // namespace

#define MEMPOOL_EXPORT extern "C" __attribute__((visibility("default")))
