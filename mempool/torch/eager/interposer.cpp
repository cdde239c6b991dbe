// Stands in front of PyTorch's dispatcher while tensors are offloaded (interposer.py). Built on the user's machine against the
// user's torch (compiled_library.py).
//
// A fallback for DeferredInit, a key that PyTorch reserves for others and dispatches before autocast and autograd. In a thread
// that includes the key, every operation arrives here first, whatever the program does with dispatch modes. Three cases:
//
// * The offloading mode will see the operation: dispatch as usual. A composite operation that accesses memory itself, unseen by
//   the mode, has the storages concerned lent meanwhile.
// * The mode will not see the operation, as in another thread or with the mode disabled: all storages among the arguments are
//   lent, which reloads and pins them.
// * The bypass is open (bypass.py), and the mode has seen the operation with tensors of the same shapes, and there is ample room:
//   the operation runs while the mode is off the stack, and its storages are recorded in the order of their last use.
//
// An operation that does not arrive here, as in a thread that does not include the key yet or below another dispatch mode, is seen
// by a global RecordFunction callback: no storage gives up memory until the operation has ended, and if it may write, all copies
// on the host count as stale.
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
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
#include <utility>
#include <vector>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::impl::TorchDispatchModeTLS;

constexpr DispatchKey kKey = DispatchKey::DeferredInit;
// Beginnings of the names of composite operations whose kernels access the memory of their arguments themselves: of all
// arguments, which count as written, or of integers (lengths and offsets), which they only read.
constexpr std::array<std::string_view, 5> kAccessAll = {"_sobol_engine_", "_saturate_weight_to_fp16", "fbgemm_",
                                                        "choose_qparams_optimized", "_rowwise_prune"};
constexpr std::array<std::string_view, 6> kReadIntegers = {"lstm.",     "gru.",                 "rnn_tanh.",
                                                           "rnn_relu.", "_pad_packed_sequence", "tensor_split."};
constexpr std::size_t kMostKnown = std::size_t{1} << 16;
constexpr std::size_t kLeastSwept = 4096;

struct Used {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps the address from being reused
  std::uint64_t last;
  bool blank;  // not written yet: a C++ function may write next, past the dispatcher
};

enum class Lent { kNothing, kIntegers, kAll };

struct Traits {
  bool composite;   // made of other operations, which arrive here themselves
  Lent lent;        // arguments that a composite operation accesses past the dispatcher
  bool writes;      // may write arguments
  bool inert;       // without tensors among arguments and results, such as profiler marks
  bool repeatable;  // neither writes arguments nor draws random numbers
  // Learned from the mode:
  bool views = false;
  bool blank = false;  // leaves results unwritten
};

struct Operation {
  c10::OperatorName name;  // the schema's address may be reused by another operator
  std::uint64_t hash;      // of the name
  Traits traits;
};

struct Bypass {
  std::atomic<bool> open{false};
  // These are written while it is not open.
  std::atomic<const void*> mode{nullptr};
  std::atomic<c10::DeviceType> device{c10::DeviceType::CPU};
  std::atomic<c10::StreamId> stream{0};
  std::mutex mutex;  // of all below
  std::int64_t (*room)(void*) = nullptr;
  void* client = nullptr;
  std::int64_t reserve = 0;
  std::unordered_map<const c10::FunctionSchema*, Operation> operations;
  std::unordered_map<std::uint64_t, std::int64_t> needs;  // bytes, by operation and what it is given
  std::unordered_map<const c10::StorageImpl*, Used> used;
  std::size_t sweep_at = kLeastSwept;
  std::uint64_t clock = 0;
  std::uint64_t passed = 0;

