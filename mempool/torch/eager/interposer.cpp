// Interposer in front of PyTorch's dispatcher while tensors are offloaded (interposer.py). Built on the user's machine
// against the
// user's torch (compiled_library.py).
//
// A fallback for DeferredInit, a key that PyTorch reserves for others and dispatches before autocast and autograd. In a
// thread that includes the key, every operation arrives here first, independent of the program's dispatch modes. The
// cases, in the order of the checks:
//
// * The bypass is open (bypass.py), and the mode has seen the operation with tensors of the same shapes, and there is ample room:
//   the operation runs while the mode is off the stack, and its storages are recorded in the order of their last use.
// * The operation makes views or reads a number: it runs without the mode.
// * The operation belongs to a loop over single entries (entries.hpp): it runs without the mode.
// * An iteration repeats the recorded one (follower.hpp): the operation runs without the mode, and the schedule's moves are made
//   here (moves.hpp), or by Python.
// * A composite operation accesses memory itself, unseen by the mode: its storages are lent meanwhile.
// * The mode will not see the operation, as in another thread or with the mode disabled: all storages among the arguments are
//   lent, which reloads and pins them.
// * The offloading mode will see the operation: dispatch as usual.
//
// An operation that does not arrive here, as in a thread that does not include the key yet or below another dispatch mode, is seen
// by a global RecordFunction callback: no storage gives up memory until the operation has ended, and if it may write, all copies
// on the host count as stale. A thread that follows a schedule does without the callback (`Records`).
#include "bypass.hpp"
#include "entries.hpp"
#include "follower.hpp"
#include "moves.hpp"
#include "operations.hpp"

