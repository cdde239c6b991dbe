"""``mempool demo``: show the effect of the pool on a small network, in half a minute."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mempool.cli.output import ExitCode, Stop, console, facts, percent, print_json, progress, table
from mempool.units import binary

if TYPE_CHECKING:
    from mempool.demo.race import Race


def demo(
    *,
    framework: Annotated[
        str | None,
        typer.Option(
            help="What to train in: numpy, cupy or torch.", show_default="cupy where it has a GPU, else numpy"
        ),
    ] = None,
    marks: Annotated[
        bool,
        typer.Option("--marks/--no-marks", help="Tell the pool where iterations begin, or let it find out."),
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a small network with the default allocator and with the pool, and compare.

    The network is a perceptron of 784-1024-1024-10 with Adam in NumPy and CuPy, and six convolutions with
    AdamW in PyTorch, on one thread. Three processes run the same training in turns: two with the default
    allocator, whose results must be equal, and one with the pool.

    For example:

        mempool demo
        mempool demo --framework torch
        mempool demo --no-marks
        mempool demo --json
    """
    from mempool.demo.race import STEPS, TURNS, WorkerError, race
    from mempool.demo.worker import FRAMEWORKS, best_framework, title

    framework = framework or best_framework()
    if framework not in FRAMEWORKS:
        raise typer.BadParameter(f"no framework {framework!r}; there is {', '.join(FRAMEWORKS)}")
    if framework == "torch" and importlib.util.find_spec("torch") is None:
        raise Stop(ExitCode.USAGE, "PyTorch is not installed: pip install 'mempool[torch]'")
    if framework == "cupy" and best_framework() != "cupy":
        raise Stop(ExitCode.USAGE, "CuPy needs a GPU, and to be installed: pip install 'mempool[cuda12]'")
    with progress("starting three processes") as show:
        try:
            done = race(framework, marks=marks, steps=STEPS, turns=TURNS, show=show)
        except WorkerError as error:
            raise Stop(ExitCode.FAILED, f"a process of the demonstration failed: {error}") from None
    said = done.answer()
    if json:
        print_json(said)
    else:
        _show(done, said, title(framework))
    if not done.repeatable:
        raise Stop(
            ExitCode.NEGATIVE, "the default allocator does not give the same results twice on this machine"
        )
    if not done.identical:
        raise Stop(ExitCode.NEGATIVE, "the pool changed the results")


def _show(done: Race, said: dict[str, Any], trained: str) -> None:
    from mempool.cli.plot import show_addresses, show_load

    same = "identical to the bit" if said["identical"] else "DIFFERENT"
    facts(
        f"{said['iterations']} iterations of {trained}",
        [
            ("losses", f"{same}: {said['loss_first']:.4f} to {said['loss_last']:.6f}"),
            ("plan in effect", f"from iteration {said['plan_active_at_iteration']}"),
            ("hits, misses since", f"{said['hits']:,}, {said['misses']:,}"),
            ("peak load", binary(said["peak_load_bytes"] or 0)),
            ("lower bound", binary(said["lower_bound_bytes"] or 0)),
            (
                "arena as planned",
                f"{binary(said['planned_arena_bytes'] or 0)}, "
                f"fragmentation {percent(said['fragmentation'] or 0)}",
            ),
            ("persistent", binary(said["persistent_bytes"])),
        ],
    )
    _show_sides(said)
    if done.plan is not None and done.buffers is not None:
        print_to = console()
        print_to.print("\nload over time, one iteration")
        show_load(print_to, done.buffers)
        print_to.print("\naddresses over time: right is later, up is higher, a colour is a buffer")
        show_addresses(print_to, done.buffers, done.plan)


def _show_sides(said: dict[str, Any]) -> None:
    resident, faults, seconds = (
        said[key] for key in ("resident_bytes", "page_faults_per_iteration", "seconds_per_iteration")
    )
    rows = [
        (
            "time per iteration",
            *(f"{1000 * seconds[side]:.2f} ms" for side in seconds),
            f"{said['speedup']:.2f} x faster",
        ),
        ("page faults per iteration", *(f"{faults[side]:,.0f}" for side in faults), ""),
        ("resident above baseline", *(binary(resident[side]) for side in resident), ""),
        *_gpu_row(said["gpu_bytes"]),
        ("reserved by the pool", "", binary(said["reserved_bytes"]), ""),
        ("  at most, before it had a plan", "", binary(said["reserved_peak_bytes"]), ""),
    ]
    table("\nside by side (medians)", ("", "default", "pool", ""), rows)


def _gpu_row(used: dict[str, int]) -> list[tuple[str, ...]]:
    """Return the row of each side's GPU memory; empty without a GPU."""
    return [("taken from the GPU", *map(binary, used.values()), "")] if any(used.values()) else []
