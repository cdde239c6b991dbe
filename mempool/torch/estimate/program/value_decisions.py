"""Reads of values by a program whose tensors have none: answers, and the lines that decide by them."""

from __future__ import annotations

import ast
import contextlib
import itertools
import linecache
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mempool.torch.estimate.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import FrameType


_OTHERS = (
    str(Path(__file__).parents[3]),
    str(Path(torch.__file__).parent),
    str(contextlib.__file__),
    "<",
)
_aten = torch.ops.aten
#: Random indices and orders, which hosts read.
_DRAWN = frozenset(
    getattr(getattr(_aten, name), overload)
    for name, overloads in (
        ("randint", "default low generator low_generator"),
        ("randperm", "default generator"),
    )
    for overload in overloads.split()
)
_ATTRIBUTE = "_mempool_true_if_finite"
_FALSE = frozenset(("isnan", "isinf", "isposinf", "isneginf"))
_KEPT = frozenset(("any", "all", "bool", "view", "reshape", "flatten", "detach", "cpu", "to"))
_NOT = frozenset(("logical_not", "bitwise_not", "__invert__"))
_OR = frozenset(("logical_or", "bitwise_or", "__or__", "__ror__"))
_AND = frozenset(("logical_and", "bitwise_and", "__and__", "__rand__"))


class ValueReads(TorchDispatchMode):
    """Dispatch mode that answers a program's reads: zero for numbers, false for conditions.

    Conditions on NaN and infinity get the answer for finite numbers, and assertions hold; if another answer
    decides on the course of the program, or a whole number may become a size, the line is added to
    ``decisions``. Random indices and orders have values.
    """

    def __init__(self, decisions: list[str]) -> None:
        super().__init__()
        self._decisions = decisions
        self._known: dict[tuple[str, int], bool] = {}  # whether an assertion reads, by line

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].constant is None:
            if (truth := true_if_finite(args[0])) is not None:
                return truth
            return self._answer(args[0].dtype)
        result = func(*args, **(kwargs or {}))
        if func in _DRAWN and result.numel() <= OPTIONS.known_elements:
            with _disable_current_modes():
                result.constant = func(*args, **(kwargs or {}))
            result.fake_mode.fake_tensor_converter.add_constant_storage_mapping(result)
        return result

    def _answer(self, dtype: torch.dtype) -> bool | float:
        whole = not (dtype is torch.bool or dtype.is_floating_point or dtype.is_complex)
        asserted = self._note(program_frames(), whole=whole)
        return asserted if dtype is torch.bool else 0 if whole else 0.0

    def _note(self, frames: Sequence[FrameType], *, whole: bool) -> bool:
        """Note the decision for which a value is read, once; return whether an assertion reads the value."""
        if not frames:
            return False
        line = frames[0].f_code.co_filename, frames[0].f_lineno
        if line not in self._known:
            self._known[line] = _is_asserted(frames[0])
            found = decision(frames, whole=whole)
            known = {decided.partition(" (in ")[0] for decided in self._decisions}
            if found and found.partition(" (in ")[0] not in known:
                self._decisions.append(found)
        return self._known[line]


def program_frames() -> list[FrameType]:
    """Return the frames of the program, innermost first: those outside PyTorch and this package."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OTHERS):
            found.append(frame)
        frame = frame.f_back
    return found


def _is_asserted(frame: FrameType) -> bool:
    scope = _scope(frame)
    read = _Span.of(frame)
    nodes = () if scope is None else _own_nodes(scope)
    return any(isinstance(node, ast.Assert) and read.within(node) for node in nodes)


class FiniteNumbers(TorchFunctionMode):
    """Function mode that records the value of each condition if all numbers are finite."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        truth = _truth(getattr(func, "__name__", ""), args)
        if truth is not None and isinstance(result, torch.Tensor):
            setattr(result, _ATTRIBUTE, truth)
        return result


def true_if_finite(tensor: torch.Tensor) -> bool | None:
    """Return the value of a condition if all numbers are finite; None if unknown."""
    found: bool | None = getattr(tensor, _ATTRIBUTE, None)
    return found


