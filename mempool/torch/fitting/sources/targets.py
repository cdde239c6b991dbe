"""A model with what goes into it, and what its inputs are asked to be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from mempool.named import Input
    from mempool.torch.fitting.caveats import Caveat
    from mempool.torch.fitting.inputs import Arguments


@dataclass(frozen=True)
class Sizes:
    """What inputs are asked for.

    Attributes:
        seq: length of sequences, or None for the model's own.
        image: height and width of images, likewise.
        task: what a model of transformers is for, or None.
        inputs: tensors that the model gets, or None for its own.
        labels: whether it is to be trained.
        arguments: what a script finds in ``sys.argv``.
        main: whether a script is run as a program.
    """

    seq: int | None = None
    image: int | None = None
    task: str | None = None
    inputs: tuple[Input, ...] | None = None
    labels: bool = True
    arguments: Sequence[str] = ()
    main: bool = False


@dataclass(frozen=True)
class Target:
    """A model with what goes into it.

    Attributes:
        title: what it is.
        model: makes it; called where tensors have no memory.
        inputs: for a batch of so many; None if they are not known.
        batch: samples in its own inputs; None if it has no number of its own.
        seq: length of its sequences, where that is known.
        uses: which of "seq" and "image" its inputs depend on.
        own: attributes of a `Job` that the target itself decides: optimizer, loss, labels, autocast, ...
        notes: what was assumed.
        warnings: what is not counted.
        caveats: why what is tried is no answer to whether the whole fits.
        examples: inputs of its own of which the first dimension is taken for the batch; None where a function
            makes them for any.
    """

    title: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Arguments] | None = None
    batch: int | None = None
    seq: int | None = None
    uses: frozenset[str] = frozenset()
    own: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    caveats: tuple[Caveat, ...] = ()
    examples: Any = None
