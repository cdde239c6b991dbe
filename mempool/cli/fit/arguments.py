"""Parsing of the options of ``mempool fit``, before anything is imported or made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from mempool.cli.options import parsed
from mempool.torch import model_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mempool.hardware.gpu_memory import Card
    from mempool.torch.model_spec import ModelSpec


#: Options that change a model's step, and so do not apply to programs.
_OF_A_MODEL = (
    *("batch", "seq", "task", "mode", "optimizer", "loss", "dtype", "autocast"),
    *("checkpoint", "accumulate", "largest_batch", "remedies"),
)
#: Options that are attributes of a job, with the parser that checks a name, or None.
_OF_A_JOB = ("mode", "device", "checkpoint", "accumulate")
_NAMED: dict[str, Callable[[str], Any]] = {
    "dtype": model_spec.parse_type,
    "autocast": model_spec.parse_type,
    "optimizer": model_spec.parse_name,
    "loss": model_spec.parse_name,
}


@dataclass(frozen=True)
class FitRequest:
    """The request of a ``mempool fit`` command line; None for missing options.

    Attributes:
        target: the model.
        batches, seqs: sizes to try, in all combinations.
        limit_bytes: memory of the device.
        capability: compute capability of the card.
        card: name of the card in `mempool.hardware.gpu_memory`.
        job: attributes of the `Job`, with unresolved names of optimizer, loss and types.
        task: task of a model of transformers.
        arguments: arguments of the program in ``sys.argv``.
        main: whether to run a script as a program.
        allocators: allocators to simulate; the first decides the verdict.
        largest, remedies: arguments of `fit_job`.
        most_seconds: CPU seconds for trying remedies.
        traced: whether to keep the trace.
        notes: notes about options that override others.
    """

    target: ModelSpec
    batches: Sequence[int | None] = (None,)
    seqs: Sequence[int | None] = (None,)
    limit_bytes: int | None = None
    capability: tuple[int, int] | None = None
    card: str | None = None
    job: dict[str, Any] = field(default_factory=dict)
    task: str | None = None
    arguments: tuple[str, ...] = ()
    main: bool = False
    allocators: tuple[str, ...] = ()
    largest: bool | None = None
    remedies: bool | None = None
    most_seconds: float = 40
    traced: bool = False
    notes: tuple[str, ...] = ()

    @property
    def sweep(self) -> bool:
        """Return true if the request covers more than one size."""
        return len(self.batches) * len(self.seqs) > 1


def parse_request(options: dict[str, Any]) -> FitRequest:
    """Parse the options, given by name, into a request.

    Raises:
        typer.BadParameter: an option has no meaning, or two options contradict each other.
    """
    target = parsed("MODEL", model_spec.parse_target, options["target"])
    assert target is not None
    sizes = {name: parsed(f"--{name}", model_spec.parse_sizes, options[name]) for name in ("batch", "seq")}
    for name, parse in _NAMED.items():
        parsed(f"--{name}", parse, options[name])
    limit_bytes, card, notes = _limit(options["limit"], options["card"])
    for name, names in (("mode", ("train", "inference")), ("device", ("cuda", "cpu"))):
        if options[name] not in (None, *names):
            raise typer.BadParameter(f"--{name}: no {options[name]!r}; there are {', '.join(names)}")
    script = target.kind == "script"
    if script and not options["main"]:
        raise typer.BadParameter(f"--main runs {target} as a program; {model_spec.IN_PYTHON}")
    if not script and (options["main"] or options["arguments"]):
        raise typer.BadParameter("--main and arguments are for a script.py that runs as a program")
    if script and (named := [name for name in _OF_A_MODEL if options[name] not in (None, False)]):
        option = named[0].replace("_", "-")
        raise typer.BadParameter(
            f"--{option} is of a model, and a program decides itself: give its own arguments behind --, or "
            f"{model_spec.IN_PYTHON}"
        )
    sweep = any(len(given or ()) > 1 for given in sizes.values())
    return FitRequest(
        target=target,
        batches=sizes["batch"] or (None,),
        seqs=sizes["seq"] or (None,),
        limit_bytes=limit_bytes,
        capability=None if card is None else card.capability,
        card=None if card is None else card.name,
        job={name: options[name] for name in (*_OF_A_JOB, *_NAMED) if options[name] is not None},
        task=options["task"],
        arguments=tuple(options["arguments"] or ()),
        main=options["main"],
        allocators=tuple(options["allocator"] or ()),
        largest=False if sweep and options["largest_batch"] is None else options["largest_batch"],
        remedies=False if sweep and options["remedies"] is None else options["remedies"],
        most_seconds=options["remedies_seconds"],
        traced=options["trace"] is not None,
        notes=notes,
    )


def _limit(limit: str | None, card: str | None) -> tuple[int | None, Card | None, tuple[str, ...]]:
    """Return the limit in bytes, the card, and notes on both."""
    from mempool.hardware.gpu_memory import card as card_of
    from mempool.units import parse_memory

    found = parsed("--card", card_of, card)
    limit_bytes = parsed("--limit", parse_memory, limit)
    if limit_bytes is None and found is not None:
        limit_bytes = found.memory_bytes
    if limit_bytes == 0:
        raise typer.BadParameter("--limit: nothing fits in no memory")
    notes = [] if found is None or not found.caveat else [f"{found.name}: {found.caveat}"]
    if limit is not None and found is not None and limit_bytes is not None:
        notes.append(_limit_and_card_note(limit_bytes, found))
    return limit_bytes, found, tuple(notes)


def _limit_and_card_note(limit_bytes: int, card: Card) -> str:
    """Return a note on a limit given together with a card: the limit counts."""
    from mempool.units import binary

    more = ", which is more than programs get of it" if limit_bytes > card.memory_bytes else ""
    return (
        f"--limit {binary(limit_bytes)} counts{more}, not the {binary(card.memory_bytes)} of the "
        f"{card.name}, whose kernels are taken"
    )