  Operation& operation(const c10::OperatorHandle& op) {
    const auto found = operations.find(&op.schema());
    if (found != operations.end() && found->second.name == op.operator_name()) return found->second;
    const auto& tags = op.getTags();
    const bool draws = std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end();
    const auto is_number = [](const c10::Argument& one) {
      const std::string type = one.type()->str();
      return type.find("Tensor") == std::string::npos && type.find("Storage") == std::string::npos && type != "Any";
    };
    const c10::FunctionSchema& schema = op.schema();
    const auto space = schema.getNamespace().value_or("");
    const bool known = space == "aten" || space == "prim" || space == "prims" || space == "profiler";
    const bool composite = op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    const std::string name = std::string(std::string_view(op.operator_name().name).substr(space.size() + 2)) + ".";
    const auto begins = [&](const auto& names) {
      return std::any_of(names.begin(), names.end(), [&](std::string_view one) { return name.starts_with(one); });
    };
    const bool accesses = composite && (!known || begins(kAccessAll));
    Operation made{
        .name = op.operator_name(),
        .hash = std::hash<c10::OperatorName>{}(op.operator_name()),
        .traits = {.composite = composite,
                   .lent = accesses                             ? Lent::kAll
                           : composite && begins(kReadIntegers) ? Lent::kIntegers
                                                                : Lent::kNothing,
                   .writes = !known || accesses || schema.is_mutable(),
                   .inert = known && std::all_of(schema.arguments().begin(), schema.arguments().end(), is_number) &&
                            std::all_of(schema.returns().begin(), schema.returns().end(), is_number),
                   .repeatable = !draws && !schema.is_mutable()},
    };
    return operations.insert_or_assign(&schema, std::move(made)).first->second;
  }

  bool knows(const c10::Storage& storage) const { return used.contains(storage.unsafeGetStorageImpl()); }

  // A view of an unwritten storage leaves it unwritten.
  void use(const c10::Storage& storage, bool views) {
    const auto found = used.find(storage.unsafeGetStorageImpl());
    if (found == used.end()) return;
    found->second.last = clock;
    found->second.blank &= views;
  }

  void add(const c10::Storage& storage, bool blank) {
    used.try_emplace(storage.unsafeGetStorageImpl(), Used{storage.getWeakStorageImpl(), clock, blank});
  }

  void sweep() {
    if (used.size() < sweep_at) return;
    std::erase_if(used, [](const auto& one) { return one.second.storage.expired(); });
    sweep_at = std::max(kLeastSwept, 2 * used.size());
  }
};

Bypass& bypass() {
  static auto* const made = new Bypass;  // operations may run until the very end
  return *made;
}

// Operations on their way to the mode, which may have the bypass learn them.
struct Awaited {
  const c10::FunctionSchema* schema;
  std::uint64_t signature;
};
thread_local std::vector<Awaited> awaited;

// Hash of everything that determines the memory footprint of an operation.
class Signature {
 public:
  Signature(c10::DeviceType device, const Operation& operation) : device_(device) {
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

  // Floats count only where nothing else has a size, as for arange; elsewhere they are learning rates and the like.
  std::uint64_t value() const { return storages_.empty() && !sized_ ? mixed(hash_, fractions_) : hash_; }
  const c10::SmallVector<const c10::Storage*, 8>& storages() const { return storages_; }

 private:
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
  c10::SmallVector<const c10::Storage*, 8> storages_;
};

c10::StreamId stream_now(c10::DeviceType device) {
  const c10::impl::VirtualGuardImpl guard(device);
  return guard.getStream(guard.getDevice()).id();
}

// Return whether our mode alone would see the operation: no transform, autocast or other mode, no hooks of saved tensors, which
// run Python in the middle of the operation; and the current stream is the stream of all operations.
bool seen_by_us_alone(const Bypass& all, DispatchKeySet below) {
  static const std::uint64_t ordinary = (DispatchKeySet({DispatchKey::Dense, DispatchKey::BackendSelect, DispatchKey::Python,
                                                         DispatchKey::ADInplaceOrView, DispatchKey::AutogradOther, DispatchKey::AutogradFunctionality}) |
                                         DispatchKeySet({c10::BackendComponent::CPUBit, c10::BackendComponent::CUDABit}))
                                            .raw_repr();
  if (!below.has(DispatchKey::Python) || (below.raw_repr() & ~ordinary) != 0 || TorchDispatchModeTLS::stack_len() != 1) return false;
  const auto& top = TorchDispatchModeTLS::get_stack_at(0);
  return top->ptr(&top->pyinterpreter()) == all.mode.load() && at::SavedTensorDefaultHooks::get_tls_state().stack.empty() &&
         stream_now(all.device) == all.stream.load();
}

// Record the new storages among the results.
void add_results(Bypass& all, const torch::jit::Stack& stack, std::size_t count, bool blank) {
  const auto add = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.device().type() != all.device) return;
    all.add(tensor.unsafeGetTensorImpl()->unsafe_storage(), blank);
  };
  for (auto at = stack.end() - static_cast<std::ptrdiff_t>(count); at != stack.end(); ++at) {
    if (at->isTensor()) {
      add(at->toTensor());
    } else if (at->isTensorList()) {
      for (const at::Tensor& one : at->toTensorList()) add(one);
    }
  }
}

