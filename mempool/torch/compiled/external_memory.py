"""Live device memory outside the running graph, tracked by weak references to storages."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mempool.torch.compiled.optimizer_state import future_states, optimizer_states, states_in
from mempool.torch.compiled.records import ExternalMemory
from mempool.torch.compiled.runtime import extent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


Memories = dict[StorageWeakRef, int]
"""Bytes of each memory, by weak reference to the storage."""


class TensorRef(NamedTuple):
    """A weak reference to a tensor, the address of the first element, and the extent in bytes."""

    tensor: weakref.ref[torch.Tensor]
    place: int
    size: int


@dataclass
class ForwardRun:
    """The memory of one forward run of a graph.

    Attributes:
        given: memory of the inputs, without parameters.
        requested: memory of the results that the program requested.
        kept: memory saved for the backward run, without parameters.
        freed_inputs: inputs that the decision assumed to be freed after the forward run.
        has_ended: true after the backward run.
    """

    given: Memories
    requested: Memories
    kept: Memories
    freed_inputs: Memories = field(default_factory=dict)
    has_ended: bool = False

    @property
    def all(self) -> Memories:
        """Return all memories of the run that are alive."""
        return _alive(self.given | self.requested | self.kept)

    @property
    def results(self) -> Memories:
        """Return the results that the program requested and that are alive."""
        return _alive(self.requested)

    @property
    def awaited_memory(self) -> Memories:
        """Return the live memories that only the pending backward run needs."""
        if self.has_ended:
            return {}
        others = self.requested.keys() | self.given.keys()
        return {memory: size for memory, size in _alive(self.kept).items() if memory not in others}


@dataclass(eq=False)
class LiveMemory:
    """The memory of the graphs of one call of `torch.compile` and of the compiled modules' parameters.

    Graphs are numbered in the order of their first runs within a step; a graph may run several times.

    Attributes:
        device: the device with most bytes, preferring any device over the CPU; only its memory counts.
    """

    device: torch.device | None = None
    _modules: dict[int, weakref.ref[torch.nn.Module]] = field(default_factory=dict)
    _parameters: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    _given: dict[int, Memories] = field(default_factory=dict)
    _runs: dict[int, list[ForwardRun]] = field(default_factory=dict)
    _new_gradients: list[TensorRef] = field(default_factory=list)
    _lasting: Memories = field(default_factory=dict)
    _state: Memories | None = None

    def register(self, modules: Iterable[torch.nn.Module], given: Iterable[Any]) -> None:
        """Register modules whose parameters count, and choose the device from the inputs of a graph."""
        self._modules = {
            key: reference for key, reference in self._modules.items() if reference() is not None
        }
        for module in modules:
            self._modules[id(module)] = weakref.ref(module)
        sizes: dict[torch.device, int] = {}
        for tensor in (plain for some in [*given, *self._values()] for plain in _inner_tensors(some)):
            sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.nbytes
        if sizes:
            self.device = device_with_most(sizes)

    def register_parameters(self, values: Iterable[Any]) -> None:
        """Register the parameters among a graph's inputs, since compiled code may run for many modules."""
        for value in values:
            if isinstance(value, torch.nn.Parameter):
                self._parameters[id(value)] = weakref.ref(value)

    def external(self, number: int, given: Sequence[Any], *, more: bool) -> ExternalMemory:
        """Return the memory outside a graph that is about to run for the first time.

        Args:
            number: the number of the graph.
            given: the inputs of the graph.
            more: true if other graphs of the function follow.
        """
        if self._runs:
            gc.collect()  # reference cycles of earlier compilations may hold tensors
        own = self._given[number] = self.memories(given)
        parameters, others, gradients = self.parameters(), self.others(number), self.gradients()
        every = [run for runs in self._runs.values() for run in runs]
        kept = _union(_alive(run.kept) for run in every)
        goes = _union(_alive(run.requested) for run in every).keys() - kept.keys()
        memories = [self.memories([value]) for value in given]
        return ExternalMemory(
            held=total(others | gradients, own, parameters),
            kept=total(
                {memory: size for memory, size in others.items() if memory not in goes}, own, parameters
            ),
            own=total(_union(run.all for run in self.runs(number)), own, parameters, others),
            freed_inputs=tuple(i for i, some in enumerate(memories) if some and some.keys() <= goes),
            parameters=total(parameters, own),
            gradients=self._later_gradients(number) if more else 0,
            state=total(self.state()) + self._future_state_bytes(),
        )

    def runs(self, number: int) -> list[ForwardRun]:
        """Return the forward runs of a graph in this step with any live memory."""
        self._runs[number] = [run for run in self._runs.get(number, ()) if run.all]
        return list(self._runs[number])

    def others(self, number: int) -> Memories:
        """Return the memories that runs of other graphs hold."""
        numbers = [other for other in list(self._runs) if other != number]
        return _union(run.all for other in numbers for run in self.runs(other))

    @property
    def is_used(self) -> bool:
        """Return true if any module that these graphs belong to is alive."""
        return bool(self._alive_modules())

    @property
    def has_several(self) -> bool:
        """Return true if more than one run is recorded, alive or not."""
        return sum(map(len, list(self._runs.values()))) > 1

    def has_waiting_runs(self) -> bool:
        """Return true if any run waits for a backward run."""
        return any(run.awaited_memory for runs in list(self._runs.values()) for run in list(runs))

    def waiting(self) -> list[int]:
        """Return the graphs that keep memory for a pending backward run."""
        every = [(number, run) for number, runs in list(self._runs.items()) for run in list(runs)]
        return list(dict.fromkeys(number for number, run in every if not run.has_ended and _alive(run.kept)))

    def parameters(self) -> Memories:
        """Return parameters, buffers, and live inputs of graphs from earlier steps; no optimizer state."""
        state = self.state()
        lasting = {memory: size for memory, size in _alive(self._lasting).items() if memory not in state}
        return self.memories(self._values()) | lasting

    def state(self) -> Memories:
        """Return the optimizer state that existed at the beginning of the step."""
        if self._state is None:
            self._state = self.memories(optimizer_states(self._all_parameters()))
        return _alive(self._state)

    def add_state(self, optimizer: torch.optim.Optimizer) -> int:
        """Add the state of an optimizer that has just stepped, and return the bytes of all state."""
        self._state = self.state() | self.memories(states_in(optimizer.state, self._all_parameters()))
        return total(self._state)

    def _future_state_bytes(self) -> int:
        """Return the bytes of state that the optimizers will make in their first step."""
        return sum(
            count * plain.nbytes
            for parameter, count in future_states(self._all_parameters())
            for plain in _inner_tensors(parameter)
            if plain.device == self.device
        )

    def _all_parameters(self) -> list[torch.nn.Parameter]:
        return [value for value in self._values() if isinstance(value, torch.nn.Parameter)]

    def gradients(self) -> Memories:
        """Return the gradients of the parameters, of this step or of earlier ones."""
        leaves = (value for value in self._values() if value.is_leaf)  # PyTorch warns of non-leaves
        return self.memories(value.grad for value in leaves)

    def pending_gradient_bytes(self, given: Iterable[torch.Tensor]) -> int:
        """Return the bytes of unconsumed gradients of backward passes, without the gradients in `given`."""
        self._new_gradients = [entry for entry in self._new_gradients if entry.tensor() is not None]
        return bytes_of(self._new_gradients, but=self.tensor_refs(given))

    def record_forward(self, number: int, run: ForwardRun) -> None:
        """Record a forward run of a graph."""
        self._runs.setdefault(number, []).append(run)

    def record_backward(self, made: Iterable[Any]) -> None:
        """Record the gradients that a graph has made.

        A reference to a tensor's storage would stop PyTorch from accumulating gradients in place. So
        gradients are tracked by weak references to the tensors, which live until the gradients are consumed.
        """
        self._new_gradients += self.tensor_refs(made)

    def tensor_refs(self, values: Iterable[Any]) -> list[TensorRef]:
        """Return weak references to the tensors on the device, without references to their storages."""
        plain = (
            tensor for value in values for tensor in _inner_tensors(value) if tensor.device == self.device
        )
        return [TensorRef(weakref.ref(tensor), tensor.data_ptr(), extent(tensor)) for tensor in plain]

    def step(self) -> None:
        """Start a new step; memory left over from the previous step is not attributed to the graphs."""
        runs = [run for some in self._runs.values() for run in some]
        made = _union(run.requested | run.kept for run in runs)
        given = _union(_alive(run.given) for run in runs)
        self._lasting = _alive(self._lasting) | {
            memory: size for memory, size in given.items() if memory not in made
        }
        self._runs.clear()
        self._new_gradients.clear()
        self._state = None

    def memories(self, values: Iterable[Any]) -> Memories:
        """Return the memories of the tensors on the device."""
        found: Memories = {}
        for value in values:
            for plain in _inner_tensors(value):
                if plain.device == self.device:
                    storage = plain.untyped_storage()
                    found[StorageWeakRef(storage)] = storage.nbytes()
        return found

    def _values(self) -> Iterator[torch.Tensor]:
        for module in self._alive_modules():
            yield from module.parameters()
            yield from module.buffers()
        for reference in list(self._parameters.values()):
            if (tensor := reference()) is not None:
                yield tensor

    def _alive_modules(self) -> list[torch.nn.Module]:
        return [module for reference in list(self._modules.values()) if (module := reference()) is not None]

    def _later_gradients(self, number: int) -> int:
        """Return the bytes of pending gradients of the parameters of later graphs.

        A parameter that occurs twice in a module counts twice.
        """
        read = {key for earlier, given in self._given.items() if earlier <= number for key in given}
        found: Memories = {}
        for module in self._alive_modules():
            shared: Memories = {}
            for value in (parameter for _, parameter in module.named_parameters(remove_duplicate=False)):
                if value.requires_grad and value.is_leaf and value.grad is None:
                    memory = self.memories([value])
                    found |= {key: size for key, size in memory.items() if key in shared or key not in read}
                    shared |= memory
        return total(found)


