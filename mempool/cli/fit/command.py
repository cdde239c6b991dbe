"""``mempool fit``: predict, before a run, whether a model fits into a GPU's memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mempool.cli.options import allocators, completion
from mempool.cli.output import ExitCode, Stop, print_json, progress, require_writable

if TYPE_CHECKING:
    from mempool.cli.fit.arguments import FitRequest
    from mempool.cli.fit.compute import SizeResult

_OPTIMIZERS = (
    "adamw",
    "adam",
    "sgd",
    "sgd+momentum",
    "adafactor",
    "rmsprop",
    "adagrad",
    "nadam",
    "radam",
    "adamw8bit",
)
_LOSSES = ("cross-entropy", "mse", "l1", "bce-with-logits", "sum", "mean")
_TASKS = (
    "causal-lm", "masked-lm", "seq2seq-lm", "image-classification", "sequence-classification",
    "token-classification", "base",
)  # fmt: skip


def complete_cards(incomplete: str) -> list[str]:
    """Return the names of GPUs that complete a prefix."""
    from mempool.hardware.gpu_memory import CARDS

    return completion(*(card.name for card in CARDS))(incomplete)


def complete_targets(incomplete: str) -> list[str]:
    """Return the scripts and transformers models that complete a prefix."""
    from mempool.torch.model_presets import SHAPES

    usual = ["gpt2", "bert", "llama", "t5", "vit", "mistral", "qwen2"]
    scripts = [str(path) for path in sorted(Path().glob(f"{incomplete}*.py"))]
    return scripts + completion(*(f"transformers:{name}" for name in (*usual, *SHAPES)))(incomplete)


def fit(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_targets,
            help="transformers:NAME, or with --main script.py.",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGS", help="What a program finds in sys.argv."),
    ] = None,
    *,
    batch: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Samples in a batch; a list is a sweep.")
    ] = None,
    seq: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Length of sequences; a list is a sweep.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(autocompletion=completion(*_TASKS), help="What a model of transformers is for."),
    ] = None,
    limit: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of the device: 24GiB.")] = None,
    card: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", autocompletion=complete_cards, help="Memory of this GPU: 'RTX 4090', 'A100 80GB'."
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion("train", "inference"),
            help="train, the default, or inference: without gradients.",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=completion(*_OPTIMIZERS),
            help="adamw, sgd+momentum, ...",
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=completion(*_LOSSES),
            help="cross-entropy, mse, ...",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Type of the parameters: bfloat16.")
    ] = None,
    autocast: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Run the forward in lower precision: bfloat16.")
    ] = None,
    checkpoint: Annotated[
        bool | None, typer.Option("--checkpoint", help="Compute activations of repeated blocks again.")
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Batches whose gradients make one step.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            autocompletion=completion("cuda", "cpu"),
            help="What it would run on: cuda, the default, or cpu.",
        ),
    ] = None,
    allocator: Annotated[
        list[str] | None,
        typer.Option(
            "-a",
            "--allocator",
            metavar="NAME[:SETTINGS]",
            autocompletion=allocators(),
            help="What these would reserve; again for each. The first decides whether it fits.",
        ),
    ] = None,
    largest_batch: Annotated[
        bool | None,
        typer.Option("--largest-batch/--no-largest-batch", help="Look for the largest batch that fits."),
    ] = None,
    remedies: Annotated[
        bool | None, typer.Option("--remedies/--no-remedies", help="Try what would help.")
    ] = None,
    remedies_seconds: Annotated[
        float, typer.Option(min=0, metavar="S", help="Most processor seconds for trying remedies.")
    ] = 40,
    main: Annotated[
        bool,
        typer.Option("--main", help="Run a script as a program; with a CUDA build, as `mempool rehearse`."),
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the trace, for info, compare, show and swap.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object; of a sweep a list.")] = False,
) -> None:
    r"""Predict whether a model fits in a GPU's memory, without a GPU and without the memory.

    A training step runs on tensors that have shapes and no values; with --main
    a script runs as a program for some optimizer steps. This needs PyTorch:
    pip install 'mempool\[torch]'. For a model of your own call
    mempool.torch.fit(model, inputs) in Python.

    For example:

        mempool fit transformers:gpt2 --batch 8 --card "RTX 4090"
        mempool fit "transformers:LlamaConfig(num_hidden_layers=16)" --dtype bf16
        mempool fit transformers:gpt2 --batch 1,2,4,8 --seq 512,1024
        mempool fit train.py --main --limit 24GiB -- --epochs 1
        mempool fit transformers:gpt2 --trace step.trace && mempool show step.trace
    """
    from mempool.cli.fit.arguments import parse_request

    request = parse_request({key: value for key, value in locals().items() if key != "json"})
    _check_trace(trace, sweep=request.sweep)
    if importlib.util.find_spec("torch") is None:
        raise Stop(ExitCode.FAILED, "fit needs PyTorch, which is not installed: pip install 'mempool[torch]'")
    if request.main:
        from mempool.cli.fit.program import can_rehearse, rehearse_program

        if can_rehearse(request):
            rehearse_program(request, trace, json=json)
            return
    results = _fit_sizes(request)
    if trace is not None:
        from traces.formats.parquet import write_trace

        write_trace(results[0].fit.trace, trace)
    if json:
        from mempool.cli.fit.render import to_json

        objects = [to_json(result) for result in results]
        print_json(objects if request.sweep else objects[0])
    else:
        _show(results, request)
    if request.limit_bytes is not None and not any(result.fit.fits for result in results):
        raise Stop(ExitCode.NEGATIVE)


def _check_trace(trace: Path | None, *, sweep: bool) -> None:
    """Refuse an unwritable trace file, or a trace of several sizes, before the work."""
    if trace is None:
        return
    if sweep:
        raise typer.BadParameter("--trace is of one size, not of a sweep")
    require_writable(trace)


def _fit_sizes(request: FitRequest) -> list[SizeResult]:
    """Fit all sizes, with output of the script or model redirected to stderr."""
    with progress("importing PyTorch") as progress_line:
        from mempool.cli.fit.compute import fit_sizes

        return list(fit_sizes(request, progress_line))


def _show(results: list[SizeResult], request: FitRequest) -> None:
    from mempool.cli.fit.render import show, show_sweep

    if request.sweep:
        show_sweep(results, request.limit_bytes)
    else:
        show(results[0])
