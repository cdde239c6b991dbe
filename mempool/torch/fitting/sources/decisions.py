"""Lines at which a program's course depends on values of tensors, found in its source where it reads one."""

from __future__ import annotations

import ast
import itertools
import linecache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import FrameType

#: Calls from the read on that are looked at.
_MOST_CALLS = 30
#: Functions whose arguments become sizes or counts of rounds.
_COUNTING = frozenset(("range", "int", "ceil", "floor"))
#: Functions that ask whether a number is finite, which it is in a sound run.
_FINITE = frozenset(("isfinite", "isnan", "isinf"))
#: Methods of tensors that read their values.
_READING = frozenset(("item", "tolist"))
#: Parts of the paths of installed libraries.
INSTALLED = ("site-packages", "dist-packages")
#: Methods that put their arguments into their object.
_KEEPING = frozenset(("append", "appendleft", "extend", "add", "insert", "put", "update", "step"))
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef)
_ASSIGNED = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)


def decision(frames: Sequence[FrameType]) -> str:
    """Return file and line of the decision that a value is read for, or "" if there is none.

    The value is followed by the names it is given to, within the function that reads it and, where that
    returns it, within those that called it. An assertion decides nothing: a run goes on where it holds.

    Args:
        frames: of the program where it reads the value, the innermost first.
    """
    for frame in frames[:_MOST_CALLS]:
        file = frame.f_code.co_filename
        scope = _scope(frame)
        if scope is None:
            return f"{file}:{frame.f_lineno}"  # no source to look at
        found = _Flow(scope, _Span.of(frame), asks=frame is frames[0])
        if found.decides:
            return _place(file, found.decides, frames)
        if not found.returns:
            return ""
    return ""


def _place(file: str, line: int, frames: Iterable[FrameType]) -> str:
    """File and line; in an installed library, the line of the program that has called it, too."""
    mine = [one for one in frames if not any(part in one.f_code.co_filename for part in INSTALLED)]
    for part in INSTALLED:
        if f"{part}/" in file and mine:
            within = file.rpartition(f"{part}/")[2]
            return f"{mine[0].f_code.co_filename}:{mine[0].f_lineno} (in {within}:{line})"
    return f"{file}:{line}"


def later_decisions(frames: Iterable[FrameType]) -> list[str]:
    """Return files and lines of decisions that functions of the program are written to make by values.

    Of these functions no more is run: what a value decides behind a backward is told from the source alone.

    Args:
        frames: of the program in its backward; those of installed libraries are left out.
    """
    found: dict[str, None] = {}
    for frame in frames:
        file = frame.f_code.co_filename
        scope = None if any(part in file for part in INSTALLED) else _scope(frame)
        for line in () if scope is None else _written(scope):
            found[f"{file}:{line}"] = None
    return list(found)


def _written(scope: ast.AST) -> Iterator[int]:
    """Lines of decisions by what methods of tensors read."""
    reads = [
        node
        for node in _own_nodes(scope)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READING
    ]
    yield from filter(None, (_Flow(scope, _Span.at(node), asks=False).decides for node in reads))


def _scope(frame: FrameType) -> ast.AST | None:
    """The frame's function in the source, or the module; None where there is no source."""
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
        """The expression that a frame is in; its whole line where Python does not say more (3.10)."""
        positions: Iterable[tuple[int | None, ...]] = getattr(frame.f_code, "co_positions", tuple)()
        nothing = None, None, None, None
        line, end_line, column, end_column = next(
            itertools.islice(positions, frame.f_lasti // 2, None), nothing
        )
        if line is None or end_line is None or column is None or end_column is None:
            return cls(frame.f_lineno, 0, frame.f_lineno, 0)
        return cls(line, column, end_line, end_column)

    @classmethod
    def at(cls, node: Any) -> _Span:
        """That of a node."""
        return cls(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)

    def within(self, node: Any) -> bool:
        """Return whether a node of the source holds the span."""
        starts = (node.lineno, node.col_offset) <= (self.line, self.column or node.col_offset)
        return starts and (self.end_line, self.end_column) <= (node.end_lineno, node.end_col_offset)

    def holds(self, node: Any) -> bool:
        """Return whether the span holds a node, as a statement that jumps by a condition does."""
        starts = (self.line, self.column) <= (node.lineno, node.col_offset)
        return starts and (node.end_lineno, node.end_col_offset) <= (self.end_line, self.end_column)


class _Flow:
    """The names and decisions that a value comes to, which an expression of a function reads.

    Attributes:
        decides: line of the first decision by it; 0 if there is none.
        returns: whether the function returns it.
    """

    def __init__(self, scope: ast.AST, read: _Span, *, asks: bool) -> None:
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
        tests = [
            test.lineno
            for node in self._nodes
            for test in _tests(node)
            if self._has(test) or (asks and read.holds(test))
        ]
        self.decides = min(tests, default=0)
        self.returns = any(
            self._has(node.value)
            for node in self._nodes
            if isinstance(node, (ast.Return, ast.Yield)) and node.value is not None
        )

    def _has(self, node: ast.expr) -> bool:
        """Return whether an expression holds the value, or a name that the value was given to."""
        parts = list(_parts(node))
        harmless = any(_is_harmless(part) and self._read.within(part) for part in ast.walk(node))
        return (self._read.within(node) and not harmless) or any(_name(part) in self._names for part in parts)

    def _pass_on(self, node: ast.AST) -> None:
        """Add the names that a statement gives the value to."""
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
    """Nodes of a function, but for those of functions and classes inside of it."""
    left = list(ast.iter_child_nodes(scope))
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, (*_SCOPES, ast.ClassDef)):
            left += ast.iter_child_nodes(node)


def _tests(node: ast.AST) -> Iterable[ast.expr]:
    """Expressions in a node by which the program decides on its course."""
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return (node.test,)
    if isinstance(node, ast.comprehension):
        return node.ifs
    if isinstance(node, ast.Match):
        return (node.subject,)
    if isinstance(node, ast.Call) and _name(node.func).rpartition(".")[2] in _COUNTING:
        return node.args
    return ()


def _targets(node: ast.expr) -> set[str]:
    """Names that an assignment gives a value to; of a part the whole."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return set().union(*map(_targets, node.elts))
    if isinstance(node, (ast.Subscript, ast.Starred)):
        return _targets(node.value)
    return {_name(node)} - {""}


def _keeper(function: ast.expr) -> set[str]:
    """Names of what keeps the arguments of a call: the object of ``losses.append``, or what is called."""
    if isinstance(function, ast.Attribute):
        return {_name(function.value)} - {""} if function.attr in _KEEPING else set()
    return {_name(function)} - {""}


def _name(node: Any) -> str:
    """A variable, or an attribute of one with its dots; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (of := _name(node.value)):
        return f"{of}.{node.attr}"
    return ""


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The node and those in it, but for what is harmless."""
    if not _is_harmless(node):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _parts(child)


def _is_harmless(node: ast.AST) -> bool:
    """Return whether a test asks only if something is there, or if a number is finite."""
    if isinstance(node, ast.Compare):
        return all(isinstance(one, (ast.Is, ast.IsNot)) for one in node.ops)
    return isinstance(node, ast.Call) and _name(node.func).rpartition(".")[2] in _FINITE
