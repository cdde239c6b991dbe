"""``mempool show``: draw a trace as one page of live buffers and addresses over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mempool.cli.options import Frames, Json, Lenient, allocators, parsed
from mempool.cli.output import (
    ExitCode,
    Stop,
    facts,
    print_caveats,
    print_json,
    progress,
    require_bokeh,
    require_writable,
)
from mempool.cli.output_files import overwritten_file
from mempool.units import binary

if TYPE_CHECKING:
    from mempool.offline import InputFile
    from mempool.show import Scene


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
    frames: Frames = False,
    lenient: Lenient = False,
    perfetto: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write this for ui.perfetto.dev; and no page unless -o is given."),
    ] = None,
    opened: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    json: Json = False,
) -> None:
    r"""Write a page that shows where memory goes, buffers and addresses over time: one file, no network.

    The addresses are the recorded ones, the plan's, and those of the requested
    allocators; if there are none, a greedy plan is made. The page is called
    TRACE.html unless -o gives a name. Drawing needs
    Bokeh: pip install 'mempool\[show]'.

    For example:

        mempool show snapshot.pickle
        mempool show run.trace run.plan -o run.html --open
        mempool show snapshot.pickle -a pytorch -a cupy -a planned
        mempool show run.trace --perfetto run.json.gz
    """
    from mempool.analysis.compare import parse_allocator

    page = output or (None if perfetto and not opened else Path(f"{trace.stem}.html"))
    _check_outputs([path for path in (trace, plan) if path], [path for path in (page, perfetto) if path])
    if page:
        require_bokeh("show")
    for text in allocator or ():
        parsed("--allocator", parse_allocator, text)
    scene, skipped = _scene(trace, plan, allocator or [], lenient=lenient)
    answer = _write_outputs(scene, page, perfetto, frames=frames) | {"skipped": skipped}
    if page and opened:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
    if json:
        print_json(answer)
    else:
        _print(trace.name, answer)


def _check_outputs(inputs: list[Path], outputs: list[Path]) -> None:
    """Refuse unwritable outputs, and outputs that would overwrite an input, before the work."""
    if path := overwritten_file(inputs, outputs):
        raise typer.BadParameter(f"{path} would take the place of another file of this command")
    for path in outputs:
        require_writable(path)


def _scene(
    trace: Path, plan: Path | None, allocators: list[str], *, lenient: bool
) -> tuple[Scene, dict[str, int] | None]:
    """Return the scene to draw, and the number of omitted events, by reason."""
    from mempool.cli.inputs import read_file
    from mempool.show import scene_of

    given = read_file(trace, whole=True, lenient=lenient)
    solved = given if plan is None else read_file(plan)
    if plan is not None:
        if solved.plan is None:
            raise Stop(ExitCode.FILE, f"{plan}: a {solved.format} without offsets, not a plan")
        _check_plan_matches(solved, given, trace, plan)
    if allocators and given.trace is None:
        raise typer.BadParameter(f"allocators are simulated on traces; {trace} is a {given.format}")
    with progress(f"placing {len(given.buffers):,} buffers"):
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
    return scene, given.skipped


def _check_plan_matches(solved: InputFile, given: InputFile, trace: Path, plan: Path) -> None:
    """Refuse a plan for another trace."""
    from mempool.cli.check import matching_plans
    from mempool.cli.inputs import read_file
    from solvers import PlanError

    assert solved.plan is not None
    if solved.plan.period is not None:  # a plan of one iteration
        given = read_file(trace, lenient=given.skipped is not None)
    try:
        matching_plans(plan, solved, given)
    except PlanError as error:
        raise Stop(ExitCode.FILE, f"{plan}: {error}") from None


def _write_outputs(scene: Scene, page: Path | None, perfetto: Path | None, *, frames: bool) -> dict[str, Any]:
    from mempool.show import Figure, write_perfetto
    from traces.files import atomic

    answer: dict[str, Any] = {
        "buffers": sum(len(timeline.size) for timeline in scene.timelines),
        "timelines": [timeline.title for timeline in scene.timelines],
        "caveats": [
            {"of": timeline.title, "caveat": text}
            for timeline in scene.timelines
            for text in timeline.caveats
        ],
        "refused": [
            {
                "of": timeline.title,
                "count": len(timeline.annotations.refused),
                "largest_bytes": int(timeline.annotations.asked.max()),
            }
            for timeline in scene.timelines
            if len(timeline.annotations.refused)
        ],
        "views": [{"view": view.title, "of": scene.timelines[view.timeline].title} for view in scene.views],
    }
    if page:
        with progress(f"writing {page}"), atomic(page) as temporary:
            text, counts = Figure(scene, frames).page()
            temporary.write_text(text, encoding="utf-8")
        answer |= {"page": str(page), "page_bytes": page.stat().st_size} | counts
    if perfetto:
        with progress(f"writing {perfetto}"):
            slices = write_perfetto(scene, perfetto, frames=frames)
        answer |= {"perfetto": str(perfetto), "perfetto_bytes": perfetto.stat().st_size, "slices": slices}
    return answer


def _print(name: str, answer: dict[str, Any]) -> None:
    several = len(answer["timelines"]) > 1
    for entry in answer["caveats"]:
        print_caveats(f"{name}, {entry['of']}" if several else name, [entry["caveat"]])
    for entry in answer["refused"]:
        requests = "1 request" if entry["count"] == 1 else f"{entry['count']:,} requests"
        print_caveats(
            f"{name}, {entry['of']}" if several else name,
            [f"out of memory: {requests} refused, the largest {binary(entry['largest_bytes'])}"],
        )
    views = ", ".join(entry["view"] for entry in answer["views"])
    rows = [("buffers", f"{answer['buffers']:,}"), ("views", views)]
    if "page" in answer:
        rows.append(("page", f"{answer['page']}, {binary(answer['page_bytes'])}"))
        if (grey := answer["pieces"] - answer["drawn"]) > 0:
            rows.append(("drawn", f"the largest {answer['drawn']:,} one by one, {grey:,} as grey"))
    if "perfetto" in answer:
        size = binary(answer["perfetto_bytes"])
        rows.append(("perfetto", f"{answer['perfetto']}, {size}, {answer['slices']:,} slices"))
    facts("written", rows)
