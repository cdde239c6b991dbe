"""``torch.compile`` in a rehearsal: Triton compiles kernels for the card, and nothing times them.

On a GPU, PyTorch's compiler runs variants of a kernel and selects the fastest. The variants hardly differ in
memory, so a rehearsal compiles and uses only the first variant. Timing would also allocate memory that a
later run, which knows the fastest variant, does not allocate.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import importlib.util
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from mempool.cache_folder import cache_folder
from mempool.rehearsal import clock

if TYPE_CHECKING:
    from pathlib import Path

_COMPILER, _KERNELS = "torch._inductor.compile_fx", "torch._inductor.runtime.triton_heuristics"
_PADDING, _TIMES = "torch._inductor.fx_passes.pad_mm", "torch._inductor.runtime.benchmarking"
_FOLDING, _TRITON = "torch._inductor.fx_passes.joint_graph", "triton.testing"
_CHOICES = "torch._inductor.select_algorithm"
#: Modules after whose import `adjust` is called, also in processes that compile for the program.
MODULES = (_CHOICES, _COMPILER, _FOLDING, _KERNELS, _PADDING, _TIMES, _TRITON)
_MILLISECONDS = 1.0  #: time of every kernel
_MOST_CHARACTERS = 300  #: length of an error in one line
failures: list[str] = []  #: errors of graphs that did not compile, and ran uncompiled


def environment(driver: Path) -> dict[str, str]:
    """Return the variables for Triton and PyTorch's compiler.

    Args:
        driver: folder with the stand-in's ``libcuda.so.1``, to which Triton links its launchers.
    """
    try:
        kept = cache_folder() / "rehearsed-kernels"  # separate from timed kernels of a GPU
    except (OSError, RuntimeError):
        kept = driver / "kernels"
    return {
        "TRITON_LIBCUDA_PATH": str(driver),
        "TRITON_CACHE_DIR": str(kept / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(kept / "torchinductor_cache"),  # readers of stacks know this name
        "TORCHINDUCTOR_DYNAMIC_SCALE_RBLOCK": "0",
        "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN",
        "TORCHINDUCTOR_MAX_AUTOTUNE_CONV_BACKENDS": "ATEN",
    }


def missing_requirement() -> str | None:
    """Return PyTorch's requirement on Triton, such as ``triton==3.6.0``, if Triton is not installed."""
    if importlib.util.find_spec("triton") is not None:
        return None
    needed = importlib.metadata.requires("torch") or []
    return next((entry.partition(";")[0].strip() for entry in needed if "triton" in entry), "triton")


def adjust(name: str) -> None:
    """Patch a module of the compiler so that it neither times kernels nor reads values from the device."""
    module: Any = sys.modules[name]
    if name == _CHOICES:
        module.AlgorithmSelectorCache.benchmark = _not_timing
    elif name == _COMPILER:
        module.compile_fx = _falling_back(module)
    elif name == _FOLDING:
        module.UniformValueConstantFolder.run = _on_host(module.UniformValueConstantFolder.run)
    elif name == _KERNELS:
        module.cached_autotune = _taking_first(module)
        module.CachingAutotuner.run = _timed(module.CachingAutotuner.run, module.get_num_bytes)
        module.CachingAutotuner.coordinate_descent_tuning = lambda _, launcher, *__, **___: launcher
    elif name == _PADDING:
        # Decides about padding large products of odd sizes, which is faster on tensor cores.
        module.get_cached_should_pad = lambda _: True
    elif name == _TIMES:
        for benchmarker in (module.TritonBenchmarker, module.InductorBenchmarker):
            benchmarker.benchmark_gpu = lambda *_, **__: _MILLISECONDS
    else:
        module.do_bench = _run_once


def _taking_first(heuristics: Any) -> Any:
    tune, kinds = heuristics.cached_autotune, heuristics.HeuristicType

    @functools.wraps(tune)
    def first(size_hints: Any, configs: Any, *args: Any, heuristic_type: Any, **options: Any) -> Any:
        # The first variant of other kernels may exceed the card's shared memory.
        if heuristic_type not in (kinds.TEMPLATE, kinds.USER_AUTOTUNE):
            configs = configs[:1]
        return tune(size_hints, configs, *args, heuristic_type=heuristic_type, **options)

    return first


def _timed(run: Any, bytes_of: Any) -> Any:
    """Wrap a kernel's launch: the modelled kernel reads and writes each of its tensors once."""

    @functools.wraps(run)
    def timed(tuner: Any, *args: Any, **options: Any) -> Any:
        changed = sum(name.startswith("in_out_ptr") for name in tuner.fn.arg_names)  # the first ones
        with clock.bandwidth_bound(bytes_of(*args, num_in_out_args=changed)):
            return run(tuner, *args, **options)

    return timed


def _not_timing(_: Any, choices: Any, *__: Any, **___: Any) -> Any:
    return dict.fromkeys(choices, _MILLISECONDS)


def _on_host(run: Any) -> Any:
    """Wrap a method to run all operators on the CPU, so that constants of a graph have values."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map

    class Host(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), options: Any = None) -> Any:
            args, options = tree_map(moved, (args, options or {}))
            return function(*args, **options)

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value.cpu() if isinstance(value, torch.Tensor) else value

    @functools.wraps(run)
    def on_host(folder: Any) -> Any:
        with Host():
            return run(folder)

    return on_host


def _run_once(function: Any, *_: Any, quantiles: Any = None, **__: Any) -> Any:
    """Replace ``triton.testing.do_bench``: a variant that the card cannot run raises."""
    function()
    return _MILLISECONDS if quantiles is None else [_MILLISECONDS] * len(quantiles)


def _falling_back(compiler: Any) -> Any:
    """Wrap PyTorch's compiler of graphs: a graph that does not compile runs uncompiled."""
    compile_ = compiler.compile_fx

    @functools.wraps(compile_)
    def compiled(graph: Any, *args: Any, **options: Any) -> Any:
        from torch.fx import GraphModule

        kept = GraphModule(graph, copy.deepcopy(graph.graph))  # the compiler changes its own
        try:
            return compile_(graph, *args, **options)
        except compiler.InductorError as error:
            reason = str(error).partition("\n\nSet TORCHDYNAMO_VERBOSE")[0]
            failures.append(textwrap.shorten(reason, _MOST_CHARACTERS))
            return kept

    return compiled
