"""Output about the iterations of a trace: variants, and rejected patterns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.cli.output import table
from mempool.units import binary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from traces.buffers import Buffers
    from traces.iterations.pattern import Pattern


def describe_iterations(pattern: Pattern) -> str:
    """Return the number of iterations, and whether the pattern is an envelope of varying sizes."""
    if pattern.least is None:
        return f"{pattern.iterations} alike"
    return f"{pattern.iterations} whose sizes vary, each buffer as large as in any"


def describe_rejected(pattern: Pattern) -> str:
    """Describe a pattern that is too small a part of its trace."""
    return f"{len(pattern.buffers):,} allocations, {pattern.iterations} alike, are a small part"


def variant_answer(pattern: Pattern, buffers: Buffers) -> dict[str, Any]:
    """Return the ``--json`` object of one variant; ``buffers`` may have planned lifetimes."""
    from solvers import peak_load

    return {
        "iterations": pattern.iterations,
        "buffers": len(buffers),
        "sizes_vary": pattern.least is not None,
        "peak_load_bytes": peak_load(buffers),
    }


def print_variants(variants: Sequence[dict[str, Any]]) -> None:
    """Print a table of several variants, with their arenas if planned."""
    arenas = ("arena",) if "arena_bytes" in variants[0] else ()
    table(
        "\nvariants of iterations",
        ("iterations", "buffers", "peak load", *arenas),
        [
            (
                f"{variant['iterations']:,}" + (" whose sizes vary" if variant["sizes_vary"] else ""),
                f"{variant['buffers']:,}",
                binary(variant["peak_load_bytes"]),
                *(binary(variant["arena_bytes"]) for _ in arenas),
            )
            for variant in variants
        ],
    )