// Deleter of parked storages: the host copy is freed by others.
void keep(void*) {}

// The installed modes, by device; null where none is.
constexpr std::array<c10::DeviceType, 2> kDevices = {c10::DeviceType::CPU, c10::DeviceType::CUDA};
using Devices = std::array<bool, 2>;
std::array<std::atomic<const void*>, 2> installed;
// Unseen operations under way, those that may have written so far, and whether a storage gives up memory just now.
std::atomic<int> unseen_operations{0};
std::atomic<std::uint64_t> unseen_writes{0};
std::atomic<bool> parking{false};
thread_local bool is_ours = false;  // this thread runs operations of the offloading itself

bool any_installed() {
  return std::any_of(installed.begin(), installed.end(), [](const auto& mode) { return mode.load(std::memory_order_acquire); });
}

// Return whether a mode will see the operation, as far as other modes pass it on.
bool will_see(const void* mode, DispatchKeySet below) {
  if (!below.has(DispatchKey::Python)) return false;
  for (std::int64_t at = 0; at < TorchDispatchModeTLS::stack_len(); ++at) {
    const auto& one = TorchDispatchModeTLS::get_stack_at(at);
    if (one->ptr(&one->pyinterpreter()) == mode) return true;
  }
  return false;
}

// Return uint8[nbytes] over a storage, without an operation.
at::Tensor bytes_of(c10::Storage storage) {
  const auto size = static_cast<std::int64_t>(storage.nbytes());
  const DispatchKeySet keys(storage.device_type() == c10::DeviceType::CUDA ? DispatchKey::CUDA : DispatchKey::CPU);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, caffe2::TypeMeta::Make<std::uint8_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({size});
  return tensor;
}

// Collect the arguments on some devices, or integer arguments only: uint8[n] over each storage, and sparse tensors as they are.
void collect(const c10::IValue& value, const Devices& devices, bool integers, c10::List<at::Tensor>& found) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || (integers && !c10::isIntegralType(tensor.scalar_type(), false))) return;
    if (!tensor.has_storage()) {
      if (tensor.layout() != at::kStrided && !tensor.unsafeGetTensorImpl()->is_python_dispatch()) found.push_back(tensor);
      return;
    }
    const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
    if (!storage || storage.sym_nbytes().maybe_as_int().value_or(0) == 0) return;
    for (std::size_t at = 0; at < kDevices.size(); ++at)
      if (devices[at] && storage.device_type() == kDevices[at]) found.push_back(bytes_of(storage));
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) collect(one, devices, integers, found);
  }
}

// Guard that takes the mode off the stack and excludes the bypass key.
class Hidden {
 public:
  Hidden() : mode_(TorchDispatchModeTLS::pop_stack()) {}
  ~Hidden() { TorchDispatchModeTLS::push_non_infra_mode_onto_stack(std::move(mode_)); }
  Hidden(const Hidden&) = delete;
  Hidden& operator=(const Hidden&) = delete;

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_{kKey};
  std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> mode_;
};

// Call a function of interposer.py.
void call_python(const c10::OperatorHandle& function, torch::jit::Stack arguments) {
  struct Ours {
    bool before = std::exchange(is_ours, true);
    ~Ours() { is_ours = before; }
  };
  const Ours ours;
  function.callBoxedForDispatchKey(DispatchKey::CPU, arguments);
}

c10::OperatorHandle function_named(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

// Run an operation with the storages among its arguments reloaded and pinned.
void run_lent(const c10::OperatorHandle& op, DispatchKeySet below, torch::jit::Stack* stack, const Devices& devices, bool integers,
              bool writes) {
  static const c10::OperatorHandle lend = function_named("mempool_interposer::lend");
  static const c10::OperatorHandle give_back = function_named("mempool_interposer::give_back");
  c10::List<at::Tensor> storages;
  for (auto at = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()); at != stack->end(); ++at)
    collect(*at, devices, integers, storages);
  if (storages.empty()) {
    op.redispatchBoxed(below, stack);
    return;
  }
  call_python(lend, {storages, toString(op.operator_name()), writes});
  try {
    op.redispatchBoxed(below, stack);
  } catch (...) {
    call_python(give_back, {});
    throw;
  }
  call_python(give_back, {});
}