namespace {

// The installed modes, by device; null where none is.
constexpr std::array<c10::DeviceType, 2> kDevices = {c10::DeviceType::CPU, c10::DeviceType::CUDA};
using Devices = std::array<bool, 2>;
std::array<std::atomic<const void*>, 2> installed;
bool any_installed() {
  return std::any_of(installed.begin(), installed.end(), [](const auto& mode) { return mode.load(std::memory_order_acquire); });
}

Devices all_installed() {
  Devices all{};
  for (std::size_t at = 0; at < kDevices.size(); ++at) all[at] = installed[at].load(std::memory_order_acquire) != nullptr;
  return all;
}

// Return whether a mode will see the operation, unless another mode drops it.
bool will_see(const void* mode, DispatchKeySet below) {
  if (!below.has(DispatchKey::Python)) return false;
  for (std::int64_t at = 0; at < TorchDispatchModeTLS::stack_len(); ++at) {
    const auto& one = TorchDispatchModeTLS::get_stack_at(at);
    if (one->ptr(&one->pyinterpreter()) == mode) return true;
  }
  return false;
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
  const torch::jit::Stack number = call_python(lend, {storages, toString(op.operator_name()), writes});
  try {
    op.redispatchBoxed(below, stack);
  } catch (...) {
    call_python(give_back, number);
    throw;
  }
  call_python(give_back, number);
}

// Return whether there are tensors among the arguments, and all are wrapped numbers, as in `x + 1`.
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

// Run an operation on wrapped numbers without the mode, which would receive Python numbers that the operation does not
// accept.
void run_unseen_numbers(const c10::OperatorHandle& op, DispatchKeySet below, torch::jit::Stack* stack) {
  const Hidden hidden;
  op.redispatchBoxed(below.remove(DispatchKey::Python), stack);
}

// Return whether the first argument is a tensor without a storage, such as a sparse one.
bool begins_without_storage(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const std::size_t count = op.schema().arguments().size();
  if (count == 0) return false;
  const c10::IValue& first = *(stack.end() - static_cast<std::ptrdiff_t>(count));
  return first.isTensor() && first.toTensor().defined() && !first.toTensor().has_storage();
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

// Include or exclude this library's key, and PyTorch's keys with which operations reach this thread's modes. The end of
// a guard such as inference mode restores the keys of its beginning, but not the modes.
void include_keys(bool includes) {
  c10::impl::tls_set_dispatch_key_included(kKey, includes);
  const bool has_modes = TorchDispatchModeTLS::stack_len() != 0;
  if (includes != has_modes) return;  // PyTorch's keys are included while the thread has modes, and excluded while it has none
  c10::impl::tls_set_dispatch_key_included(DispatchKey::Python, includes);
  c10::impl::tls_set_dispatch_key_included(DispatchKey::PythonTLSSnapshot, includes);
}

std::unique_ptr<at::ObserverContext> meet(const at::RecordFunction& function);

at::CallbackHandle met() {
  static const at::CallbackHandle handle =
      at::addGlobalCallback(at::RecordFunctionCallback(&meet).scopes({at::RecordScope::FUNCTION}));
  return handle;
}

bool is_on_stack(const void* mode) { return will_see(mode, DispatchKeySet(DispatchKey::Python)); }

// Pop the mode while the top of the stack has more than `kept` entries of it: a program that pops all modes and later
// pushes them, as `_disable_current_modes` does, repeats a mode that was pushed meanwhile.
void pop_repeated(const void* mode, std::int64_t kept) {
  const auto is_mode = [mode](std::int64_t at) {
    const auto& one = TorchDispatchModeTLS::get_stack_at(at);
    return one->ptr(&one->pyinterpreter()) == mode;
  };
  for (auto size = TorchDispatchModeTLS::stack_len(); !is_off_stack && size > kept; --size) {
    if (!is_mode(size - 1) || !is_mode(size - 1 - kept)) return;
    TorchDispatchModeTLS::pop_stack();
  }
}

// A mode that is off the stack while nothing has to move and all requests follow the pool's plan, so that operations cost nothing.
struct Standby {
  // kOff: the mode is off the stack. kDeparted: back, since the program departed from the plan. kEnded: back until the
  // next standby.
  enum State { kNever, kOff, kDeparted, kEnded };
  std::atomic<State> state{kNever};
  std::atomic<std::thread::id> thread{};
  const void* mode = nullptr;
  std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> held;

  bool is_here() const { return std::this_thread::get_id() == thread.load(std::memory_order_acquire); }
  bool is_off() const { return state.load(std::memory_order_acquire) == kOff && is_here(); }
  // Push the mode. PyTorch may undo this when a guard restores the thread's state.
  void put_back() {
    if (is_off_stack) return;
    if (TorchDispatchModeTLS::stack_len() == 0) TorchDispatchModeTLS::push_non_infra_mode_onto_stack(held);
    include_keys(true);
  }
  // Return whether PyTorch has undone the push: a backward pass restores the modes of its beginning.
  bool is_missing() const {
    const State now = state.load(std::memory_order_acquire);
    return (now == kDeparted || now == kEnded) && is_here() && TorchDispatchModeTLS::stack_len() == 0;
  }
};

Standby& standby() {
  static auto* const made = new Standby;
  return *made;
}

// Called before each operation of any thread: includes the key in a thread that lacks it, for the operations that follow.
std::unique_ptr<at::ObserverContext> meet(const at::RecordFunction& function) {
  const bool excluded = c10::impl::tls_is_dispatch_key_excluded(kKey);
  if (is_internal || (c10::impl::tls_is_dispatch_key_included(kKey) && !excluded) || !any_installed()) return nullptr;
  const auto name = function.operator_name();
  const auto op = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  const Traits* const traits = op ? &operations().of(*op).traits : nullptr;
  const bool is_missing = standby().is_missing();
  // A view accesses no memory, nor does `detach`, which has no operator's name. PyTorch pops the modes to make a
  // parameter of a view.
  if (is_missing && (traits == nullptr || traits->aliases)) return nullptr;
  if (!excluded) include_keys(true);
  DispatchKeySet active;
  if (c10::impl::tls_is_dispatch_key_included(DispatchKey::Python) && !c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python))
    active = DispatchKeySet(DispatchKey::Python);
  const bool seen = std::all_of(installed.begin(), installed.end(), [&](const auto& mode) {
    const void* one = mode.load(std::memory_order_acquire);
    return one == nullptr || will_see(one, active);
  });
  if (is_missing) standby().put_back();
  if (seen && (traits == nullptr || traits->lent != Lent::kAll)) return nullptr;
  return std::make_unique<UnseenOperation>(traits == nullptr || traits->writes);
}

void pass(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  const DispatchKeySet below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kKey);
  repeat.end();
  records.update(follower().is_following());
  if (standby().is_off()) {  // a guard has restored the keys of before
    include_keys(false);
    op.callBoxed(stack);
    return;
  }
  if (is_internal || !any_installed()) {
    op.redispatchBoxed(below, stack);
    return;
  }
  const void* const only = only_mode(below);
  const Operation& operation = operations().of(op);
  const Traits& traits = operation.traits;
  const auto is_installed = [](const void* one) {
    return one != nullptr &&
           std::any_of(installed.begin(), installed.end(), [&](const auto& mode) { return mode.load(std::memory_order_acquire) == one; });
  };
  const bool sees_it_alone = is_installed(only);
  // A view that passed a mode in inference mode would look as if made outside: a later write would raise no error.
  const bool infers = sees_it_alone && c10::InferenceMode::is_enabled();
  const DispatchKeySet parts = sees_it_alone && arrives_whole(traits, below) ? below.remove(DispatchKey::Python) : below;
  if (sees_it_alone && traits.composite && traits.lent == Lent::kNothing) {
    op.redispatchBoxed(parts, stack);
    return;
  }
  if (Bypass& all = bypass(); all.open.load(std::memory_order_acquire) && all.place.is_here(only)) {
    if (are_numbers(op, *stack)) {
      run_unseen_numbers(op, below, stack);
      return;
    }
    run_bypassed(op, operation, below, stack);
    return;
  }
  // Python would keep the indices and values of a sparse gradient, which autograd then copies.
  const bool views_sparse =
      traits.shares && begins_without_storage(op, *stack) && is_installed(only_mode(below.remove(DispatchKey::Sparse)));
  const bool views = sees_it_alone && (operation.views || (traits.aliases && infers));
  if ((views || views_sparse) && run_view(op, traits, below, stack)) return;
  if (sees_it_alone && records_within(op, traits, *stack)) {
    run_lent(op, below.remove(DispatchKey::Python), stack, all_installed(), false, traits.writes);
    return;
  }
  const bool awaits = sees_it_alone && follower().is_here(only);
  if (sees_it_alone && run_entry(op, operation, only, below, stack, awaits && follower().is_following())) return;
  if (awaits && run_followed(op, operation, below, stack)) return;
  Devices unseen{};
  bool sees = false;
  for (std::size_t at = 0; at < kDevices.size(); ++at) {
    const void* mode = installed[at].load(std::memory_order_acquire);
    unseen[at] = mode != nullptr && !will_see(mode, below);
    sees |= mode != nullptr && !unseen[at];
  }
  const bool is_only = sees && TorchDispatchModeTLS::stack_len() == 1;
  if (is_only && are_numbers(op, *stack)) {
    run_unseen_numbers(op, below, stack);
  } else if (is_only && below.has(DispatchKey::Tracer)) {
    const Hidden hidden;  // the trace would record what the mode does
    run_lent(op, below.remove(DispatchKey::Python), stack, all_installed(), false, traits.writes);
  } else if (traits.lent != Lent::kNothing) {
    run_lent(op, parts, stack, all_installed(), traits.lent == Lent::kIntegers, traits.writes);
  } else if (unseen[0] || unseen[1]) {
    run_lent(op, below, stack, unseen, false, traits.writes);
  } else if (sees_it_alone) {
    Storages storages;
    const c10::DeviceType device = (awaits ? follower().place : entries().place).device;
    const std::uint64_t signature = signature_of(op, *stack, operation, device, storages);
    entries().note(addresses_of(storages), stream_now(device));
    run_awaited(op, below, stack, awaits ? signature : 0, signature);
  } else {
    op.redispatchBoxed(below, stack);
  }
}

}  // namespace

