"""Detection of conditions that break a pluggable CUDA allocator, before training fails.

PyTorch requires values of the allocator that a pluggable allocator cannot provide, and raises, often in the
middle of the first step. Each finding names the setting, the consequence and the remedy.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from mempool.errors import UsageError
from mempool.logs import log
from mempool.settings import untested

if TYPE_CHECKING:
    from collections.abc import Iterator


#: Modules that use the GPU when imported, after which the allocator can no longer be replaced.
INITIALIZE_ON_IMPORT = ("apex", "fvdb")
_NCCL_HOOKS = ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK")
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_YES = ("1", "y", "yes", "t", "true")
#: Names of findings that prevent the replacement of PyTorch's allocator.
IN_THE_WAY = ("cpu_build", "cuda_initialized", "other_allocator")
_logged: set[str] = set()


@dataclass(frozen=True)
class Finding:
    """A condition that prevents or limits the use of a CUDA pool.

    Attributes:
        name: identifier for scripts.
        severity: "stops": the pool cannot be installed, or PyTorch will raise; "warns": a setting is ignored.
        problem: the setting and the consequence.
        remedy: the action to take.
    """

    name: str
    severity: Literal["stops", "warns"]
    problem: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    """All findings, "stops" before "warns"; false if empty."""

    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Return true if no finding has severity "stops"."""
        return all(finding.severity != "stops" for finding in self.findings)

    def __bool__(self) -> bool:
        return bool(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict ready for JSON."""
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}

    def __str__(self) -> str:
        if not self.findings:
            return "mempool: nothing is in the way of PyTorch's CUDA tensors"
        return "\n".join(
            f"{f.severity}  {f.name}: {f.problem}\n       remedy: {f.remedy}" for f in self.findings
        )

    def _repr_html_(self) -> str:
        import html  # half a megabyte, which programs without a notebook save

        if not self.findings:
            return f"<p>{html.escape(str(self))}</p>"
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in asdict(finding).values()) + "</tr>"
            for finding in self.findings
        )
        head = "".join(f"<th>{name}</th>" for name in ("name", "severity", "problem", "remedy"))
        return f"<table><caption>mempool: PyTorch's CUDA tensors</caption><tr>{head}</tr>{rows}</table>"


def diagnose(*, serving: bool = False) -> Diagnosis:
    """Inspect PyTorch and the environment; change nothing and leave the GPU untouched.

    Args:
        serving: true if a pool already is PyTorch's allocator, so that CUDA may be in use and the compiler
            works.
    """
    torch: Any = importlib.import_module("torch")
    if not torch.backends.cuda.is_built():
        return Diagnosis((_CPU_BUILD,))
    found = [
        *([] if serving else (*_initialized(torch), *_replaced(torch), *_compiler())),
        *((BENCHMARK,) if torch.backends.cudnn.benchmark else ()),
        *_graphs(),
        *_nccl(),
        *_settings(),
        *_version(),
    ]
    return Diagnosis(tuple(sorted(found, key=lambda finding: finding.severity)))  # "stops" before "warns"


def warn(diagnosis: Diagnosis) -> None:
    """Log each finding, once per process."""
    for finding in diagnosis.findings:
        if finding.name not in _logged:
            _logged.add(finding.name)
            log.warning("%s: %s; %s", finding.name, finding.problem, finding.remedy)


_CPU_BUILD = Finding(
    "cpu_build",
    "stops",
    "this PyTorch is built without CUDA",
    "install a build with CUDA (https://pytorch.org/get-started/locally)",
)


def _initialized(torch: Any) -> Iterator[Finding]:
    if not (torch.cuda.is_initialized() or _allocator_in_use(torch)):
        return
    suspects = [name for name in INITIALIZE_ON_IMPORT if name in sys.modules]
    by = f", perhaps by the import of {' and '.join(suspects)}," if suspects else ""
    yield Finding(
        "cuda_initialized",
        "stops",
        f"CUDA is in use already{by} and PyTorch's allocator cannot be replaced any more",
        "install the pool first, before anything allocates on the GPU: right after `import torch`",
    )


def _allocator_in_use(torch: Any) -> bool:
    """Return true if PyTorch's allocator is in use, even if by an extension that bypasses Python's flag."""
    try:
        return bool(torch._C._accelerator_isAllocatorInitialized())
    except (AttributeError, RuntimeError):  # another version, or no GPU
        return False


def _replaced(torch: Any) -> Iterator[Finding]:
    if hasattr(torch._C, "_cuda_getAllocatorBackend") and torch.cuda.get_allocator_backend() == "pluggable":
        yield Finding(
            "other_allocator",
            "stops",
            "another library has plugged its allocator in already, and there is one for each process",
            "leave one of the two out",
        )


BENCHMARK = Finding(
    "cudnn_benchmark",
    "warns",
    "torch.backends.cudnn.benchmark asks for the allocator's largest free block, and PyTorch raises: a pool "
    "keeps it off",
    "torch.backends.cudnn.benchmark = False",
)


def _graphs() -> Iterator[Finding]:
    config = sys.modules.get("torch._inductor.config")
    if config is None:
        on = os.environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1"
    else:
        on = bool(config.triton.cudagraphs)
    if on:
        yield Finding(
            "inductor_cudagraphs",
            "stops",
            "torch.compile is to use CUDA graphs (mode='reduce-overhead'), which ask PyTorch's own allocator",
            "torch._inductor.config.triton.cudagraphs = False, and another mode of torch.compile",
        )


def _nccl() -> Iterator[Finding]:
    for name in _NCCL_HOOKS:
        if os.environ.get(name, "").strip().lower() in _YES:
            yield Finding(
                "nccl_hook",
                "stops",
                f"${name} makes NCCL follow PyTorch's own allocator",
                f"unset {name}",
            )
            return


def _settings() -> Iterator[Finding]:
    ignored = [
        entry.strip()
        for name in _SETTINGS
        for entry in _entries(os.environ.get(name, ""))
        if entry.strip() and not entry.strip().startswith("pinned")  # settings of host memory
    ]
    if ignored:
        yield Finding(
            "allocator_settings",
            "warns",
            f"{', '.join(dict.fromkeys(ignored))}: settings of PyTorch's own allocator, ignored by the pool",
            f"unset {' and '.join(name for name in _SETTINGS if name in os.environ)}",
        )


def _entries(text: str) -> Iterator[str]:
    """Split ``a:1,b:[x:2,y:3],c:4`` at commas outside brackets."""
    depth, begin = 0, 0
    for i, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            yield text[begin:i]
            begin = i + 1
    yield text[begin:]


def _version() -> Iterator[Finding]:
    if (said := untested("torch")) is not None:
        yield Finding("version", "warns", said, "should something fail, try a version that was tested")


def _compiler() -> Iterator[Finding]:
    from mempool.torch import compiled_library

    try:
        compiled_library.compiler()
    except UsageError:
        yield Finding(
            "no_compiler",
            "warns",
            "without a C++ compiler, being out of memory is a RuntimeError that begins with "
            "'CUDA out of memory.', not torch.OutOfMemoryError",
            "install a C++ compiler (Debian: apt install g++), or name it in $CXX",
        )
