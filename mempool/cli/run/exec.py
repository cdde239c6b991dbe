"""Fast path of ``mempool run``: starts the program of a plain command line at once.

The command's imports would delay the program, so this module parses plain command lines without typer. Help,
errors and unusual command lines take the slow path, which parses the command line again.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mempool.cli.output_files import overwritten_file, write_obstacle
from mempool.cli.run.child import OURS, VARIABLE
from mempool.python_options import python_options

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Options of `mempool run`, with true if a value follows.
OPTIONS = {
    "--record": True,
    "--accesses": False,
    "--plan": True,
    "--fresh": False,
    "--max-reserved": True,
    "--limit": True,
    "--backend": True,
    "--report": False,
    "--plot": True,
    "--explain": False,
    "--children": False,
    "--quiet": False,
    "--json": True,
}
#: Options that the slow path checks.
SLOW = ("--plan", "--plot", "--max-reserved", "--limit", "--backend")
#: Names of torchrun, as a module and as a script.
TORCHRUN = ("torch.distributed.run", "torch.distributed.launch", "torchrun")
NO_POOL_IN_RANKS = (
    "torchrun trains in child processes, which have no pool: say `mempool run --children`, or let torchrun "
    "start it, `torchrun --no-python ... mempool run train.py`"
)
_STARTUP = Path(__file__).parent / "startup"


def launch(arguments: Sequence[str]) -> None:
    """Replace this process by the program of a ``run`` command line; return if the slow path is needed."""
    given = parsed(arguments)
    if given is None or any(given[name] is not None for name in SLOW):
        return
    if given["--accesses"] and given["--record"] is None:
        return
    program = given["program"]
    from mempool.errors import UsageError
    from mempool.settings import check_swapping, settings

    try:
        chosen = settings()
        check_swapping(chosen)
        files = [
            None if name is None else Path(name)
            for name in (given["--record"] or chosen.record, given["--json"])
        ]
        if (
            chosen.plan is not None
            or not exists(program[0])
            or hidden_package(program) is not None
            or any(file is not None and write_obstacle(file) for file in files)
            or overwritten_file(files_of(program), files) is not None
        ):
            return
    except (UsageError, OSError, RuntimeError, ValueError):  # the slow path reports any error
        return
    # Absolute paths, as the program may change its working directory.
    record, json_file = (None if file is None else str(file.absolute()) for file in files)
    flags = {
        name: given[f"--{name}"] for name in ("accesses", "fresh", "report", "explain", "children", "quiet")
    }
    start(program, record=record, json_file=json_file, **flags)


def parsed(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return the options with "program"; None for a command line that needs the slow path."""
    given: dict[str, Any] = {name: None if value else False for name, value in OPTIONS.items()}
    rest = list(arguments)
    while rest and rest[0] in OPTIONS:
        name = rest.pop(0)
        if OPTIONS[name] and (not rest or rest[0] == "" or rest[0].startswith("-")):
            return None
        given[name] = rest.pop(0) if OPTIONS[name] else True
    if not rest or (rest[0].startswith("-") and not (rest[0] in ("-m", "-c") and len(rest) > 1)):
        return None
    return {**given, "program": rest}


def start(
    program: Sequence[str],
    *,
    record: str | None,
    json_file: str | None,
    accesses: bool,
    fresh: bool,
    report: bool,
    explain: bool,
    children: bool,
    quiet: bool,
    plan: str | None = None,
    plot: str | None = None,
    plan_client: str = "",
    max_reserved: int | None = None,
    limit: int | str | None = None,
    backend: str | None = None,
) -> None:
    """Replace this process by a plain Python that runs the program under `mempool.cli.run.child`."""
    pythonpath = os.environ.get("PYTHONPATH")
    options = {
        "pid": os.getpid(),
        "record": record,
        "accesses": accesses,
        "plan": plan,
        "plan_client": plan_client,
        "fresh": fresh,
        "json": json_file,
        "max_reserved": max_reserved,
        "limit": limit,
        "backend": backend,
        "report": report,
        "plot": plot,
        "explain": explain,
        "children": children,
        "quiet": quiet,
        "pythonpath": pythonpath,
    }
    if not quiet and (names := misplaced_options(program)):
        sys.stderr.write(f"mempool: {', '.join(names)} went to the program: options for mempool precede it\n")
    if not children and is_torchrun(program):
        sys.stderr.write(f"mempool: {NO_POOL_IN_RANKS}\n")
    environment = os.environ | {VARIABLE: json.dumps(options), "PYTHONPATH": _path(pythonpath)}
    if cache := os.environ.get("MEMPOOL_CACHE"):  # the program may change its working directory
        environment["MEMPOOL_CACHE"] = os.path.abspath(cache)  # noqa: PTH100
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *_interpreter_flags(), *program], environment)  # noqa: S606


def _path(before: str | None) -> str:
    return str(_STARTUP) if before is None else os.pathsep.join((str(_STARTUP), before))


def _interpreter_flags() -> list[str]:
    """Return this Python's command-line flags, without the flags that disable the environment or `site`."""
    found: list[str] = []
    for name, value in python_options(sys.orig_argv[1:]):
        if name not in "EIScm":
            found += [name if name.startswith("--") else f"-{name}", *([] if value is None else [value])]
    return found


def misplaced_options(program: Sequence[str]) -> list[str]:
    """Return the options of `mempool run` that stand among the program's arguments by mistake."""
    given = (argument.partition("=")[0] for argument in program[1:])
    return [name for name in dict.fromkeys(given) if name in OPTIONS or name == "--rehearse"]


def is_torchrun(program: Sequence[str]) -> bool:
    """Return true if the program is PyTorch's launcher of distributed training processes."""
    what = program[0] if program[0] != "-m" else "".join(program[1:2])
    return Path(what.removeprefix("-m")).name in TORCHRUN


def exists(script: str) -> bool:
    """Return true unless the command line names a script that does not exist."""
    return script.startswith("-") or (script != "" and Path(script).exists())


def files_of(program: Sequence[str]) -> list[Path]:
    """Return the program's files that the command line names."""
    script = Path(program[0])
    return [] if program[0].startswith("-") else [script, script / "__main__.py"]


def hidden_package(program: Sequence[str]) -> tuple[str, Path] | None:
    """Return (package, file) if a file in the program's folder hides a package of this project, else None."""
    script = Path(program[0])
    if program[0].startswith("-"):
        place = Path.cwd()
    else:
        place = script if script.is_dir() else Path(os.path.realpath(script)).parent
    for name in OURS:
        found = PathFinder.find_spec(name, [str(place)])
        if found is None or found.origin is None:
            continue  # a folder of data hides no package
        file = Path(found.origin)
        # The script itself is `__main__`, not a module of its name. Another copy of this project, such as the
        # clone, is harmless: see `mempool.cli.run.child.ProjectFinder`.
        if str(file) != os.path.realpath(script) and not (file.parent / _mark(name)).exists():
            return name, file
    return None


def _mark(name: str) -> str:
    """Return the name of a file that identifies this project's package."""
    return "_siblings.py" if name == "mempool" else "_mempool_sibling"
