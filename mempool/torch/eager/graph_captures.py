"""Patches of `torch.cuda.CUDAGraph`: storages that a captured graph uses keep their addresses permanently.

A capture may not wait for events of work outside the graph, so no storage moves during a capture.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class GraphCaptures:
    """Calls functions when captures begin and end, and before graphs are replayed."""

    def __init__(
        self, on_begin: Callable[[], None], on_end: Callable[[], None], on_replay: Callable[[], None]
    ) -> None:
        self._on_begin, self._on_end, self._on_replay = on_begin, on_end, on_replay
        self._captured: set[int] = set()  # graphs under capture, by identity
        self._replaced: dict[str, Any] = {}

    def install(self) -> None:
        """Replace the methods; PyTorch 2.14 ends a capture by `capture_end_pre`."""
        graph = torch.cuda.CUDAGraph
        self._replace("capture_begin", self._wrap_begin)
        self._replace(
            "capture_end_pre" if hasattr(graph, "capture_end_pre") else "capture_end", self._wrap_end
        )
        self._replace("replay", self._wrap_replay)

    def remove(self) -> None:
        """Restore the methods."""
        for name, before in self._replaced.items():
            setattr(torch.cuda.CUDAGraph, name, before)
        self._replaced.clear()

    def _replace(self, name: str, instead: Callable[[Any], Any]) -> None:
        self._replaced[name] = before = getattr(torch.cuda.CUDAGraph, name)
        setattr(torch.cuda.CUDAGraph, name, functools.wraps(before)(instead(before)))

    def _wrap_begin(self, function: Any) -> Any:
        def begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._on_begin()
            self._captured.add(id(graph))
            try:
                return function(graph, *args, **kwargs)
            except BaseException:
                self._end(graph)
                raise

        return begin

    def _wrap_end(self, function: Any) -> Any:
        def end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return function(graph, *args, **kwargs)
            finally:
                self._end(graph)

        return end

    def _end(self, graph: Any) -> None:
        if id(graph) in self._captured:
            self._captured.remove(id(graph))
            self._on_end()

    def _wrap_replay(self, function: Any) -> Any:
        def replay(graph: Any) -> Any:
            self._on_replay()
            return function(graph)

        return replay
