"""Tape of the operations on a model's output up to the backward, and their replay for other outputs."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from mempool.errors import UsageError
from mempool.torch.estimate.inputs import resizable
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.sources.batch_rescaling import Rescaling, UnknownSizeError
from mempool.torch.estimate.sources.program_control import place

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from torch import Tensor, nn


#: Names of functions that change an argument and return nothing.
_SETTERS = frozenset(("__setitem__", "__set__"))


@dataclass(frozen=True)
class TapeEntry:
    """An operation as called.

    Attributes:
        function: PyTorch's, with arguments and result.
        shapes: shapes of the tensors among the arguments, before an in-place operation could change them.
        gradients: whether gradients were recorded.
        autocast: lower precision of the active autocast; None: no autocast.
        line: file and line of the program.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    shapes: tuple[torch.Size, ...]
    gradients: bool
    autocast: torch.dtype | None
    line: str

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return str(getattr(self.function, "__name__", self.function))

    @property
    def in_place(self) -> bool:
        """Return whether the operation changes or returns an argument."""
        given = {id(leaf) for leaf in tensors_in((self.args, self.kwargs))}
        return self.name in _SETTERS or any(id(leaf) in given for leaf in tensors_in(self.result))


@dataclass
class Tape:
    """Operations since a model returned.

    Attributes:
        running: whether a model has returned an output to record from.
        entries: in the order of the program.
        losses: tensors at which a backward began.
        held: identities of the tensors that variables of the program hold during the backward.
    """

    running: bool = False
    entries: list[TapeEntry] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    held: frozenset[int] = frozenset()

    def restart(self) -> None:
        """Clear the tape and start recording: a model has returned an output that can be trained."""
        self.running = True
        self.entries.clear()

    def stop(self, losses: Any, variables: Iterable[Any]) -> None:
        """End the tape at a backward; the computation of the loss is on the tape."""
        self.running = False
        self.losses = list(tensors_in(losses))
        self.held = frozenset(id(leaf) for leaf in tensors_in(list(map(_parts, variables))))

    def call(
        self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], autocast: torch.dtype | None
    ) -> Any:
        """Call a function, and record the call if a tensor is made or changed."""
        if function is torch.Tensor.__iter__:
            return iter(self.call(torch.Tensor.unbind, args, kwargs, autocast))
        shapes = tuple(leaf.shape for leaf in tensors_in((args, kwargs)))
        result = function(*args, **kwargs)
        if getattr(function, "__name__", "") in _SETTERS or next(tensors_in(result), None) is not None:
            gradients = torch.is_grad_enabled()
            made = TapeEntry(function, tuple(args), kwargs, result, shapes, gradients, autocast, place())
            self.entries.append(made)
        return result


def tensors_in(given: Any) -> Iterator[Tensor]:
    """Yield the tensors in a structure, in order."""
    for leaf in pytree.tree_leaves(given):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _parts(variable: Any) -> Any:
    """Return the parts of a small container, a tensor unchanged, and None for other values."""
    if isinstance(variable, (list, tuple, dict)) and len(variable) <= OPTIONS.variable_parts:
        return list(variable.values()) if isinstance(variable, dict) else list(variable)
    return variable if isinstance(variable, torch.Tensor) else None


class UnreplayableLossError(Exception):
    """Error for a program's loss that cannot be recomputed; the text continues "its loss"."""


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor's value in a replay."""

    number: int


@dataclass(frozen=True)
class _Step:
    """An entry of the tape, with slots instead of tensors.

    Attributes:
        entry: the entry.
        args, kwargs: arguments of the call.
        results: slots of the tensors in the result.
        dies: slots that no later step reads and no variable holds.
        cast: lower precision to run in, or ``False`` for that of the model's call.
    """

    entry: TapeEntry
    args: Any
    kwargs: Any
    results: tuple[int, ...]
    dies: tuple[int, ...]
    cast: Any


