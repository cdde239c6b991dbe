"""What is on a device beside the graph that runs there, counted of what is alive, by weak references."""

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

from mempool.torch.rewriting.forms import extent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

#: Of how many parameters, at least, their optimizers are looked for.
_ASKED = 16

Memories = dict[StorageWeakRef, int]
"""Bytes of memories, each once; a reference keeps the name of a memory, but not the memory."""


@dataclass(frozen=True)
class Beside:
    """Bytes on the device beside a graph that are none of what it is given.

    Attributes:
        held: by other graphs of the same function now: what they keep, results that are still in use; and
            gradients of the steps before this one.
        kept: of that, what other graphs keep, and results that one of them keeps for its backward pass.
        own: held by other runs of the same graph, or of another one of the same code.
        going: which of the graph's inputs nobody needs when its forward pass has ended, but perhaps itself.
        parameters: and buffers that the graph does not read.
        gradients: that are there besides in its backward pass, of parameters that graphs after it read.
        state: of optimizers.
        library: what cuBLAS keeps for itself, for each of the threads that run passes.
    """

    held: int = 0
    kept: int = 0
    own: int = 0
    going: tuple[int, ...] = ()
    parameters: int = 0
    gradients: int = 0
    state: int = 0
    library: int = 0


NOTHING = Beside()


class Told(NamedTuple):
    """A tensor, where its elements begin, and bytes from there to the last one."""

    tensor: weakref.ref[torch.Tensor]
    place: int
    size: int


@dataclass
class Run:
    """What a forward run of a graph was given, has made for whoever asked, and keeps for its backward run.

    Attributes:
        given: to it, but for parameters.
        asked: that it has made for whoever asked.
        kept: for its backward run, but for parameters.
        going: of what it was given, what it has counted on to be gone then.
        over: whether its backward run has been.
    """

    given: Memories
    asked: Memories
    kept: Memories
    going: Memories = field(default_factory=dict)
    over: bool = False

    @property
    def all(self) -> Memories:
        """Together, as far as it is alive."""
        return _alive(self.given | self.asked | self.kept)

    @property
    def results(self) -> Memories:
        """What it has made for whoever asked, as far as it is alive."""
        return _alive(self.asked)

    @property
    def waits(self) -> Memories:
        """What is alive until its backward run, and of no use to anybody else."""
        if self.over:
            return {}
        others = self.asked.keys() | self.given.keys()
        return {one: size for one, size in _alive(self.kept).items() if one not in others}


