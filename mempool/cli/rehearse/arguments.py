"""Parser of the options of ``mempool rehearse``."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mempool.cli.options import parsed
from mempool.cli.output import ExitCode, Stop
from mempool.rehearsal import ALLOCATORS, Machine
from mempool.rehearsal.job import POOLS

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Fields of `mempool.rehearsal.Job`, in addition to the plan, that all runs of a request share.
OF_ALL_RUNS = ("steps", "seconds", "timeout", "ranks", "allow_writes", "select", "check_streams")


@dataclass(frozen=True)
class Request:
    """A checked command line.

    Attributes:
        program: script or ``-m MODULE``, and arguments.
        machine: the devices.
        allocators: names, one run each.
        vary: name of a varied argument and its values, or None.
        limit: most bytes of memory, or a share of the first iteration's peak, such as "80%"; None: no limit.
        options: fields of `mempool.rehearsal.Job` that all runs share.
        quiet: show the program's output only after a failure.
    """

    program: tuple[str, ...]
    machine: Machine
    allocators: tuple[str, ...]
    vary: tuple[str, tuple[str, ...]] | None
    limit: int | str | None
    options: dict[str, Any]
    quiet: bool

    @property
    def limit_bytes(self) -> int | None:
        """Return the most bytes that PyTorch's allocator may hold, or None."""
        return self.limit if isinstance(self.limit, int) else None

    @property
    def several(self) -> bool:
        """Return true if there may be more than one run."""
        return len(self.allocators) > 1 or self.vary is not None

    def programs(self) -> Iterator[tuple[str | None, tuple[str, ...]]]:
        """Yield the varied value, None without ``--vary``, and the command line with that value."""
        if self.vary is None:
            yield None, self.program
            return
        name, values = self.vary
        for value in values:
            yield value, with_argument(self.program, name, value)


def parse_request(given: dict[str, Any]) -> Request:
    """Return the request of a command line.

    Raises:
        typer.BadParameter: an option is invalid; the message names the option.
    """
    allocators = tuple(given["allocator"].split(","))
    for name in allocators:
        if name not in ALLOCATORS:
            raise typer.BadParameter(f"--allocator: no allocator {name!r}; there are {', '.join(ALLOCATORS)}")
    if given["values"] not in ("zero", "random"):
        raise typer.BadParameter(f"--values: {given['values']!r} is neither zero nor random")
    if given["select"] not in ("none", "all"):
        raise typer.BadParameter(f"--select: {given['select']!r} is neither none nor all")
    vary = parsed("--vary", parse_variation, given["vary"])
    if given["trace"] is not None and (len(allocators) > 1 or vary is not None):
        raise typer.BadParameter("--trace is of one run: name one allocator, and no --vary")
    if given["trace"] is not None and allocators[0] in POOLS:
        raise typer.BadParameter("--trace is of PyTorch's own allocators; a pool's is `mempool run --record`")
    if given["trace"] is not None and allocators[0] == "async":
        raise typer.BadParameter("--trace is of native or expandable: PyTorch keeps no history of async")
    if given["plan"] is not None and not POOLS.keys() & set(allocators):
        raise typer.BadParameter("--plan is replayed by a pool: say -a mempool")
    if given["plan"] is not None and not given["plan"].is_file():
        raise Stop(ExitCode.FILE, f"{given['plan']}: No such file or directory")
    from mempool.hardware.gpu_memory import card

    machine = Machine(parsed("--card", card, given["card"]), devices=given["devices"], values=given["values"])
    plan = given["plan"]
    return Request(
        program=tuple(given["program"]),
        machine=machine,
        allocators=allocators,
        vary=vary,
        limit=parsed("--limit", parse_share_or_memory, given["limit"]),
        options={name: given[name] for name in OF_ALL_RUNS}
        | {"plan": None if plan is None else str(plan.absolute())},
        quiet=given["quiet"] or given["json"],
    )


def parse_share_or_memory(text: str) -> int | str:
    """Return the bytes of "12GiB", or a share such as "80%".

    Raises:
        UsageError: the text is neither.
    """
    from mempool.settings import parse_limit
    from mempool.units import parse_memory

    return parse_limit(text) if text.strip().endswith("%") else parse_memory(text)


def parse_variation(text: str) -> tuple[str, tuple[str, ...]]:
    """Return name and values of ``NAME=V[,V...]``.

    Raises:
        ValueError: the text has another form.
    """
    name, equals, values = text.partition("=")
    if not equals or not name or not all(values.split(",")):
        raise ValueError(f"{text!r} is not of the form NAME=VALUE,VALUE")
    return name.lstrip("-"), tuple(values.split(","))


def with_argument(program: tuple[str, ...], name: str, value: str) -> tuple[str, ...]:
    """Return a command line with an argument set to a value.

    ``{name}``, ``--name=old``, ``--name old`` and ``name=old`` are replaced; hyphens equal underscores.
    Otherwise ``--name=value`` is appended, with the hyphens or underscores of the script's text.
    """
    spelling = re.sub(r"[-_]", "[-_]", re.escape(name).replace(r"\-", "-").replace(r"\_", "_"))
    arguments = list(program)
    for at, argument in enumerate(arguments[1:], 1):
        if f"{{{name}}}" in argument:
            return (*arguments[:at], argument.replace(f"{{{name}}}", value), *arguments[at + 1 :])
        if match := re.fullmatch(rf"((?:--?)?{spelling}=).*", argument):
            return (*arguments[:at], match[1] + value, *arguments[at + 1 :])
        if re.fullmatch(rf"--?{spelling}", argument) and at + 1 < len(arguments):
            return (*arguments[: at + 1], value, *arguments[at + 2 :])
    with contextlib.suppress(OSError):
        text = Path(program[0]).read_text("utf-8", "replace")
        if written := re.search(rf"""["']--({spelling})["']""", text):
            name = written[1]
    return (*arguments, f"--{name}={value}")