def _truth(name: str, args: Any) -> bool | None:
    if name in _FALSE or name == "isfinite":
        return name == "isfinite"
    known = [true_if_finite(arg) for arg in args[:2] if isinstance(arg, torch.Tensor)]
    if not known or all(truth is None for truth in known):
        return None
    if name in _KEPT:
        return known[0]
    if name in _NOT:
        return not known[0]
    decides = name in _OR
    if len(known) == 2 and (decides or name in _AND):
        if decides in known:
            return decides
        return None if None in known else not decides
    return None


#: Functions whose arguments become sizes or counts of rounds.
_COUNTING = frozenset(("range", "int", "ceil", "floor"))
_COUNTING_WHOLE = _COUNTING - {"int"}  #: for a value that is a whole number already
#: Functions that report and summarize numbers, by their last names.
_REPORTS = """
    abs add add_scalar add_scalars append debug dict dump dumps error extend float format info int item list
    log log_dict log_metrics max mean min print report round set set_description set_postfix step str sum
    tuple update warning write
"""
_REPORTING = frozenset(_REPORTS.split())
#: Functions that test whether a number is finite, which holds in a sound run.
_FINITE = frozenset(("isfinite", "isnan", "isinf"))
#: Parts of the paths of installed libraries.
INSTALLED = ("site-packages", "dist-packages")
#: Methods that store their arguments in their object.
_KEEPING = frozenset(("append", "appendleft", "extend", "add", "insert", "put", "update", "step"))
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef)
_ASSIGNED = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)


def decision(frames: Sequence[FrameType], *, whole: bool = False) -> str:
    """Return file and line of the decision for which a value is read, or "" if the value decides nothing.

    The value is followed through the names to which the reading function assigns it and, if that function
    returns the value, through the calling functions. An assertion decides nothing: the run continues as if
    the assertion held.

    Args:
        frames: of the program at the read of the value, innermost first.
        whole: whether the value is a whole number, which decides if it becomes an index or an argument.
    """
    for frame in frames[: OPTIONS.calling_frames]:
        file = frame.f_code.co_filename
        scope = _scope(frame)
        if scope is None:
            return f"{file}:{frame.f_lineno}"  # no source to analyse
        found = _Flow(scope, _Span.of(frame), asks=frame is frames[0], whole=whole)
        if found.decides:
            return _place(file, found.decides, frames)
        if not found.returns:
            return ""
    return ""


def _place(file: str, line: int, frames: Iterable[FrameType]) -> str:
    """Format file and line; in an installed library, together with the line of the program that called it."""
    own_frames = [
        frame for frame in frames if not any(part in frame.f_code.co_filename for part in INSTALLED)
    ]
    for part in INSTALLED:
        if f"{part}/" in file and own_frames:
            within = file.rpartition(f"{part}/")[2]
            return f"{own_frames[0].f_code.co_filename}:{own_frames[0].f_lineno} (in {within}:{line})"
    return f"{file}:{line}"


def _scope(frame: FrameType) -> ast.AST | None:
    """Return the syntax tree of the frame's function, or of the module; None without a source."""
    code = frame.f_code
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    except (SyntaxError, ValueError):
        return None
    if not tree.body:
        return None
    nested = code.co_name.startswith("<")  # a generator, or the module itself
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _SCOPES)
        and (nested or node.name == code.co_name)
        and node.lineno <= frame.f_lineno <= (node.end_lineno or 0)
    ]
    return functions[-1] if functions else tree


class _Span(NamedTuple):
    """A part of a source: lines from one, columns in bytes."""

    line: int
    column: int
    end_line: int
    end_column: int

    @classmethod
    def of(cls, frame: FrameType) -> _Span:
        """Return the expression that a frame is executing; the whole line where columns are not recorded."""
        positions = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
        line, end_line, column, end_column = next(positions)
        if line is None or end_line is None or column is None or end_column is None:
            return cls(frame.f_lineno, 0, frame.f_lineno, 0)
        return cls(line, column, end_line, end_column)

    def within(self, node: Any) -> bool:
        """Return whether a node of the source contains the span."""
        starts = (node.lineno, node.col_offset) <= (self.line, self.column or node.col_offset)
        return starts and (self.end_line, self.end_column) <= (node.end_lineno, node.end_col_offset)

    def holds(self, node: Any) -> bool:
        """Return whether the span contains a node, such as the test of a statement that jumps."""
        starts = (self.line, self.column) <= (node.lineno, node.col_offset)
        return starts and (node.end_lineno, node.end_col_offset) <= (self.end_line, self.end_column)


