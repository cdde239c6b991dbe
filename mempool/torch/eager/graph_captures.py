"""Patches of `torch.cuda.CUDAGraph`: storages that a captured graph uses stay at their addresses for good.

During a capture no event of work outside the graph may be waited for, so no storage moves.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.torch.eager.mode import OffloadMode


class GraphCaptures:
    """Tells a mode when captures begin and end, and its engine when graphs are replayed."""

    def __init__(self, mode: OffloadMode) -> None:
        self._mode = mode
        self._captured: set[int] = set()  # graphs whose capture goes on, by identity
        self._replaced: dict[str, Any] = {}

    def install(self) -> None:
        """Replace the methods; PyTorch 2.14 ends a capture by `capture_end_pre`."""
        graph = torch.cuda.CUDAGraph
        self._replace("capture_begin", self._beginning)
        self._replace("capture_end_pre" if hasattr(graph, "capture_end_pre") else "capture_end", self._ending)
        self._replace("replay", self._replaying)

    def remove(self) -> None:
        """Restore the methods."""
        for name, before in self._replaced.items():
            setattr(torch.cuda.CUDAGraph, name, before)
        self._replaced.clear()

    def _replace(self, name: str, instead: Callable[[Any], Any]) -> None:
        self._replaced[name] = before = getattr(torch.cuda.CUDAGraph, name)
        setattr(torch.cuda.CUDAGraph, name, functools.wraps(before)(instead(before)))

    def _beginning(self, function: Any) -> Any:
        def begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._mode.begin_capture()
            self._captured.add(id(graph))
            try:
                return function(graph, *args, **kwargs)
            except BaseException:
                self._end(graph)
                raise

        return begin

    def _ending(self, function: Any) -> Any:
        def end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return function(graph, *args, **kwargs)
            finally:
                self._end(graph)

        return end

    def _end(self, graph: Any) -> None:
        if id(graph) in self._captured:
            self._captured.remove(id(graph))
            self._mode.end_capture()

    def _replaying(self, function: Any) -> Any:
        def replay(graph: Any) -> Any:
            self._mode.engine.note_stream()
            return function(graph)

        return replay