class ReplayedLoss:
    """A program's loss as a function of a model's output, and of tensors made before.

    Args:
        tape: the program's operations on the output.
        model: the called model.
        output: of the call.
        batch: samples in the call; None if unknown.
        autocast: lower precision of the call.

    Raises:
        UntakenLossError: the tape does not lead from the output to the loss.
    """

    def __init__(
        self, tape: Tape, model: nn.Module, output: Any, batch: int | None, autocast: torch.dtype | None
    ) -> None:
        self._batch = batch
        self._outputs = [leaf.shape for leaf in outputs_of(output)]
        self._losses = _losses(tape)
        slots = _Slots(model, output)
        kept, derived = _kept(tape, self._losses, output)
        kept = [entry for entry in kept if not _makes_labels(entry, kept)]
        drafts = [(entry, *slots.given(entry), slots.results(entry)) for entry in kept]
        self._loss_slots = [slots.of(loss) for loss in self._losses]
        if not any(id(loss) in derived for loss in self._losses):
            raise UnreplayableLossError("does not depend on the output of the model that is tried")
        self._externals, self._parameters = slots.externals, slots.parameters
        self._firsts = {shape[0] for entry in kept for shape in _shapes(entry.result) if shape}
        self._held = {slots.of(leaf) for entry in kept for leaf in tensors_in(entry.result)
                      if id(leaf) in tape.held}  # fmt: skip
        self._steps = _steps(drafts, {*self._held, *self._loss_slots}, autocast)
        self._model: list[Tensor] = []
        self._variables: dict[int, Tensor] = {}

    @property
    def only_scales(self) -> bool:
        """Return whether the loss computes with single numbers only, such as the model's own loss divided."""
        return not any(
            leaf.dim()
            for step in self._steps
            for leaf in tensors_in((step.entry.args, step.entry.kwargs, step.entry.result))
        )

    def making(self, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Wrap `make`: the loss reads the parameters of the latest model made."""

        def made() -> nn.Module:
            model = make()
            self._model = _of_model(model) if self._parameters else []
            self._variables = {}
            return model

        return made

    def labels(self, batch: int) -> list[Tensor]:
        """Return the tensors that the loss takes beside the output, for a batch."""
        return [self._sized(tensor, batch) for _, tensor in self._externals]

    def _sized(self, tensor: Tensor, batch: int) -> Tensor:
        """Resize a tensor in proportion to the batch.

        Only tensors with as many rows as the program's batch, or as the first dimension of an operation on
        the output.
        """
        given, rows = self._batch, tensor.size(0) if tensor.dim() else 0
        if not given or batch == given or rows % given or rows not in {given, *self._firsts}:
            return tensor
        made: Tensor = resizable(tensor, rows)(rows // given * batch)
        return made

    def __call__(self, output: Any, labels: Sequence[Tensor]) -> Tensor:
        """Compute the loss.

        Raises:
            UsageError: an operation fails.
            UnknownSizeError: the batch is not the program's own, and sizes for another batch are not known.
        """
        outputs = list(outputs_of(output))
        values: dict[int, Any] = dict(enumerate(outputs))
        values.update({slot: self._model[at] for slot, at in self._parameters})
        values.update({slot: given for (slot, _), given in zip(self._externals, labels, strict=True)})
        sizes = Rescaling()
        for before, now in zip(self._outputs, outputs, strict=True):
            sizes.learn(before, now.shape)
        for (_, before), given in zip(self._externals, labels, strict=True):
            sizes.learn(before.shape, given.shape)
        for step in self._steps:
            self._do(step, values, sizes)
        losses = [values[slot].sum() if values[slot].dim() else values[slot] for slot in self._loss_slots]
        total: Tensor = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total

    def _do(self, step: _Step, values: dict[int, Any], sizes: Rescaling) -> None:
        entry = step.entry
        args, kwargs = pytree.tree_map_only(_Slot, lambda slot: values[slot.number], (step.args, step.kwargs))
        if sizes.differ:
            args, kwargs = sizes.arguments(entry, args, kwargs)
        with torch.set_grad_enabled(entry.gradients), _precision(step.cast):
            try:
                result = entry.function(*args, **kwargs)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                if not sizes.differ:
                    text = " ".join(str(error).split())[:200]
                    raise UsageError(f"{entry.name} at {entry.line} of its loss fails: {text}") from error
                raise UnknownSizeError(entry, str(error)) from error
        made = list(tensors_in(result))
        if len(made) != len(step.results):
            raise UnknownSizeError(entry, f"{len(made)} tensors instead of {len(step.results)}")
        for slot, value, before in zip(step.results, made, tensors_in(entry.result), strict=True):
            values[slot] = value
            sizes.learn(before.shape, value.shape)
            if slot in self._held:
                self._variables[slot] = value
        for slot in step.dies:
            values.pop(slot, None)

    def check(self, output: Any) -> None:
        """Compute the loss once, of an output like the program's own.

        Raises:
            UntakenLossError: an operation fails, or no gradient reaches the output.
        """
        mine = pytree.tree_map_only(torch.Tensor, _leaf, list(outputs_of(output)))
        try:
            loss = self(mine, self.labels(self._batch or 1))
        except Exception as error:
            raise UnreplayableLossError(f"cannot be computed again: {error}") from error
        finally:
            self._variables = {}
        if not _reaches(loss, [leaf.grad_fn for leaf in mine if leaf.requires_grad]):
            raise UnreplayableLossError("depends on the output by values only: no gradient goes back to it")


def replayed_loss(
    tape: Tape,
    model: nn.Module,
    output: Any,
    batch: int | None,
    autocast: torch.dtype | None,
    make: Callable[[], nn.Module],
) -> ReplayedLoss:
    """Return the loss of a tape, after one trial computation.

    Raises:
        UntakenLossError: the tape has no loss, or the loss cannot be recomputed.
    """
    taped = ReplayedLoss(tape, model, output, batch, autocast)
    taped.making(make)()
    taped.check(output)
    return taped


def outputs_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model's output: in a structure, or attributes of an object."""
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not callable(leaf):
            yield from tensors_in(list(vars(leaf).values()))


class _Slots:
    """Slots of tensors by their identity: the output's first, then others as they occur."""

    def __init__(self, model: nn.Module, output: Any) -> None:
        self._of = {id(leaf): k for k, leaf in reversed(list(enumerate(outputs_of(output))))}
        self._next = itertools.count(len(list(outputs_of(output))))
        self._at = {id(tensor): at for at, tensor in enumerate(_of_model(model))}
        self._nodes = {leaf.grad_fn for leaf in outputs_of(output) if leaf.grad_fn is not None}
        self.externals: list[tuple[int, Tensor]] = []
        self.parameters: list[tuple[int, int]] = []

    def of(self, tensor: Tensor) -> int:
        """Return the slot of a tensor; a new one for an unknown tensor."""
        slot = self._of.get(id(tensor))
        if slot is None:
            slot = self._of[id(tensor)] = next(self._next)
            if id(tensor) in self._at:
                self.parameters.append((slot, self._at[id(tensor)]))
            else:
                self._check(tensor)
                self.externals.append((slot, tensor.detach() if tensor.requires_grad else tensor))
        return slot

    def _check(self, tensor: Tensor) -> None:
        """Raise UntakenLossError for a tensor computed from the output by operations on no tape."""
        if _reaches(tensor, self._nodes):
            kind = str(tensor.grad_fn and tensor.grad_fn.name())
            raise UnreplayableLossError(f"goes through {kind}, which is not recorded")

    def given(self, entry: TapeEntry) -> tuple[Any, Any]:
        """Return the arguments of an entry with slots instead of tensors."""
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: _Slot(self.of(tensor)), (entry.args, entry.kwargs)
        )
        return args, kwargs

    def results(self, entry: TapeEntry) -> tuple[int, ...]:
        """Return the slots of an entry's results."""
        found = []
        for leaf in tensors_in(entry.result):
            if id(leaf) not in self._of:
                self._of[id(leaf)] = next(self._next)
            found.append(self._of[id(leaf)])
        return tuple(found)