@dataclass(eq=False)
class Present:
    """Memory of the graphs of one call of `torch.compile`, and of the parameters of what it compiles.

    A graph has a number, growing in the order in which those of one step first ran; it may run several times.

    Attributes:
        device: where most of it lies, by bytes, if not all lies on the CPU; nothing else counts.
    """

    device: torch.device | None = None
    _modules: dict[int, weakref.ref[torch.nn.Module]] = field(default_factory=dict)
    _parameters: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    _given: dict[int, Memories] = field(default_factory=dict)
    _runs: dict[int, list[Run]] = field(default_factory=dict)
    _made_back: list[Told] = field(default_factory=list)
    _lasting: Memories = field(default_factory=dict)
    _state: Memories | None = None

    def meet(self, modules: Iterable[torch.nn.Module], given: Iterable[Any]) -> None:
        """Modules whose parameters count, and what a graph is given."""
        self._modules = {key: one for key, one in self._modules.items() if one() is not None}
        for module in modules:
            self._modules[id(module)] = weakref.ref(module)
        sizes: dict[torch.device, int] = {}
        for one in (plain for some in [*given, *self._values()] for plain in _plain(some)):
            sizes[one.device] = sizes.get(one.device, 0) + one.nbytes
        if sizes:
            self.device = with_most(sizes)

    def meet_parameters(self, values: Iterable[Any]) -> None:
        """Parameters among what a graph is given: code that is compiled once may run for many modules."""
        for one in values:
            if isinstance(one, torch.nn.Parameter):
                self._parameters[id(one)] = weakref.ref(one)

    def beside(self, number: int, given: Sequence[Any], *, more: bool) -> Beside:
        """What is beside a graph now, when it is about to run for the first time.

        Args:
            number: of the graph.
            given: to it.
            more: whether there are graphs after it.
        """
        if self._runs:
            gc.collect()  # what has been compiled before may hold what it was compiled for, in circles
        own = self._given[number] = self.memories(given)
        parameters, others, gradients = self.parameters(), self.others(number), self.gradients()
        every = [run for runs in self._runs.values() for run in runs]
        kept = _together(_alive(run.kept) for run in every)
        goes = _together(_alive(run.asked) for run in every).keys() - kept.keys()
        memories = [self.memories([one]) for one in given]
        return Beside(
            held=total(others | gradients, own, parameters),
            kept=total({one: size for one, size in others.items() if one not in goes}, own, parameters),
            own=total(_together(run.all for run in self.runs(number)), own, parameters, others),
            going=tuple(i for i, some in enumerate(memories) if some and some.keys() <= goes),
            parameters=total(parameters, own),
            gradients=self._later(number) if more else 0,
            state=total(self.state()),
        )

    def runs(self, number: int) -> list[Run]:
        """The forward runs of a graph in this step of which anything is alive."""
        self._runs[number] = [run for run in self._runs.get(number, ()) if run.all]
        return list(self._runs[number])

    def others(self, number: int) -> Memories:
        """What runs of other graphs hold."""
        numbers = [one for one in list(self._runs) if one != number]
        return _together(run.all for one in numbers for run in self.runs(one))

    @property
    def is_used(self) -> bool:
        """Whether any module is still there whose graphs these are."""
        return bool(self._alive_modules())

    @property
    def has_several(self) -> bool:
        """Whether more than one run holds anything."""
        return sum(map(len, list(self._runs.values()))) > 1

    def waits(self) -> bool:
        """Whether any run waits for its backward run."""
        return any(run.waits for runs in list(self._runs.values()) for run in list(runs))

    def waiting(self) -> list[int]:
        """Graphs of which a run has kept something for its backward run, which has not been."""
        every = [(number, run) for number, runs in list(self._runs.items()) for run in list(runs)]
        return list(dict.fromkeys(number for number, run in every if not run.over and _alive(run.kept)))

    def parameters(self) -> Memories:
        """And buffers, and whatever graphs were given in a step before this one that is still there."""
        state = self.state()
        lasting = {one: size for one, size in _alive(self._lasting).items() if one not in state}
        return self.memories(self._values()) | lasting

    def state(self) -> Memories:
        """What optimizers keep for parameters, as far as it was there when the step began."""
        if self._state is None:
            parameters = [one for one in self._values() if isinstance(one, torch.nn.Parameter)]
            self._state = self.memories(states_of(parameters))
        return _alive(self._state)

    def gradients(self) -> Memories:
        """Those that parameters have, of this step or of those before it."""
        leaves = (value for value in self._values() if value.is_leaf)  # PyTorch warns of others
        return self.memories(value.grad for value in leaves)

    def on_the_way(self, given: Iterable[torch.Tensor]) -> int:
        """Bytes of gradients that backward passes have made and nobody has taken yet, but for those given."""
        self._made_back = [one for one in self._made_back if one.tensor() is not None]
        return bytes_of(self._made_back, but=self.told(given))

    def went_forward(self, number: int, run: Run) -> None:
        """A graph has run forward."""
        self._runs.setdefault(number, []).append(run)

    def went_back(self, made: Iterable[Any]) -> None:
        """A graph has made gradients.

        Who asks for its memory has a share in it, and PyTorch then adds nothing to it in place: they are told
        by themselves, which they are for as long as nobody has taken them.
        """
        self._made_back += self.told(made)

    def told(self, values: Iterable[Any]) -> list[Told]:
        """Tensors that lie on the device, without a share in their memory."""
        plain = (one for value in values for one in _plain(value) if one.device == self.device)
        return [Told(weakref.ref(one), one.data_ptr(), extent(one)) for one in plain]

    def step(self) -> None:
        """A new step begins: what is still there of the last one, its graphs do not know of."""
        runs = [run for some in self._runs.values() for run in some]
        made = _together(run.asked | run.kept for run in runs)
        given = _together(_alive(run.given) for run in runs)
        self._lasting = _alive(self._lasting) | {one: size for one, size in given.items() if one not in made}
        self._runs.clear()
        self._made_back.clear()
        self._state = None

    def memories(self, values: Iterable[Any]) -> Memories:
        """Of tensors that lie on the device."""
        found: Memories = {}
        for one in values:
            for plain in _plain(one):
                if plain.device == self.device:
                    storage = plain.untyped_storage()
                    found[StorageWeakRef(storage)] = storage.nbytes()
        return found

    def _values(self) -> Iterator[torch.Tensor]:
        for module in self._alive_modules():
            yield from module.parameters()
            yield from module.buffers()
        for reference in list(self._parameters.values()):
            if (one := reference()) is not None:
                yield one

    def _alive_modules(self) -> list[torch.nn.Module]:
        return [module for one in list(self._modules.values()) if (module := one()) is not None]

    def _later(self, number: int) -> int:
        """Gradients of parameters that no graph up to this one reads, or that a module has twice."""
        read = {one for earlier, given in self._given.items() if earlier <= number for one in given}
        found: Memories = {}
        for module in self._alive_modules():
            seen: Memories = {}
            for value in (one for _, one in module.named_parameters(remove_duplicate=False)):
                if value.requires_grad and value.is_leaf and value.grad is None:
                    memory = self.memories([value])
                    found |= {one: size for one, size in memory.items() if one in seen or one not in read}
                    seen |= memory
        return total(found)


