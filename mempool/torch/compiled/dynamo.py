"""Access to Dynamo: frames of the function being compiled, recompilation, and guards of dynamic sizes."""

from __future__ import annotations

import contextlib
import dis
import inspect
import math
import sys
import warnings
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import config
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import CompileContext

from mempool.torch.compiled.options import TUNABLES
from solvers.rewriting.judge import simulate
from solvers.swap import Link

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence
    from types import FrameType

    from torch import fx

    from mempool.torch.compiled.records import CompiledGraph

_DYNAMO = str(Path(torch._dynamo.__file__).parent)


_CALLED, _COMPILING = "eval_frame.py", "convert_frame.py"


def current_code() -> Hashable:
    """Return the code object of the function being compiled; recompilations return the same object."""
    try:
        code: CodeType = InstructionTranslator.current_tx().f_code
    except AttributeError:  # no function is being compiled
        return None
    return code


def continues_after(graph: fx.GraphModule) -> bool:
    """Return true if the function being compiled continues after this graph.

    The function continues after a graph break, or if a caller has more work to do afterwards. A graph break
    inside a module also breaks the graph of the module's caller, which continues when the module returns. The
    same holds for a caller of a module with a separately compiled part.
    """
    reason = getattr(graph, "compile_subgraph_reason", None)
    more = getattr(reason, "graph_break", False) or not all(map(_returns, _callers()))
    return bool(more) or bool(_containing_modules(_wrapper()))


def reachable_modules() -> list[torch.nn.Module]:
    """Return the modules that the function given to `torch.compile` can reach.

    The search covers the function itself, its arguments, globals, closure variables and `__self__`, the
    attributes of these objects, and the modules that called the function as one of their parts.
    """
    if (frame := _wrapper()) is None:
        return []
    function = frame.f_locals.get("fn")
    given = [*frame.f_locals.get("args", ()), *frame.f_locals.get("kwargs", {}).values()]
    found = [*given, *_referenced_by(function)]
    holders = [item for item in found if hasattr(item, "__dict__") and not isinstance(item, ModuleType)]
    inside = [value for item in holders for value in vars(item).values()]
    own = [item for item in [*found, *inside] if isinstance(item, torch.nn.Module)]
    return list({id(item): item for item in [*own, *_containing_modules(frame)]}.values())


def _containing_modules(wrapper: FrameType | None) -> list[torch.nn.Module]:
    """Return the calling modules that contain the compiled module and have additional parameters."""
    compiled = getattr(wrapper.f_locals.get("fn"), "__self__", None) if wrapper is not None else None
    if wrapper is None or not isinstance(compiled, torch.nn.Module):
        return []
    own, found = set(map(id, compiled.parameters())), []
    frame = wrapper.f_back
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if (
            isinstance(module, torch.nn.Module)
            and any(inside is compiled for inside in module.modules())
            and any(id(value) not in own for value in module.parameters())
        ):
            found.append(module)
        frame = frame.f_back
    return found


def _wrapper() -> FrameType | None:
    """Return the `compile_wrapper` frame in which PyTorch runs the compiled function, or None."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not _is_wrapper(frame):
        frame = frame.f_back
    return frame


def discard_compiled_code(code: Hashable) -> bool:
    """Discard the compiled code of a function; return true if `code` is a code object and was reset."""
    if isinstance(code, CodeType):
        reset_code(code)
    return isinstance(code, CodeType)


def graph_inputs(graph: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Return the values for a graph's placeholders, the graph's own parameters and buffers first.

    A placeholder without an example argument, such as in a graph that belongs to no function, yields the
    input.
    """
    given: list[Any] = [*graph.parameters(), *graph.buffers()]
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=False):
        argument = node.meta.get("grapharg")
        given.append(value if argument is None else argument.example)
    return given


def _referenced_by(function: Any) -> list[Any]:
    """Return a function with the `__self__`, globals and closure variables that the function uses."""
    function = inspect.unwrap(function) if callable(function) else function
    found = [function, getattr(function, "__self__", None)]
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    if code is not None:
        names = plain.__globals__
        found += [names[name] for name in code.co_names if name in names]
        for cell in plain.__closure__ or ():
            with contextlib.suppress(ValueError):  # the cell is empty
                found.append(cell.cell_contents)
    return found


def _is_wrapper(frame: FrameType) -> bool:
    """Return true if a frame is the `compile_wrapper` in which PyTorch runs a compiled function."""
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    return file.startswith(_DYNAMO) and file.endswith(_CALLED) and name == "compile_wrapper"


def _callers() -> Iterator[FrameType]:
    """Yield the callers of the frame being compiled, up to the compiled function."""
    frame: FrameType | None = sys._getframe()
    compiling = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_DYNAMO):
            if compiling and _is_wrapper(frame):
                return
            compiling |= file.endswith(_COMPILING)
        elif compiling:
            yield frame
        frame = frame.f_back