// Return whether all tensors among the arguments are wrapped numbers, as in `x + 1`, and there is one.
bool are_numbers(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto begin = stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  bool any = false;
  for (auto at = begin; at != stack.end(); ++at) {
    if (at->isTensorList() || at->isOptionalTensorList()) return false;
    if (!at->isTensor() || !at->toTensor().defined()) continue;
    if (!at->toTensor().unsafeGetTensorImpl()->is_wrapped_number()) return false;
    any = true;
  }
  return any;
}

// An operation that is not intercepted.
class UnseenOperation : public at::ObserverContext {
 public:
  explicit UnseenOperation(bool writes) : writes_(writes) {
    ++unseen_operations;
    while (parking.load()) std::this_thread::yield();
  }
  ~UnseenOperation() override {
    if (writes_) ++unseen_writes;
    --unseen_operations;
  }

 private:
  bool writes_;
};

Traits traits_of(const c10::OperatorHandle& op) {
  Bypass& all = bypass();
  const std::lock_guard lock(all.mutex);
  return all.operation(op).traits;
}

// Called before each operation of any thread: includes the key in a thread that lacks it, for the operations that follow.
std::unique_ptr<at::ObserverContext> meet(const at::RecordFunction& function) {
  const bool excluded = c10::impl::tls_is_dispatch_key_excluded(kKey);
  if (is_ours || (c10::impl::tls_is_dispatch_key_included(kKey) && !excluded) || !any_installed()) return nullptr;
  if (!excluded) c10::impl::tls_set_dispatch_key_included(kKey, true);
  DispatchKeySet active;
  if (c10::impl::tls_is_dispatch_key_included(DispatchKey::Python) && !c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python))
    active = DispatchKeySet(DispatchKey::Python);
  const bool seen = std::all_of(installed.begin(), installed.end(), [&](const auto& mode) {
    const void* one = mode.load(std::memory_order_acquire);
    return one == nullptr || will_see(one, active);
  });
  const auto name = function.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  const std::optional<Traits> traits = op ? std::optional(traits_of(*op)) : std::nullopt;
  if (seen && (!traits || traits->lent != Lent::kAll)) return nullptr;
  return std::make_unique<UnseenOperation>(!traits || traits->writes);
}

at::CallbackHandle met() {
  static const at::CallbackHandle handle =
      at::addGlobalCallback(at::RecordFunctionCallback(&meet).scopes({at::RecordScope::FUNCTION}));
  return handle;
}

void run_bypassed(const c10::OperatorHandle& op, DispatchKeySet below, torch::jit::Stack* stack);

void pass(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  const DispatchKeySet below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kKey);
  if (is_ours || !any_installed()) {
    op.redispatchBoxed(below, stack);
    return;
  }
  Bypass& all = bypass();
  if (all.open.load(std::memory_order_acquire) && seen_by_us_alone(all, below)) {
    run_bypassed(op, below, stack);
    return;
  }
  Devices unseen{}, all_devices{};
  bool sees = false;
  for (std::size_t at = 0; at < kDevices.size(); ++at) {
    const void* mode = installed[at].load(std::memory_order_acquire);
    all_devices[at] = mode != nullptr;
    unseen[at] = mode != nullptr && !will_see(mode, below);
    sees |= mode != nullptr && !unseen[at];
  }
  const Traits traits = traits_of(op);
  const bool sees_alone = sees && TorchDispatchModeTLS::stack_len() == 1;
  if (sees_alone && are_numbers(op, *stack)) {
    const Hidden hidden;  // the mode would get Python numbers, which the operation does not take back
    op.redispatchBoxed(below.remove(DispatchKey::Python), stack);
  } else if (sees_alone && below.has(DispatchKey::Tracer)) {
    const Hidden hidden;  // the trace would record what the mode does
    run_lent(op, below.remove(DispatchKey::Python), stack, all_devices, false, traits.writes);
  } else if (traits.lent != Lent::kNothing) {
    run_lent(op, below, stack, all_devices, traits.lent == Lent::kIntegers, traits.writes);
  } else if (unseen[0] || unseen[1]) {
    run_lent(op, below, stack, unseen, false, traits.writes);
  } else {
    op.redispatchBoxed(below, stack);
  }
}

