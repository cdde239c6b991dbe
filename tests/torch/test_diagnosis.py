"""Obstacles to a pluggable CUDA allocator are found and named with a remedy."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from mempool import UsageError
from mempool.torch import compiled_library
from mempool.torch.introspection import diagnosis
from mempool.torch.introspection.diagnosis import diagnose

if TYPE_CHECKING:
    from collections.abc import Callable

    Break = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a CUDA build without obstacles on any machine."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: False, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: "native", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(compiled_library, "compiler", lambda: ["c++"])
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    for name in (*diagnosis._NCCL_HOOKS, *diagnosis._SETTINGS, "TORCHINDUCTOR_CUDAGRAPHS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(diagnosis, "_logged", set())


def refusing() -> Any:
    raise UsageError("no compiler")


def variable(name: str, value: str) -> Break:
    return lambda patch: patch.setenv(name, value)


def inductor(*, cudagraphs: bool) -> Break:
    config = SimpleNamespace(triton=SimpleNamespace(cudagraphs=cudagraphs))
    return lambda patch: patch.setitem(sys.modules, "torch._inductor.config", config)


def attribute(owner: Any, name: str, value: object) -> Break:
    return lambda patch: patch.setattr(owner, name, value)


def answer(owner: Any, name: str, value: object) -> Break:
    return attribute(owner, name, lambda: value)


NCCL_HOOK = "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
BROKEN: dict[str, tuple[str, str, Break]] = {
    "a build for the CPU": ("cpu_build", "stops", answer(torch.backends.cuda, "is_built", False)),
    "CUDA in use": ("cuda_initialized", "stops", answer(torch.cuda, "is_initialized", True)),
    "CUDA in use behind Python's back": (
        "cuda_initialized",
        "stops",
        answer(torch._C, "_accelerator_isAllocatorInitialized", True),
    ),
    "another allocator": (
        "other_allocator",
        "stops",
        answer(torch._C, "_cuda_getAllocatorBackend", "pluggable"),
    ),
    "cuDNN's benchmark": ("cudnn_benchmark", "warns", attribute(torch.backends.cudnn, "benchmark", True)),
    "graphs": ("inductor_cudagraphs", "stops", inductor(cudagraphs=True)),
    "graphs by the environment": ("inductor_cudagraphs", "stops", variable("TORCHINDUCTOR_CUDAGRAPHS", "1")),
    "NCCL's hook": ("nccl_hook", "stops", variable(f"TORCH_{NCCL_HOOK}", "True")),
    "NCCL's hook by its older name": ("nccl_hook", "stops", variable(NCCL_HOOK, "1")),
    "another backend": (
        "allocator_settings",
        "warns",
        variable("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"),
    ),
    "expandable segments": (
        "allocator_settings",
        "warns",
        variable("PYTORCH_ALLOC_CONF", "expandable_segments:True,pinned_use_cuda_host_register:True"),
    ),
    "an old version": ("version", "warns", attribute(torch, "__version__", "2.1.0")),
    "no compiler": ("no_compiler", "warns", attribute(compiled_library, "compiler", refusing)),
}
HARMLESS: dict[str, Break] = {
    "nothing": lambda _patch: None,
    "inductor without graphs": inductor(cudagraphs=False),
    "NCCL's hook off": variable("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "0"),
    "settings of host memory": variable("PYTORCH_CUDA_ALLOC_CONF", "pinned_num_register_threads:8"),
    "empty settings": variable("PYTORCH_ALLOC_CONF", ""),
    "no GPU": attribute(torch._C, "_accelerator_isAllocatorInitialized", refusing),
    "a build without the question for the backend": lambda patch: patch.delattr(
        torch._C, "_cuda_getAllocatorBackend"
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_each_condition_is_found_alone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, severity, break_it = BROKEN[what]
    break_it(monkeypatch)
    found = diagnose()
    assert [(finding.name, finding.severity) for finding in found.findings] == [(name, severity)]
    assert found
    assert found.ok == (severity == "warns")
    for text in (str(found), found._repr_html_()):
        assert name in text
    assert json.loads(json.dumps(found.to_dict()))["findings"][0]["remedy"]


@pytest.mark.parametrize("what", HARMLESS)
def test_healthy_state_has_no_findings(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    HARMLESS[what](monkeypatch)
    found = diagnose()
    assert not found, str(found)
    assert found.ok
    assert found.to_dict() == {"ok": True, "findings": []}
    assert "nothing is in the way" in str(found)
    assert "nothing is in the way" in found._repr_html_()


def test_import_that_initialized_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace())
    assert "import of apex" in diagnose().findings[0].problem


def test_serving_pool_has_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: "pluggable")
    assert not diagnose(serving=True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert [finding.name for finding in diagnose(serving=True).findings] == ["cudnn_benchmark"]