class _Flow:
    """Flow of a value, read by an expression of a function, to names and decisions.

    Attributes:
        decides: line of the first decision by the value; 0 if the value decides nothing.
        returns: whether the function returns the value.
    """

    def __init__(self, scope: ast.AST, read: _Span, *, asks: bool, whole: bool) -> None:
        self._read, self._names = read, set[str]()
        self._nodes = list(_own_nodes(scope))
        self.decides, self.returns = 0, False
        if any(isinstance(node, ast.Assert) and read.within(node) for node in self._nodes):
            return
        before = -1
        while len(self._names) > before:
            before = len(self._names)
            for node in self._nodes:
                self._pass_on(node)
        counting = _COUNTING_WHOLE if whole else _COUNTING
        tests = [test for node in self._nodes for test in _tests(node, counting)]
        sizes = [size for node in self._nodes for size in _sizes(node)] if whole else []
        decides = [test for test in tests if self._has(test) or (asks and read.holds(test))]
        decides += [size for size in sizes if self._has(size)]
        self.decides = min((test.lineno for test in decides), default=0)
        self.returns = any(
            self._has(node.value)
            for node in self._nodes
            if isinstance(node, (ast.Return, ast.Yield)) and node.value is not None
        )

    def _has(self, node: ast.expr) -> bool:
        """Return whether an expression contains the value, or a name assigned from the value."""
        parts = list(_parts(node))
        harmless = any(_is_harmless(part) and self._read.within(part) for part in ast.walk(node))
        return (self._read.within(node) and not harmless) or any(_name(part) in self._names for part in parts)

    def _pass_on(self, node: ast.AST) -> None:
        """Add the names to which a statement assigns the value."""
        if isinstance(node, _ASSIGNED) and node.value is not None and self._has(node.value):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._names |= _targets(target)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)) and self._has(node.iter):
            self._names |= _targets(node.target)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            if any(self._has(argument) for argument in (*call.args, *(k.value for k in call.keywords))):
                self._names |= _keeper(call.func)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, except those of nested functions and classes."""
    left = list(ast.iter_child_nodes(scope))
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, (*_SCOPES, ast.ClassDef)):
            left += ast.iter_child_nodes(node)


def _sizes(node: ast.AST) -> Iterable[ast.expr]:
    """Return the expressions in a node whose whole numbers may become sizes: indices and arguments."""
    if isinstance(node, ast.Subscript):
        return (node.slice,)
    if isinstance(node, ast.Call) and _name(node.func).rpartition(".")[2] not in _REPORTING:
        return (*node.args, *(keyword.value for keyword in node.keywords))
    return ()


def _tests(node: ast.AST, counting: frozenset[str]) -> Iterable[ast.expr]:
    """Return the expressions in a node by which the program decides on its course."""
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return (node.test,)
    if isinstance(node, ast.comprehension):
        return node.ifs
    if isinstance(node, ast.Match):
        return (node.subject,)
    if isinstance(node, ast.Call) and _name(node.func).rpartition(".")[2] in counting:
        return node.args
    return ()


def _targets(node: ast.expr) -> set[str]:
    """Return the names that an assignment sets; for an element, the name of the container."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return set().union(*map(_targets, node.elts))
    if isinstance(node, (ast.Subscript, ast.Starred)):
        return _targets(node.value)
    return {_name(node)} - {""}


def _keeper(function: ast.expr) -> set[str]:
    """Return the name that keeps a call's arguments: the object of ``losses.append``, or the function."""
    if isinstance(function, ast.Attribute):
        return {_name(function.value)} - {""} if function.attr in _KEEPING else set()
    return {_name(function)} - {""}


def _name(node: Any) -> str:
    """Return the dotted name of a variable or attribute; "" for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (of := _name(node.value)):
        return f"{of}.{node.attr}"
    return ""


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and its descendants, except harmless tests."""
    if not _is_harmless(node):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _parts(child)


def _is_harmless(node: ast.AST) -> bool:
    """Return whether a test only checks for presence (``is``), or for a finite number."""
    if isinstance(node, ast.Compare):
        return all(isinstance(operator_, (ast.Is, ast.IsNot)) for operator_ in node.ops)
    return isinstance(node, ast.Call) and _name(node.func).rpartition(".")[2] in _FINITE
