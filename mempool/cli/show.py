"""``mempool show``: draw a trace as one page of live buffers and addresses over time."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mempool.cli.options import Frames, Lenient, allocators
from mempool.cli.output import ExitCode, Stop, bar, facts, print_json, progress, tell_caveats
from mempool.cli.output_files import why_not, written_over
from mempool.cli.parsing import parsed
from mempool.units import binary

if TYPE_CHECKING:
    from mempool.cli.inputs import Work
    from mempool.show import Scene
    from traces import Trace


def show(
    trace: Annotated[
        Path, typer.Argument(help="A trace, a snapshot of PyTorch, a log of RMM, a CSV, or a plan alone.")
    ],
    plan: Annotated[Path | None, typer.Argument(help="A plan for it.")] = None,
    *,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page; in the current folder if not given.")
    ] = None,
    allocator: Annotated[
        list[str] | None,
        typer.Option(
            "-a",
            "--allocator",
            autocompletion=allocators(),
            metavar="NAME[:SETTINGS]",
            help="Also what this allocator would do; again for each. Settings are those of compare.",
        ),
    ] = None,
    swap: Annotated[
        Path | None,
        typer.Option(metavar="MOVES", help="What `mempool swap -o` wrote for this trace: the step with it."),
    ] = None,
    frames: Frames = False,
    lenient: Lenient = False,
    perfetto: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write this for ui.perfetto.dev; and no page unless -o is given."),
    ] = None,
    opened: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    r"""Write a page that shows where memory goes, buffers and addresses over time: one file, no network.

    The addresses are the recorded ones, the plan's, and those of the requested
    allocators; if there are none, a greedy plan is made. The page is called
    TRACE.html unless -o gives a name. Drawing needs
    Bokeh: pip install 'mempool\[show]'.

    For example:

        mempool show snapshot.pickle
        mempool show run.trace run.plan -o run.html --open
        mempool show snapshot.pickle -a pytorch -a bfc -a planned
        mempool show run.trace --perfetto run.json.gz
        mempool swap run.trace --limit 12GiB -o moves.json
        mempool show run.trace --swap moves.json --open
    """
    from mempool.analysis.allocator_specs import parse_choice

    page = output or (None if perfetto and not opened else Path(f"{trace.stem}.html"))
    _check_outputs(
        [path for path in (trace, plan, swap) if path], [path for path in (page, perfetto) if path]
    )
    if page and importlib.util.find_spec("bokeh") is None:
        raise Stop(
            ExitCode.FAILED, "show draws with bokeh, which is not installed: pip install 'mempool[show]'"
        )
    for text in allocator or ():
        parsed("--allocator", parse_choice, text)
    scene, skipped = _scene(trace, plan, allocator or [], swap, lenient=lenient)
    said = _written(scene, page, perfetto, frames=frames) | {"skipped": skipped}
    if page and opened:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
    if json:
        print_json(said)
    else:
        _show(trace.name, said)


def _check_outputs(inputs: list[Path], outputs: list[Path]) -> None:
    """Refuse unwritable outputs, and outputs that would replace an input, before the work."""
    if path := written_over(inputs, outputs):
        raise typer.BadParameter(f"{path} would take the place of another file of this command")
    for path in outputs:
        if reason := why_not(path):
            raise Stop(ExitCode.FILE, f"{path}: {reason}")


def _scene(
    trace: Path, plan: Path | None, allocators: list[str], swap: Path | None, *, lenient: bool
) -> tuple[Scene, dict[str, int] | None]:
    """Return the scene to draw, and the number of omitted events, by reason."""
    from mempool.cli.inputs import read_work
    from mempool.show import scene_of
    from mempool.show.swaps import with_swaps

    with bar(f"reading {trace}") as told:
        given = read_work(trace, whole=True, lenient=lenient, progress=told)
        solved = given if plan is None else read_work(plan)
    if plan is not None:
        if solved.plan is None:
            raise Stop(ExitCode.FILE, f"{plan}: a {solved.kind} without offsets, not a plan")
        _check_for(solved, given, trace, plan)
    if allocators and given.trace is None:
        raise typer.BadParameter(f"allocators are simulated on traces; {trace} is a {given.kind}")
    if swap is not None and given.trace is None:
        raise typer.BadParameter(f"moves are of traces; {trace} is a {given.kind}")
    with progress(f"placing {len(given.buffers):,} buffers"):
        swaps = None if swap is None or given.trace is None else _swaps(swap, given.trace)
        try:
            scene = scene_of(
                given.buffers if given.trace is None else given.trace,
                plan=solved.plan,
                planned=solved.buffers if solved.plan is not None else None,
                allocators=allocators,
                title=trace.name,
            )
        except ValueError as error:
            raise Stop(ExitCode.FILE, f"{trace}: {error}") from None
    return scene if swaps is None else with_swaps(swaps, scene), given.skipped


def _swaps(path: Path, trace: Trace) -> Scene:
    """Return the scene of a step with its moves, which are checked again whatever the file claims."""
    from mempool.show import swap_scene
    from solvers import PlanError
    from solvers.swap.schedule_file import read_schedule

    moves = read_schedule(path)
    device = moves.selection.device
    try:
        if len(trace.devices) > 1:
            if device not in trace.devices:
                raise PlanError(f"moves of device {device}, of which the trace tells nothing")
            trace = trace.on_device(device)
        step = moves.selection.step(trace)
        return swap_scene(step, moves.link, moves.schedule(step), limit=moves.limit_bytes)
    except PlanError as error:
        raise Stop(ExitCode.FILE, f"{path}: {error}") from None


def _check_for(solved: Work, given: Work, trace: Path, plan: Path) -> None:
    """Refuse a plan for another trace, whose picture would be wrong."""
    from mempool.cli.check import matching
    from mempool.cli.inputs import read_work
    from solvers import PlanError

    assert solved.plan is not None
    if solved.plan.period is not None:  # the plan is of one iteration
        given = read_work(trace, lenient=given.skipped is not None)
    try:
        matching(plan, solved, given)
    except PlanError as error:
        raise Stop(ExitCode.FILE, f"{plan}: {error}") from None


def _written(scene: Scene, page: Path | None, perfetto: Path | None, *, frames: bool) -> dict[str, Any]:
    from mempool.show import Figure, write_perfetto
    from traces.files import atomic

    said: dict[str, Any] = {
        "buffers": sum(len(timeline.size) for timeline in scene.timelines),
        "timelines": [timeline.title for timeline in scene.timelines],
        "caveats": [{"of": one.title, "caveat": text} for one in scene.timelines for text in one.caveats],
        "refused": [
            {"of": one.title, "count": len(one.notes.refused), "largest_bytes": int(one.notes.asked.max())}
            for one in scene.timelines
            if len(one.notes.refused)
        ],
        "views": [{"view": view.title, "of": scene.timelines[view.timeline].title} for view in scene.views],
    }
    if page:
        with progress(f"writing {page}"), atomic(page) as beside:
            text, counts = Figure(scene, frames).page()
            beside.write_text(text, encoding="utf-8")
        said |= {"page": str(page), "page_bytes": page.stat().st_size} | counts
    if perfetto:
        with progress(f"writing {perfetto}"):
            slices = write_perfetto(scene, perfetto, frames=frames)
        said |= {"perfetto": str(perfetto), "perfetto_bytes": perfetto.stat().st_size, "slices": slices}
    return said


def _show(name: str, said: dict[str, Any]) -> None:
    for one in said["caveats"]:
        tell_caveats(f"{name}, {one['of']}" if len(said["timelines"]) > 1 else name, [one["caveat"]])
    for one in said["refused"]:
        requests = "1 request" if one["count"] == 1 else f"{one['count']:,} requests"
        tell_caveats(
            f"{name}, {one['of']}" if len(said["timelines"]) > 1 else name,
            [f"out of memory: {requests} refused, the largest {binary(one['largest_bytes'])}"],
        )
    rows = [("buffers", f"{said['buffers']:,}"), ("views", ", ".join(one["view"] for one in said["views"]))]
    if "page" in said:
        rows.append(("page", f"{said['page']}, {binary(said['page_bytes'])}"))
        if said["drawn"] < said["pieces"]:
            rows.append(
                (
                    "drawn",
                    f"the largest {said['drawn']:,} one by one, {said['pieces'] - said['drawn']:,} as grey",
                )
            )
    if "perfetto" in said:
        rows.append(
            ("perfetto", f"{said['perfetto']}, {binary(said['perfetto_bytes'])}, {said['slices']:,} slices")
        )
    facts("written", rows)
