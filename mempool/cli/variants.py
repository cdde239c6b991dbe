"""Output about the variants of iterations in a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.cli.output import table
from mempool.units import binary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from traces.buffers import Buffers
    from traces.iterations.pattern import Pattern


def iterations_told(pattern: Pattern) -> str:
    """Return the number of iterations, and whether the pattern is an envelope of varying sizes."""
    if pattern.least is None:
        return f"{pattern.iterations} alike"
    return f"{pattern.iterations} whose sizes vary, each buffer as large as in any"


def answer(pattern: Pattern, buffers: Buffers) -> dict[str, Any]:
    """Return the ``--json`` object of one variant; ``buffers`` may have planned lifetimes."""
    from solvers import peak_load

    return {
        "iterations": pattern.iterations,
        "buffers": len(buffers),
        "sizes_vary": pattern.least is not None,
        "peak_load_bytes": peak_load(buffers),
    }


def show(kinds: Sequence[dict[str, Any]]) -> None:
    """Print a table of several variants, with their arenas if planned."""
    arenas = ("arena",) if "arena_bytes" in kinds[0] else ()
    table(
        "\nkinds of iterations",
        ("iterations", "buffers", "peak load", *arenas),
        [
            (
                f"{kind['iterations']:,}" + (" whose sizes vary" if kind["sizes_vary"] else ""),
                f"{kind['buffers']:,}",
                binary(kind["peak_load_bytes"]),
                *(binary(kind["arena_bytes"]) for _ in arenas),
            )
            for kind in kinds
        ],
    )