def _reaches(tensor: Tensor, nodes: Collection[Any]) -> bool:
    """Return whether a backward from the tensor reaches one of the nodes."""
    left, met = [tensor.grad_fn], set()
    while left:
        node = left.pop()
        if node is not None and node not in met:
            met.add(node)
            left += [following for following, _ in node.next_functions]
    return not met.isdisjoint(nodes)


def _losses(tape: Tape) -> list[Tensor]:
    """Return the tensors at which a backward began; without a backward, the last number with a gradient."""
    if tape.losses:
        return tape.losses
    for entry in reversed(tape.entries):
        for leaf in tensors_in(entry.result):
            if leaf.dim() == 0 and leaf.requires_grad:
                return [leaf]
    raise UnreplayableLossError("was not seen: no backward and no number with a gradient came of the output")


def _kept(tape: Tape, losses: Sequence[Tensor], output: Any) -> tuple[list[TapeEntry], set[int]]:
    """Return the entries that feed the loss or depend on the output, and the output's derived tensors."""
    needed = {id(loss) for loss in losses}
    derived = {id(leaf) for leaf in outputs_of(output)}
    of_output = set()
    for at, entry in enumerate(tape.entries):
        if any(id(leaf) in derived for leaf in tensors_in((entry.args, entry.kwargs))):
            of_output.add(at)
            derived |= {id(leaf) for leaf in tensors_in(entry.result)}
    kept = []
    for at, entry in reversed(list(enumerate(tape.entries))):
        given = {id(leaf) for leaf in tensors_in((entry.args, entry.kwargs))}
        made = {id(leaf) for leaf in tensors_in(entry.result)}
        if at in of_output or made & needed or (entry.in_place and given & needed):
            kept.append(entry)
            needed |= given
    return kept[::-1], derived