void run_bypassed(const c10::OperatorHandle& op, DispatchKeySet below, torch::jit::Stack* stack) {
  Bypass& all = bypass();
  const c10::FunctionSchema& schema = op.schema();
  const auto given = stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size());
  Traits operation{};
  std::optional<std::int64_t> need;
  std::uint64_t signature = 0;
  {
    const std::lock_guard lock(all.mutex);
    const Operation& found = all.operation(op);
    operation = found.traits;
    ++all.clock;
    if (operation.inert) {
      need = 0;
    } else if (!operation.composite) {
      Signature sign(all.device, found);
      if (std::all_of(given, stack->end(), [&](const c10::IValue& value) { return sign.add(value); })) signature = sign.value();
      const auto known = all.needs.find(signature);
      if (signature != 0 && operation.views) {
        need = 0;
      } else if (signature != 0 && known != all.needs.end() &&
                 // The mode must register other storages: their memory may be foreign.
                 std::all_of(sign.storages().begin(), sign.storages().end(), [&](const auto* one) { return all.knows(*one); })) {
        if (known->second == 0 || all.room(all.client) - known->second >= all.reserve) need = known->second;
      }
      for (const c10::Storage* storage : sign.storages()) {
        if (!operation.views) all.add(*storage, false);
        all.use(*storage, operation.views);
      }
    }
    if (need) ++all.passed;
  }
  if (need) {
    torch::jit::Stack again;  // the arguments, which the call consumes
    if (operation.repeatable && *need > 0) again.assign(given, stack->end());
    const auto others = given - stack->begin();
    try {
      const Hidden hidden;
      op.redispatchBoxed(below.remove(DispatchKey::Python), stack);
    } catch (const c10::OutOfMemoryError&) {
      if (again.empty()) throw;
      stack->erase(stack->begin() + others, stack->end());
      stack->insert(stack->end(), again.begin(), again.end());
      need.reset();
    }
  }
  if (!need) {
    struct Waiting {
      explicit Waiting(const Awaited& one) { awaited.push_back(one); }
      ~Waiting() { awaited.pop_back(); }
    };
    const Waiting waiting({&schema, signature});
    op.redispatchBoxed(below, stack);
    if (signature == 0 || !all.open.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(all.mutex);
    operation = all.operation(op).traits;  // learned by now
  }
  if (operation.inert || operation.views) return;
  const std::lock_guard lock(all.mutex);
  add_results(all, *stack, schema.returns().size(), operation.blank);
  all.sweep();
}

// Return uint8 tensors of all living storages used while open, least recently used first. Unwritten storages must not move: the
// mode registers them at their next use.
std::vector<at::Tensor> taken() {
  Bypass& all = bypass();
  std::vector<std::pair<std::uint64_t, c10::Storage>> alive;
  {
    const std::lock_guard lock(all.mutex);
    for (const auto& [_, one] : all.used) {
      if (one.blank) continue;
      if (auto storage = one.storage.lock(); storage && storage->nbytes() > 0) alive.emplace_back(one.last, std::move(storage));
    }
    all.used.clear();
  }
  std::stable_sort(alive.begin(), alive.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<at::Tensor> tensors;
  for (auto& [_, storage] : alive) tensors.push_back(bytes_of(std::move(storage)));
  return tensors;
}

}  // namespace

TORCH_LIBRARY(mempool_interposer, m) {
  m.def("taken() -> Tensor[]", &taken);
  m.def("lend(Tensor[] storages, str operation, bool writes) -> ()");
  m.def("give_back() -> ()");
}
TORCH_LIBRARY_IMPL(_, DeferredInit, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&pass>()); }

#define MEMPOOL_EXPORT extern "C" __attribute__((visibility("default")))

// Send this thread's operations, and from then on those of all threads, through the interposer, for a mode that offloads
// storages of the CPU or of CUDA. Return 0 if another mode is installed for the device.
MEMPOOL_EXPORT int mempool_interposer_install(const void* mode, int cuda) {
  const void* none = nullptr;
  if (!installed[cuda != 0].compare_exchange_strong(none, mode)) return 0;
  at::reenableCallback(met());
  c10::impl::tls_set_dispatch_key_included(kKey, true);
  return 1;
}