TORCH_LIBRARY(mempool_interposer, m) {
  m.def("taken() -> Tensor[]", &taken);
  m.def("made(bool older) -> (Tensor[], int[])", &made_storages);
  m.def("moved(int number) -> (Tensor[], int[])", [](std::int64_t number) { return moves().end(number); });
  m.def("before(Tensor[] absent, int at) -> ()");
  m.def("after(Tensor[] results, int at) -> ()");
  m.def("accessed() -> (Tensor[], int[])", &accessed_storages);
  m.def("reload(Tensor[] absent) -> ()");
  m.def("make_room(bool cuda) -> ()");
  m.def("lend(Tensor[] storages, str operation, bool writes) -> int");
  m.def("give_back(int number) -> ()");
}
TORCH_LIBRARY_IMPL(_, DeferredInit, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&pass>()); }

// Route this thread's operations, and then those of all threads, through the interposer, for a mode that offloads
// storages of the CPU or of CUDA. Return 0 if another mode is installed for the device.
MEMPOOL_EXPORT int mempool_interposer_install(const void* mode, int cuda) {
  const void* none = nullptr;
  if (!installed[cuda != 0].compare_exchange_strong(none, mode)) return 0;
  at::reenableCallback(met());
  c10::impl::tls_set_dispatch_key_included(kKey, true);
  return 1;
}

// Remove a mode. Operations of other threads still arrive here, without effect.
MEMPOOL_EXPORT void mempool_interposer_remove(const void* mode) {
  for (auto& one : installed) {
    const void* expected = mode;
    one.compare_exchange_strong(expected, nullptr);
  }
  if (Standby& all = standby(); all.mode == mode) {
    all.state = Standby::kNever;
    all.thread = std::thread::id();  // still, where another thread removes the mode
    all.held.reset();
    pop_repeated(mode, 0);
  }
  if (any_installed()) return;
  at::disableCallback(met());
  c10::impl::tls_set_dispatch_key_included(kKey, false);
}

// Set the kind of this thread's operations: 0, the program's; 1, the offloading's own; 2, the program's inside an
// operation that the mode handles. Return the previous kind.
MEMPOOL_EXPORT int mempool_interposer_set_kind(int kind) {
  repeat.end();
  records.update(follower().is_following());
  const int before = is_internal ? 1 : is_off_stack ? 2 : 0;
  is_internal = kind == 1;
  is_off_stack = kind != 0;  // PyTorch has taken the mode off the stack
  return before;
}