def device_with_most(sizes: Mapping[torch.device, int]) -> torch.device:
    """Return the device with the most bytes, preferring any device over the CPU."""
    return max(sizes, key=lambda device: (device.type != "cpu", sizes[device]), default=torch.device("cpu"))


def total(memories: Mapping[StorageWeakRef, int], *but: Memories) -> int:
    """Return the total bytes of the memories that are in none of `but`."""
    return sum(size for memory, size in memories.items() if not any(memory in some for some in but))


def bytes_of(tensors: Iterable[TensorRef], *, but: Iterable[TensorRef] = ()) -> int:
    """Return the bytes of live tensors, except those at the addresses of tensors in `but`."""
    taken = {entry.place for entry in but}
    there = (entry for entry in tensors if entry.tensor() is not None and entry.place not in taken)
    return sum({entry.place: entry.size for entry in there}.values())


def _union(some: Iterable[Memories]) -> Memories:
    return {memory: size for memories in some for memory, size in memories.items()}


def _alive(memories: Memories) -> Memories:
    return {memory: size for memory, size in memories.items() if not memory.expired()}


def _inner_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor that has memory, or the inner tensors of a wrapper subclass."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or is_lazy(value):
        return
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _inner_tensors(getattr(value, name))
    elif value.layout == torch.strided and value.device.type != "meta":
        yield value