// Take a mode out. Other threads go on sending their operations through here, to no effect.
MEMPOOL_EXPORT void mempool_interposer_remove(const void* mode) {
  for (auto& one : installed) {
    const void* expected = mode;
    one.compare_exchange_strong(expected, nullptr);
  }
  if (any_installed()) return;
  at::disableCallback(met());
  c10::impl::tls_set_dispatch_key_included(kKey, false);
}

// Say whether this thread runs operations of the offloading itself from now on, or the program's. Return what was so before.
MEMPOOL_EXPORT int mempool_interposer_ours(int ours) { return std::exchange(is_ours, ours != 0) ? 1 : 0; }

// Return the number of unseen operations so far that may have written.
MEMPOOL_EXPORT std::uint64_t mempool_interposer_writes() { return unseen_writes.load(); }

// Free a storage's memory, and let the storage lie in its host copy meanwhile, where whoever reads it unseen finds the bytes.
// Return 0 if an unseen operation may be using the memory just now, or may have written since there were `writes` such operations.
MEMPOOL_EXPORT int mempool_interposer_park(c10::StorageImpl* storage, void* copy, std::uint64_t writes) {
  parking = true;
  c10::DataPtr freed;
  const bool may = unseen_operations.load() == 0 && unseen_writes.load() == writes;
  if (may) freed = storage->set_data_ptr(c10::DataPtr(copy, copy, &keep, storage->device()));
  parking = false;
  return may ? 1 : 0;
}

// Return the allocator of the memory into which a storage is reloaded: on a CPU the one in use, which is not that of storages from
// before the pool.
MEMPOOL_EXPORT c10::Allocator* mempool_interposer_allocator(c10::StorageImpl* storage) {
  return storage->device_type() == c10::DeviceType::CPU ? c10::GetAllocator(c10::DeviceType::CPU) : storage->allocator();
}

// Move a parked storage into the memory of another storage; no effect on one that is not parked.
MEMPOOL_EXPORT void mempool_interposer_land(c10::StorageImpl* storage, c10::StorageImpl* landing) {
  if (storage->_mutable_data_ptr_no_checks().get_deleter() != &keep) return;
  storage->set_data_ptr_noswap(landing->set_data_ptr(c10::DataPtr(nullptr, landing->device())));
}

// Let this thread's operations skip its mode while the client's pool keeps room for `reserve` bytes. Return 0 if another mode's
// bypass is open.
MEMPOOL_EXPORT int mempool_bypass_open(const void* mode, int cuda, std::int64_t (*room)(void*), void* client, std::int64_t reserve) {
  Bypass& all = bypass();
  const std::lock_guard lock(all.mutex);
  if (all.open.load()) return 0;
  all.device = cuda != 0 ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
  all.stream = stream_now(all.device);
  all.room = room;
  all.client = client;
  all.reserve = reserve;
  all.mode = mode;
  all.open.store(true, std::memory_order_release);
  return 1;
}

MEMPOOL_EXPORT void mempool_bypass_reserve(std::int64_t reserve) {
  Bypass& all = bypass();
  const std::lock_guard lock(all.mutex);
  all.reserve = reserve;
}

// Close the bypass. Takes no lock, which another thread may have held at a fork.
MEMPOOL_EXPORT void mempool_bypass_close() { bypass().open.store(false, std::memory_order_release); }

// Return the number of operations that skipped the mode.
MEMPOOL_EXPORT std::uint64_t mempool_bypass_count() {
  Bypass& all = bypass();
  const std::lock_guard lock(all.mutex);
  return all.passed;
}

// Learn the operation on its way to the mode: whether it makes views or unwritten results, and the bytes needed for arguments
// like these; -1: the mode must see each call.
MEMPOOL_EXPORT void mempool_bypass_learn(const char* name, const char* overload, int views, int blank, std::int64_t bytes) {
  if (awaited.empty()) return;
  const auto [schema, signature] = awaited.back();
  if (signature == 0 || schema->name() != name || schema->overload_name() != overload) return;
  Bypass& all = bypass();
  const std::lock_guard lock(all.mutex);
  const auto found = all.operations.find(schema);
  if (found == all.operations.end()) return;
  found->second.traits.views = views != 0;
  found->second.traits.blank = blank != 0;
  if (bytes < 0) return;
  if (all.needs.size() >= kMostKnown) all.needs.clear();
  all.needs[signature] = bytes;
}
