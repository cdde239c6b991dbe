"""Rules for operations whose accesses differ from the default.

By default an operation reads all array arguments, and writes the result and the array given as ``out``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

#: An operand: its position among the arguments, and its name.
Operand = tuple[int, str]


@dataclass(frozen=True)
class Rule:
    """The difference of an operation from the default.

    Attributes:
        writes: operands that are written and not read.
        updates: operands that are read and written.
        ignores: operands whose elements are neither read nor written.
        metadata: the operation reads no array at all, as `numpy.shape`.
        fills: the operation writes the new array; `numpy.empty_like` does not.
        looks: the operation reads the operands although the result is a view, as `numpy.trim_zeros`.
        if_given: an argument, and the truth value at which ``updates`` applies; the argument's default is the
            opposite.
    """

    writes: tuple[Operand, ...] = ()
    updates: tuple[Operand, ...] = ()
    ignores: tuple[Operand, ...] = ()
    metadata: bool = False
    fills: bool = True
    looks: bool = False
    if_given: tuple[Operand, bool] | None = None

    def written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """Return the operands that are written, and the operands that are not read."""
        if not (self.writes or self.updates or self.ignores):
            return [], []
        unread = [
            value for one in (*self.writes, *self.ignores) if (value := _find(one, args, kwargs)) is not None
        ]
        written = [value for one in self.writes if (value := _find(one, args, kwargs)) is not None]
        if self.if_given is not None:
            one, needed = self.if_given
            given = _find(one, args, kwargs)
            if given is None or bool(given) is not needed:
                return written, unread
        updated = (_find(one, args, kwargs) for one in self.updates)
        return written + [value for value in updated if value is not None], unread


def _find(one: Operand, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    at, name = one
    return args[at] if at < len(args) else kwargs.get(name)


PLAIN = Rule()
_METADATA = Rule(metadata=True)
_MADE_LIKE = Rule(ignores=((0, "a"),))
_SELF_UPDATED = Rule(updates=((0, "self"),))
_SELF_WRITTEN = Rule(writes=((0, "self"),))

#: Rules of functions, by name.
FUNCTIONS: Mapping[str, Rule] = {
    "copyto": Rule(writes=((0, "dst"),)),
    "put": Rule(writes=((0, "a"),)),
    "place": Rule(writes=((0, "arr"),)),
    "putmask": Rule(writes=((0, "a"),)),
    "put_along_axis": Rule(writes=((0, "arr"),)),
    "fill_diagonal": Rule(writes=((0, "a"),)),
    "nan_to_num": Rule(updates=((0, "x"),), if_given=((1, "copy"), False)),
    "shuffle": Rule(updates=((0, "x"),)),  # of random generators
    "at": Rule(updates=((0, "a"),)),  # of ufuncs
    "empty_like": Rule(ignores=((0, "prototype"),), fills=False),
    "zeros_like": _MADE_LIKE,
    "ones_like": _MADE_LIKE,
    "full_like": _MADE_LIKE,
    "empty": Rule(fills=False),
    "trim_zeros": Rule(looks=True),
    "real_if_close": Rule(looks=True),
    "asarray_chkfinite": Rule(looks=True),
    **dict.fromkeys(
        (
            "shape", "ndim", "size", "result_type", "can_cast", "min_scalar_type", "common_type",
            "may_share_memory", "shares_memory", "iscomplexobj", "isrealobj", "isfortran", "broadcast_shapes",
        ),
        _METADATA,
    ),
}  # fmt: skip

#: Rules of array methods, by name; the array is the first operand.
METHODS: Mapping[str, Rule] = {
    "__setitem__": _SELF_WRITTEN,
    "fill": _SELF_WRITTEN,
    "put": _SELF_WRITTEN,
    "setfield": _SELF_WRITTEN,
    "itemset": _SELF_WRITTEN,
    "set": _SELF_WRITTEN,  # of CuPy
    "scatter_add": _SELF_UPDATED,
    "scatter_max": _SELF_UPDATED,
    "scatter_min": _SELF_UPDATED,
    "sort": _SELF_UPDATED,
    "partition": _SELF_UPDATED,
    "resize": _SELF_UPDATED,
    "byteswap": Rule(updates=((0, "self"),), if_given=((1, "inplace"), True)),
}


def rule_of(name: str) -> Rule:
    """Return the rule of a function, the default rule if no other applies."""
    return FUNCTIONS.get(name, PLAIN)
