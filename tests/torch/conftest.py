"""Fixtures: the observer's library, and processes that train."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import forking, json_output_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from adversary import Adversary

    from mempool.torch import TensorPool

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
sys.path.insert(0, str(HERE))  # its helpers: models.py, recorded.py


@pytest.fixture(autouse=True)
def grad_mode() -> Iterator[None]:
    """Assert that a test leaves gradients enabled, since otherwise the next test would fail."""
    yield
    if "torch" in sys.modules:
        import torch

        left = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        assert left


@pytest.fixture
def everything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compiled graphs offload all movable values, whatever the limit."""
    from compiled_programs import force

    force(monkeypatch)


@pytest.fixture
def nothing_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compiled graphs offload no value, whatever the limit."""
    from mempool.torch.compiled import decide

    decidable = decide.decidable

    def immovable(captured: Any) -> Any:
        return decidable(captured).with_columns(movable=[False] * len(captured.values))

    monkeypatch.setattr(decide, "decidable", immovable)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let PyTorch compute with one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def nothing_is_held(one_thread: None, few_objects: None) -> Iterator[None]:
    """Assert that no tensor is in a pool, and release closed pools without tensors.

    Programs of other files, which a test runs whole, may have left a tensor somewhere in PyTorch.
    """
    from mempool import _core

    before = _core.torch_cpu_hook().held()
    yield
    gc.collect()
    assert _core.torch_cpu_hook().held() <= before


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Freeze the objects of other tests, so that no compilation examines them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def shared_isolation() -> Iterator[None]:
    """Search for caches and freeze existing objects once for all fake runs of a file."""
    from mempool.torch.estimate.fake import isolation

    with isolation.shared_isolation():
        yield


@pytest.fixture
def fit_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return a function that runs ``mempool fit --json`` and returns the object that the command prints."""
    from mempool.cli.app import call

    def estimate(*arguments: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert call(["fit", "--json", *arguments]) == code
        return json.loads(capsys.readouterr().out)

    return estimate


@pytest.fixture(scope="module")
def warm_server() -> Iterator[Any]:
    from warm_programs import WarmPrograms

    programs = WarmPrograms()
    yield programs
    programs.kill()


@pytest.fixture
def warm_programs(warm_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of ``fit --main`` from one that has imported PyTorch."""
    monkeypatch.setattr("mempool.torch.estimate.program.run.start_process", warm_server)


@pytest.fixture
def fitted(
    warm_programs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fit_json: Callable[..., Any]
) -> Any:
    """Return a function that estimates the text of a program, train.py, and returns the object printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def answer(text: str, *arguments: str, code: int = 0) -> Any:
        (tmp_path / "train.py").write_text(text)
        return fit_json("train.py", "--main", *arguments, code=code)

    return answer


@pytest.fixture
def no_vectors() -> Iterator[None]:
    """Disable vector instructions: the choice of kernels depends on measurements and changes rounding."""
    from torch._inductor import config

    with config.patch({"cpp.simdlen": 1}):
        yield


@pytest.fixture
def pool() -> Iterator[TensorPool]:
    """A pool that counts bytes."""
    import mempool.torch

    with mempool.torch.install(device="cpu", mode="record") as pool:
        yield pool


@pytest.fixture
def moves_by() -> str:
    """Name of the maker of moves within a limit: "host", Python, or "native", the interposer."""
    return "host"


@pytest.fixture
def install(moves_by: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], TensorPool]]:
    """Return a function that installs a pool within a limit; native copies are made as late as allowed."""
    from native_engine import NativeEngine

    import mempool.torch.eager

    if moves_by == "native":
        monkeypatch.setattr(mempool.torch.eager, "create_engine", lambda _, size: NativeEngine(size))
    pools: list[TensorPool] = []

    def installed_pool(limit: int) -> TensorPool:
        pools.append(mempool.torch.install(limit=limit, background=False))
        return pools[-1]

    yield installed_pool
    for pool in pools:
        pool.close()


@pytest.fixture
def open_pool() -> Iterator[TensorPool]:
    """A pool with a limit and an open bypass."""
    from bypassed import open_bypass, small_loop

    import mempool.torch

    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        open_bypass(pool, small_loop())
        yield pool


@pytest.fixture
def mode() -> Iterator[Adversary]:
    """An offloading mode that makes no moves by itself."""
    from adversary import Adversary

    with Adversary(3, share=0.0) as mode:
        yield mode


@pytest.fixture(scope="session")
def observer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the library that checks addresses."""
    import build

    library = tmp_path_factory.mktemp("observer") / "observer.so"
    source = TESTS / "native" / "torch_observer.cpp"
    command = [build.compiler(), "-std=c++17", "-O2", "-fPIC", "-shared", str(source), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    return str(library)


@pytest.fixture(scope="session")
def trained() -> Callable[..., dict[str, Any]]:
    """Return a function that trains in a separate process: ``trained("pool", model="gpt", ...)``."""

    def run(way: str, **setup: Any) -> dict[str, Any]:
        return json_output_of(HERE / "training.py", way, json.dumps(setup))

    return run


@pytest.fixture(scope="session")
def trained_all() -> Callable[[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Return a function that runs several trainings in one separate process."""

    def run(way: str, setups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        said: Any = json_output_of(HERE / "training.py", way, *map(json.dumps, setups))
        return said if isinstance(said, list) else [said]

    return run


@pytest.fixture(scope="module")
def forking_process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """The process that forks for each separate test of a file."""
    with forking(request.path) as server:
        yield server
