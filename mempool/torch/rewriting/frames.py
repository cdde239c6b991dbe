"""What is known of the function that PyTorch is compiling a graph of."""

from __future__ import annotations

import dis
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch._dynamo import config
from torch._guards import CompileContext

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from torch import fx

_DYNAMO = str(Path(torch._dynamo.__file__).parent)
_CALLED, _COMPILING = "eval_frame.py", "convert_frame.py"


def frame_of(graph: fx.GraphModule) -> tuple[int, bool]:
    """The frame that is being compiled, and whether its function goes on after this graph.

    It does where the graph breaks off, or where somebody has called the frame who has more to do then: a
    graph of a module that breaks off inside does so in the function that has called it, too, which goes on
    when the module has returned.
    """
    number = getattr(CompileContext.current_compile_id(), "frame_id", None)
    reason = getattr(graph, "compile_subgraph_reason", None)
    more = bool(getattr(reason, "graph_break", False)) or not all(map(_returns, _callers()))
    return number or 0, more


def _callers() -> Iterator[FrameType]:
    """Frames of the program that wait for the one that is being compiled, up to the compiled function."""
    frame: FrameType | None = sys._getframe()
    compiling = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_DYNAMO):
            if compiling and file.endswith(_CALLED) and frame.f_code.co_name == "compile_wrapper":
                return
            compiling |= file.endswith(_COMPILING)
        elif compiling:
            yield frame
        frame = frame.f_back


def _returns(frame: FrameType) -> bool:
    """Whether a frame returns what its call gives, and does nothing more."""
    following = (one for one in dis.get_instructions(frame.f_code) if one.offset > frame.f_lasti)
    return next(following).opname == "RETURN_VALUE"


def warn_of_the_last() -> None:
    """Say that PyTorch compiles the function no more: what it then runs has no limit."""
    number = getattr(CompileContext.current_compile_id(), "frame_compile_id", None)
    if number is not None and number + 1 == config.recompile_limit:
        warnings.warn(
            f"compiled {config.recompile_limit} times, as often as PyTorch allows: other or "
            "larger sizes than so far will run uncompiled, without any limit; meet the largest sizes first, "
            "or raise torch._dynamo.config.recompile_limit",
            stacklevel=2,
        )
