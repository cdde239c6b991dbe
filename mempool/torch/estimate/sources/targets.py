"""A model to try with inputs, and the requested sizes of inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from mempool.torch.estimate.inputs import Arguments
    from mempool.torch.estimate.result import Caveat
    from mempool.torch.model_spec import Input


@dataclass(frozen=True)
class Sizes:
    """Requested properties of inputs.

    Attributes:
        seq: length of sequences, or None for the model's own.
        image: height and width of images, or None for the model's own.
        task: task of a model of transformers, or None.
        inputs: tensors that the model gets, or None for the model's own.
        labels: whether the inputs include labels for training.
        arguments: the script's arguments in ``sys.argv``.
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
    """A model to try with inputs.

    Attributes:
        title: description of the model.
        model: makes the model; called inside a fake mode.
        inputs: makes the inputs for a batch size; None if unknown.
        batch: samples in the model's own inputs; None if these have no batch size.
        seq: length of the model's sequences, if known.
        uses: the sizes among "seq" and "image" on which the inputs depend.
        own: attributes of a `Job` that the target itself decides: optimizer, loss, labels, autocast, ...
        notes: assumptions.
        warnings: parts that are not counted.
        caveats: reasons why a result does not settle whether the whole fits.
        examples: the model's own inputs, of which the first dimension is taken for the batch; None if a
            function makes inputs for any batch.
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