def states_of(parameters: Sequence[torch.nn.Parameter]) -> Iterator[Any]:
    """What optimizers of any kind keep for parameters, in dictionaries by parameters.

    Some of them are asked who holds them, since it takes longer the more are asked: an optimizer of none of
    those is not found.
    """
    trained = [one for one in parameters if one.requires_grad]
    for holder in gc.get_referrers(*trained[:: max(len(trained) // _ASKED, 1)]):
        if isinstance(holder, dict) and isinstance(next(iter(holder), None), torch.nn.Parameter):
            for one in parameters:
                if isinstance(state := holder.get(one), dict):
                    yield from state.values()


def with_most(sizes: Mapping[torch.device, int]) -> torch.device:
    """The device where most bytes lie, if not all of them lie on the CPU."""
    return max(sizes, key=lambda one: (one.type != "cpu", sizes[one]), default=torch.device("cpu"))


def total(memories: Mapping[StorageWeakRef, int], *but: Memories) -> int:
    """Bytes of memories, but for those of others."""
    return sum(size for one, size in memories.items() if not any(one in some for some in but))


def bytes_of(tensors: Iterable[Told], *, but: Iterable[Told] = ()) -> int:
    """Of tensors that are alive, but for those that lie where others do."""
    taken = {one.place for one in but}
    there = (one for one in tensors if one.tensor() is not None and one.place not in taken)
    return sum({one.place: one.size for one in there}.values())


def _together(some: Iterable[Memories]) -> Memories:
    return {memory: size for one in some for memory, size in one.items()}


def _alive(memories: Memories) -> Memories:
    return {one: size for one, size in memories.items() if not one.expired()}


def _plain(value: Any) -> Iterator[torch.Tensor]:
    """A tensor, or those inside of one that is made of others, if it has memory."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or is_lazy(value):
        return
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain(getattr(value, name))
    elif value.layout == torch.strided and value.device.type != "meta":
        yield value