def _returns(frame: FrameType) -> bool:
    """Return true if the remainder of a frame only returns the result of the current call."""
    following = (
        instruction
        for instruction in dis.get_instructions(frame.f_code)
        if instruction.offset > frame.f_lasti
    )
    return next(following).opname == "RETURN_VALUE"


class _Refusal(BackendCompilerFailed):
    """Error of a backend that Dynamo raises unchanged, without its own frames and advice."""

    def __init__(self, error: Exception) -> None:
        super().__init__("mempool", error, None)
        self.__dict__.update(vars(error))

    def remove_dynamo_frames(self) -> Self:
        """See `BackendCompilerFailed`."""
        if not config.verbose:
            self.args = (str(self.inner_exception),)
            self.with_traceback(None)
        return self


def refusal(error: Exception) -> Exception:
    """Return an error of the same class that Dynamo shows as one line."""
    kind = type(error)
    made: type[_Refusal] = type(kind.__name__, (_Refusal, kind), {"__module__": kind.__module__})
    return made(error)


def warn_before_recompile_limit() -> None:
    """Warn before Dynamo's recompile limit is reached: uncompiled code runs without a memory limit."""
    number = getattr(CompileContext.current_compile_id(), "frame_compile_id", None)
    if number is not None and number + 1 == config.recompile_limit:
        warnings.warn(
            f"compiled {config.recompile_limit} times, as often as PyTorch allows: other or "
            "larger sizes than so far will run uncompiled, without any limit; run the largest sizes first, "
            "or raise torch._dynamo.config.recompile_limit",
            stacklevel=2,
        )


def guard_dynamic_sizes(inputs: Sequence[Any], compiled: CompiledGraph) -> None:
    """Recompile the graph when a dynamic size exceeds the sizes for which the decision is valid.

    If values are offloaded or recomputed, the decision is valid only up to the current sizes. Otherwise it is
    valid until the graph, with all sizes scaled by the same factor, exceeds the limit.

    Args:
        inputs: the inputs of the graph; the symbolic integers among them are the dynamic sizes.
        compiled: the decision about the graph.

    Raises:
        ValueError: a size is already larger than those of the decision.
    """
    sizes = [
        symbol for symbol in inputs if isinstance(symbol, torch.SymInt) and not symbol.node.is_nested_int()
    ]
    factor = (
        _fitting_factor(compiled, {symbol.node.expr: symbol.node.hint for symbol in sizes}) if sizes else 1.0
    )
    for size in sizes:
        if size > int(size.node.hint * factor):  # the comparison creates a guard
            raise ValueError(f"{size} is larger than the sizes of the decision")


def _fitting_factor(compiled: CompiledGraph, hints: Mapping[Any, int]) -> float:
    """Return the largest factor by which all sizes may grow; 1 if values are offloaded or recomputed."""
    decision, limit = compiled.decision, compiled.options.limit or 0
    if decision.changes_graph or decision.peak_bytes > limit:
        return 1.0

    def fits(factor: float) -> bool:
        return (
            _scaled_peak(compiled, {symbol: int(hint * factor) for symbol, hint in hints.items()}, factor)
            <= limit
        )

    low = 1.0
    for _ in range(TUNABLES.size_doublings):
        if not fits(2 * low):
            break
        low *= 2
    high = 2 * low
    for _ in range(TUNABLES.size_halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _scaled_peak(compiled: CompiledGraph, sizes: Mapping[Any, int], factor: float) -> int:
    """Return the peak in bytes of the graph with other sizes.

    A value whose size does not depend on `sizes` is scaled by the largest growth of the other values.
    """
    decision, beside = compiled.decision, compiled.options.beside
    graph = decision.captured.graph
    grown = graph.size.astype(np.float64)
    unknown = []
    for value, (held, node) in enumerate(zip(decision.captured.sizes, decision.captured.values, strict=True)):
        if isinstance(held, torch.SymInt) and held.node.expr.free_symbols <= sizes.keys():
            grown[value] = int(held.node.expr.xreplace(sizes))
        elif isinstance(held, torch.SymInt) or (
            node is not None and _has_symbolic_shape(node.meta.get("val"))
        ):
            unknown.append(value)
    most = max(factor, float((grown / np.maximum(graph.size, 1)).max(initial=1.0)))
    grown[unknown] *= most
    outside = max(decision.outside.during(backward=backward) for backward in (False, True))
    outside = beside + int((outside - beside) * most)
    larger = graph.with_columns(size=np.ceil(grown), workspace=np.ceil(graph.workspace * most))
    needs = simulate(larger, Link.of_rate(1.0), outside_bytes=outside).peak_bytes
    more = (
        decision.peak_bytes - decision.simulated.peak_bytes
    )  # excess of the kernels' peak over the operations' peak
    return (
        needs + int(more * most)
        if more > 0
        else math.ceil(needs * decision.peak_bytes / decision.simulated.peak_bytes)
    )


def _has_symbolic_shape(held: Any) -> bool:
    """Return true if a tensor's shape is symbolic; the storage of an input has the traced size anyway."""
    return isinstance(held, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in held.shape)