def _makes_labels(entry: TapeEntry, entries: Sequence[TapeEntry]) -> bool:
    """Return whether an entry makes whole numbers from no tensor, which stand for labels of the data."""
    result = entry.result
    if not isinstance(result, torch.Tensor) or result.is_floating_point() or result.dtype is torch.bool:
        return False
    changed = (other for other in entries if other.in_place)
    return next(tensors_in((entry.args, entry.kwargs)), None) is None and not any(
        leaf is result for other in changed for leaf in tensors_in((other.args, other.kwargs))
    )


def _steps(
    drafts: Sequence[tuple[TapeEntry, Any, Any, tuple[int, ...]]], held: set[int], autocast: Any
) -> list[_Step]:
    """Return the steps in order, each with the slots that die after the step."""
    read: set[int] = set()
    steps = []
    for entry, args, kwargs, results in reversed(drafts):
        leaves = pytree.tree_leaves((args, kwargs))
        mine = {leaf.number for leaf in leaves if isinstance(leaf, _Slot)} | set(results)
        dies = tuple(mine - read - held)
        read |= mine
        cast = False if entry.autocast == autocast else entry.autocast
        steps.append(_Step(entry, args, kwargs, results, dies, cast))
    return steps[::-1]


def _precision(cast: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast that was active after the model's call, if different from the call's own."""
    if cast is False:
        return contextlib.nullcontext()
    lower: contextlib.AbstractContextManager[Any] = torch.autocast(
        "cpu", cast or torch.bfloat16, enabled=cast is not None
    )
    return lower


def _shapes(given: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tensors_in(given)]


def _of_model(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _leaf(tensor: Tensor) -> Tensor:
    """Return a tensor of the same form, as if a model had returned it."""
    made = torch.empty_like(tensor)
    return made.requires_grad_() * 1 if tensor.requires_grad else made
