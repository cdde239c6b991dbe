"""Parsing of the options of ``mempool fit``, before anything is imported or made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from mempool.cli.parsing import parsed
from mempool.torch import model_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.hardware.gpu_memory import Card
    from mempool.torch.model_spec import Input, Named


@dataclass(frozen=True)
class Asked:
    """The request of a ``mempool fit`` command line; None for options that were not given.

    Attributes:
        target: the model.
        batches, seqs, images: sizes to try, in all combinations.
        limit_bytes: memory of the device.
        capability: compute capability of the card.
        card: name of the card in `mempool.hardware.gpu_memory`.
        link: link to the host.
        job: attributes that are passed to `Job` unchanged.
        dtype, autocast: PyTorch's names of types.
        optimizer, loss: given by name.
        inputs, task, arguments, main: fields of `Sizes`.
        allocators: allocators to simulate; the first decides the verdict.
        margins: the user's own figures, as written.
        largest, remedies: arguments of `fit_job`.
        most_seconds: CPU seconds for trying remedies.
        traced: keep the trace.
        notes: notes on options that override each other.
    """

    target: Named
    batches: Sequence[int | None] = (None,)
    seqs: Sequence[int | None] = (None,)
    images: Sequence[int | None] = (None,)
    limit_bytes: int | None = None
    capability: tuple[int, int] | None = None
    card: str | None = None
    link: str | None = None
    job: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    autocast: str | None = None
    optimizer: Named | None = None
    loss: Named | None = None
    inputs: tuple[Input, ...] | None = None
    task: str | None = None
    arguments: tuple[str, ...] = ()
    main: bool = False
    allocators: tuple[str, ...] = ()
    margins: tuple[str, ...] = ()
    largest: bool | None = None
    remedies: bool | None = None
    most_seconds: float = 40
    traced: bool = False
    notes: tuple[str, ...] = ()

    @property
    def sweep(self) -> bool:
        """Return true if the request covers more than one size."""
        return len(self.batches) * len(self.seqs) * len(self.images) > 1


def asked(said: dict[str, Any]) -> Asked:
    """Parse the options, given by name, into a request.

    Raises:
        typer.BadParameter: an option has no meaning, or two options contradict each other.
    """
    from solvers.swap import parse_link

    target = parsed("MODEL", model_spec.parse_target, said["target"])
    assert target is not None
    sizes = {
        name: parsed(f"--{name}", model_spec.parse_sizes, said[name]) for name in ("batch", "seq", "image")
    }
    limit_bytes, card, notes = _limit(said["limit"], said["card"])
    parsed("--link", parse_link, said["link"])
    for name, names in (("mode", ("train", "inference", "eval")), ("device", ("cuda", "cpu"))):
        if said[name] not in (None, *names):
            raise typer.BadParameter(f"--{name}: no {said[name]!r}; there are {', '.join(names)}")
    if (said["main"] or said["arguments"]) and target.kind != "script":
        raise typer.BadParameter("--main and arguments are for scripts")
    sweep = any(len(given or ()) > 1 for given in sizes.values())
    return Asked(
        target=target,
        batches=sizes["batch"] or (None,),
        seqs=sizes["seq"] or (None,),
        images=sizes["image"] or (None,),
        limit_bytes=limit_bytes,
        capability=None if card is None else card.capability,
        card=None if card is None else card.name,
        link=said["link"],
        job={
            k: said[k]
            for k in ("mode", "device", "checkpoint", "accumulate", "processes")
            if said[k] is not None
        },
        dtype=parsed("--dtype", model_spec.parse_type, said["dtype"]),
        autocast=parsed("--autocast", model_spec.parse_type, said["autocast"]),
        optimizer=parsed("--optimizer", model_spec.parse_name, said["optimizer"]),
        loss=parsed("--loss", model_spec.parse_name, said["loss"]),
        inputs=parsed("--inputs", model_spec.parse_inputs, said["inputs"]),
        task=said["task"],
        arguments=tuple(said["arguments"] or ()),
        main=said["main"],
        allocators=tuple(said["allocator"] or ()),
        margins=tuple(said["margin"] or ()),
        largest=False if sweep and said["largest_batch"] is None else said["largest_batch"],
        remedies=False if sweep and said["remedies"] is None else said["remedies"],
        most_seconds=said["remedies_seconds"],
        traced=said["trace"] is not None,
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
        notes.append(_both(limit_bytes, found))
    return limit_bytes, found, tuple(notes)


def _both(limit_bytes: int, card: Card) -> str:
    """Return a note on a limit given together with a card: the limit counts."""
    from mempool.units import binary

    more = ", which is more than programs get of it" if limit_bytes > card.memory_bytes else ""
    return (
        f"--limit {binary(limit_bytes)} counts{more}, not the {binary(card.memory_bytes)} of the "
        f"{card.name}, whose kernels and link are taken"
    )