// Hide this thread's next operation from profiles.
MEMPOOL_EXPORT void mempool_interposer_repeat() { repeat.begin(); }

// Pop the mode, this thread's only one, until `mempool_standby_end`. Return 0 if impossible now.
MEMPOOL_EXPORT int mempool_standby_begin(const void* mode) {
  Standby& all = standby();
  const Standby::State now = all.state.load();
  if (now == Standby::kOff || now == Standby::kDeparted) return 0;
  if (TorchDispatchModeTLS::stack_len() != 1 || !is_on_stack(mode) || torch::autograd::get_current_graph_task_id() != -1) return 0;
  all.mode = mode;
  all.thread = std::this_thread::get_id();
  all.held = TorchDispatchModeTLS::pop_stack();
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  at::disableCallback(met());
  all.state.store(Standby::kOff, std::memory_order_release);
  return 1;
}

// Push the mode before the next operation, since the program departs from the pool's plan.
MEMPOOL_EXPORT void mempool_standby_wake() {
  Standby& all = standby();
  if (!all.is_here()) return;
  Standby::State off = Standby::kOff;
  if (all.state.compare_exchange_strong(off, Standby::kDeparted)) at::reenableCallback(met());
  all.put_back();
}

// Return whether the program has departed from the plan during the standby.
MEMPOOL_EXPORT int mempool_standby_departed() { return standby().state.load() == Standby::kDeparted ? 1 : 0; }

// Put the mode back on this thread's stack, in the thread that took it off; also where PyTorch undid that before.
MEMPOOL_EXPORT void mempool_standby_end(const void* mode) {
  Standby& all = standby();
  if (all.mode != mode || !all.is_here() || !all.held) return;
  if (all.state.exchange(Standby::kEnded) == Standby::kOff) at::reenableCallback(met());
  all.put_back();
  pop_repeated(mode, 1);
}

// Return the address of the number of unseen operations so far that may have written.
MEMPOOL_EXPORT const std::atomic<std::uint64_t>* mempool_interposer_writes() { return &unseen_writes; }

// Free a storage's memory, and point the storage to its host copy, where unseen readers find the bytes. Return 0 if an
// unseen operation may be using the memory now, or may have written since the count of such operations was `writes`.
MEMPOOL_EXPORT int mempool_interposer_park(c10::StorageImpl* storage, void* copy, std::uint64_t writes) {
  parking = true;
  c10::DataPtr freed;
  const bool may = unseen_operations.load() == 0 && unseen_writes.load() == writes;
  if (may) freed = storage->set_data_ptr(c10::DataPtr(copy, copy, &keep, storage->device()));
  parking = false;
  return may ? 1 : 0;
}

// Return the allocator for the reload of a storage: on a CPU the present allocator, which may differ from that of
// storages older than the pool.
MEMPOOL_EXPORT c10::Allocator* mempool_interposer_allocator(c10::StorageImpl* storage) {
  return storage->device_type() == c10::DeviceType::CPU ? c10::GetAllocator(c10::DeviceType::CPU) : storage->allocator();
}

// Learn that the operation on its way to the mode makes views, or reads a number.
MEMPOOL_EXPORT void mempool_interposer_learn_view(const char* name, const char* overload) {
  if (Operation* const found = awaited_operation(name, overload); found != nullptr) found->views = true;
}

// Record that a storage has a valid host copy, until a followed operation writes the storage.
MEMPOOL_EXPORT void mempool_interposer_watch(const c10::StorageImpl* storage) { watched().add(storage); }

// Return whether no followed operation has written the storage since `watch`.
MEMPOOL_EXPORT int mempool_interposer_watches(const c10::StorageImpl* storage) { return watched().has(storage) ? 1 : 0; }

// Return the number of operations that may have written copies on the host, without a lend.
MEMPOOL_EXPORT std::uint64_t mempool_interposer_copy_writes() { return unseen_writes.load() + entry_writes.load(); }

// Move a parked storage into the memory of another storage; ignore other storages. Return 0 if the host copy may have
// been written since the count of such operations was `writes`.
MEMPOOL_EXPORT int mempool_interposer_land(c10::StorageImpl* storage, c10::StorageImpl* landing, std::uint64_t writes) {
  if (storage->_mutable_data_ptr_no_checks().get_deleter() != &keep) return 1;
  const std::lock_guard lock(landing_mutex);
  parking = true;
  const bool may = mempool_interposer_copy_writes() == writes;
  if (may) storage->set_data_ptr_noswap(landing->set_data_ptr(c10::DataPtr(nullptr, landing->device())));
  parking = false;
  return may ? 1 : 0;
}
