"""User interfaces of swapping, ``install(limit=)`` and ``mempool run --limit``, and planned iterations."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from chain import Loop

import mempool.torch
from mempool import Pool, UsageError
from mempool.torch.eager.mode import OffloadMode
from mempool.torch.eager.storages import OFFLOADED
from mempool.torch.offload.host_engine import HostEngine
from mempool.torch.offload.options import OPTIONS

MIB = 1 << 20
CPU = torch.device("cpu")
FULL = pytest.mark.full
#: Code that reads an address only to compare it, as PyTorch's own modules do.
COMPARED = eval("lambda kept, _: kept[0].data_ptr()", {"__name__": "torch.nn.compared"})


pytestmark = pytest.mark.usefixtures("nothing_is_held")


def losses(sizes: list[int]) -> list[float]:
    loop = Loop()
    return [loop.step(size) for size in sizes]


# --- installing


@pytest.mark.parametrize("limit", ["3MiB", "2MiB"])
def test_losses_are_identical_and_the_pool_observes_the_limit(limit: str) -> None:
    """Once a schedule is in effect, the pool's live bytes stay within the limit."""
    plain = losses([1024] * 8)
    with mempool.torch.install(device="cpu", limit=limit, host_limit="64MiB", background=False) as pool:
        loop = Loop()
        assert pool.offloading.cost() is None
        seen = [loop.step() for _ in range(4)]
        pool.client.reset_peaks()
        seen += [loop.step() for _ in range(4)]
        live = pool.client.stats()["live"]["peak"]
        values, cost = pool.report().to_dict()["swapping"], pool.offloading.cost()
    assert cost["limit_bytes"] == pool.settings.limit
    assert cost["planned"] == (cost["smallest_limit_bytes"] <= pool.settings.limit)
    assert cost["step_seconds"] > 0 < cost["host_bytes"] <= 64 * MIB
    assert cost["moved_bytes"] >= values["iteration_out_bytes"]
    assert seen == plain
    assert live <= pool.settings.limit
    assert values["limit_bytes"] == pool.settings.limit
    assert values["planned_peak_bytes"] <= pool.settings.limit < values["unplanned_peak_bytes"]
    assert values["moves"] > 0
    assert values["iterations"] == 8
    assert values["iteration_in_bytes"] > 0
    assert "fetched on demand" in str(pool.report())
    json.dumps(values)


def test_full_host_memory_is_reported_once_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    plain = losses([1024] * 4)
    with mempool.torch.install(device="cpu", limit="2MiB", host_limit="256KiB", background=False) as pool:
        loop = Loop()
        assert [loop.step() for _ in range(4)] == plain
        values = pool.report().to_dict()["swapping"]
    assert values["host_full"] > 1
    assert 0 < values["host_bytes"] <= 256 << 10
    assert caplog.text.count("for copies are left on the host: tensors without room there stay") == 1


def test_environment_limit_applies_to_pytorch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPOOL_LIMIT", "5MiB")
    with Pool(background=False) as plain, mempool.torch.install(device="cpu", background=False) as pool:
        assert plain.report().to_dict()["swapping"] is None
        assert pool.report().to_dict()["swapping"]["limit_bytes"] == 5 * MIB
    with pytest.raises(UsageError, match="max_reserved is for all pools"):
        Pool(background=False, limit="5MiB")


def away(pool: Any) -> int:
    """Return the bytes that are on the host alone."""
    records = pool.offloading.mode.storages.records.values()
    return sum(record.size for record in records if record.state == OFFLOADED)


@pytest.mark.parametrize("marked", [False, True])
def test_relative_limit_is_a_share_of_the_first_peak(
    caplog: pytest.LogCaptureFixture, *, marked: bool
) -> None:
    plain = losses([1024] * 6)
    with mempool.torch.install(device="cpu", limit="70 %", background=False) as pool:
        loop, seen, peaks = Loop(), [], []
        assert pool.report().to_dict()["swapping"]["limit_bytes"] is None
        str(pool.report())
        for _ in range(6):
            pool.client.reset_peaks()
            seen.append(loop.step())
            peaks.append(pool.client.stats()["live"]["peak"])
            if marked:
                pool.step()
        values = pool.report().to_dict()["swapping"]
    assert seen == plain
    assert 0.69 * peaks[0] < values["limit_bytes"] < 0.75 * peaks[0]  # and 70 % of the momentum
    assert max(peaks[1:]) <= values["limit_bytes"]
    assert values["moves"] > 0
    assert (values["beyond"], values["beyond_bytes"]) == (0, 0)
    assert not caplog.records


@pytest.mark.parametrize("limit", ["0%", "101%", "%", "-5%", "1e1%"])
def test_invalid_relative_limit_is_refused(limit: str) -> None:
    with pytest.raises(UsageError, match="between 0% and 100%"):
        mempool.torch.install(device="cpu", limit=limit)


def test_return_of_all_tensors_at_the_close_is_no_excess(caplog: pytest.LogCaptureFixture) -> None:
    pool = mempool.torch.install(device="cpu", limit="4MiB", background=False)
    kept = [torch.full((MIB // 4,), float(i)) for i in range(8)]
    assert away(pool) >= 4 * MIB
    pool.close()
    assert [one.mean().item() for one in kept] == list(range(8))
    values = pool.report().to_dict()["swapping"]
    assert (values["beyond"], values["beyond_bytes"]) == (0, 0)
    assert not caplog.records


def test_tensors_of_a_gpu_stay_on_the_host_at_exit_until_they_are_read() -> None:
    pool = mempool.torch.install(device="cpu", limit="4MiB", background=False)
    kept = [torch.full((MIB // 4,), float(i)) for i in range(8)]
    before, mode = away(pool), pool.offloading.mode
    mode.storages.device = "cuda"
    try:
        pool.close_at_exit()
        assert away(pool) == before >= 4 * MIB
        assert [one.mean().item() for one in kept] == list(range(8))
        assert kept[0].tolist()[0] == 0
        assert away(pool) == 0  # no storage is offloaded
    finally:
        mode.__exit__(None, None, None)


def copies_of_sparse(kept: list[Any], sparse: Any) -> None:
    kept += [sparse.transpose(0, 1) for _ in range(8)]
    assert all(torch.equal(one.to_dense(), sparse.to_dense().T) for one in kept[-8:])


def dense_of_sparse(kept: list[Any], _: Any) -> None:
    one = torch.sparse_coo_tensor([[0], [0]], [1.0], (512, 1000), check_invariants=False)
    kept.append(one.to_dense())


def copies_of_inferred(kept: list[Any], _: Any) -> None:
    inferred = torch.inference_mode()(torch.ones)(512, 500)
    kept += [inferred.double() for _ in range(8)]


def results_of_entries(kept: list[Any], _: Any) -> None:
    numbers = torch.arange(20_000.0)
    kept += [numbers[at] * 2 for at in range(20_000)]


USES = {
    "address": lambda kept, _: kept[0].numpy(),
    "address compared": COMPARED,
    "view": lambda kept, _: torch.ops.aten._reshape_alias(kept[0], [512000], [1]),
    "write past the dispatcher": lambda kept, _: kept[0].untyped_storage().fill_(0),
    "write of a composite": lambda kept, _: torch.ops.aten._saturate_weight_to_fp16(kept[0]),
    "copies of sparse": copies_of_sparse,
    "dense of sparse": dense_of_sparse,
    "copies of inferred": copies_of_inferred,
    "results of entries": results_of_entries,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_uses_of_offloaded_tensors_exceed_no_limit(use: Any) -> None:
    with mempool.torch.install(device="cpu", limit="8MiB", background=False) as pool:
        sparse = torch.ones(64, 512).to_sparse()  # 640 KiB
        kept = [torch.full((512, 1000), float(number)) for number in range(8)]  # 2 MB each
        assert any(record.state == OFFLOADED for record in pool.offloading.mode.storages.records.values())
        use(kept, sparse)
        assert pool.report().to_dict()["swapping"]["beyond"] == 0
        assert [one[0, 0].item() for one in kept[:8]] == list(map(float, range(8)))


@pytest.mark.parametrize("limit", ["0", "much", -1, True, 1.5, "1.5", "2.5 B"])
def test_invalid_limit_is_refused(limit: object) -> None:
    with pytest.raises(UsageError):
        mempool.torch.install(device="cpu", limit=limit)
    assert not mempool.torch.is_installed()


@pytest.mark.parametrize(
    ("options", "variables", "why"),
    [
        (["--limit", "2GiB", "--max-reserved", "1GiB"], {}, "max_reserved 1,073,741,824"),
        ([], {"MEMPOOL_HOST_LIMIT": "1GiB"}, "give both"),
        (["--limit", "much"], {}, "'much' is not a size in bytes"),
    ],
)
def test_invalid_options_are_reported_in_a_line(
    options: list[str], variables: dict[str, str], why: str
) -> None:
    command = [sys.executable, "-m", "mempool", "run", *options, "-c", "1"]
    environment = {**os.environ, **variables, "PYTHONPATH": str(Path(mempool.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 2
    assert why in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_closing_the_pool_reloads_storages_under_later_modes() -> None:
    class Other(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    pool = mempool.torch.install(device="cpu", limit="2MiB", background=False)
    kept = [torch.full((MIB // 8,), float(i)) for i in range(8)]
    with Other():
        pool.close()
        assert [t.untyped_storage().nbytes() for t in kept] == [MIB // 2] * 8
        assert [t.mean().item() for t in kept] == [float(i) for i in range(8)]
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


SCRIPT = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Sequential(*[m for _ in range(6) for m in (torch.nn.Linear(64, 64), torch.nn.Tanh())])
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
kept = []
for step in range(6):
    loss = net(torch.randn(2048, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept.append(loss.detach())
    print(loss.item().hex())
{end}
"""


@pytest.mark.parametrize(
    "end", [pytest.param("", marks=FULL), pytest.param("raise SystemExit(3)", marks=FULL), "1 / 0"]
)
def test_unmodified_program_runs_within_a_limit(tmp_path: Path, end: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(end=end))
    folder = str(Path(mempool.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": folder}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command, "train.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    plain = run()
    offloaded = run("-m", "mempool", "run", "--quiet", "--json", "report.json", "--limit", "4MiB")
    assert (offloaded.stdout, offloaded.returncode) == (plain.stdout, plain.returncode), offloaded.stderr
    assert offloaded.stderr == plain.stderr
    values = json.loads((tmp_path / "report.json").read_text())["pools"]["torch"]["swapping"]
    assert values["limit_bytes"] == 4 * MIB
    assert values["moves"] > 0


# --- iterations


@pytest.fixture
def mode() -> Iterator[OffloadMode]:
    engine = HostEngine(64 * MIB)
    with OffloadMode(engine, CPU, 2 * MIB) as mode:
        yield mode
    engine.close()


def test_single_diverging_iteration_keeps_the_schedule_and_two_make_another(mode: OffloadMode) -> None:
    loop, iterations = Loop(), mode.iterations
    for _ in range(3):
        loop.step()
    assert iterations.schedule is not None
    tape = iterations.schedule.recording  # stays where copies only come sooner
    for size in (1536, 1024, 2048, 1024):
        loop.step(size)
        assert iterations.schedule.recording is tape
    assert mode.counts.diverged - 1 == 2  # the first two iterations differ by the momentum that begins
    loop.step(1280)
    loop.step(1280)
    made = mode.counts.plans
    loop.step(1280)
    assert iterations.schedule.recording is not tape
    assert mode.counts.plans == made


def test_second_iteration_plans_storages_from_before_the_mode() -> None:
    tensors = [torch.ones(1 << 16) for _ in range(6)]
    engine = HostEngine(64 * MIB)
    with OffloadMode(engine, CPU, MIB + MIB // 4) as mode:
        for _ in range(2):
            for tensor in tensors:
                tensor.add_(1)
            mode.step()
        assert mode.iterations.schedule is not None
        assert len(mode.iterations.schedule.persistent_rows) == len(tensors)
        for _ in range(4):
            evicted = mode.counts.evicted
            for tensor in tensors:
                tensor.add_(1)
            mode.step()
        assert (mode.counts.evicted, mode.counts.diverged) == (evicted, 0)
        assert mode.counts.iteration_in_bytes > 0
    engine.close()
    assert all(tensor.eq(7).all() for tensor in tensors)


def test_program_marks_override_optimizer_steps() -> None:
    with mempool.torch.install(device="cpu", limit="4MiB", background=False) as pool:
        loop = Loop()
        for _ in range(3):
            with pool.iteration():
                loop.step()
                loop.step()  # the second half of the same
        assert pool.report().to_dict()["swapping"]["iterations"] in (3, 4)  # the first may have been found
    with mempool.torch.install(device="cpu", limit="4MiB", background=False) as pool:
        loop = Loop()
        watched = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], 1.0)
        pool.watch(watched)
        for _ in range(4):
            loop.step()
        assert pool.report().to_dict()["swapping"]["iterations"] == 0
        watched.step()
        assert pool.report().to_dict()["swapping"]["iterations"] == 1


def test_first_of_two_optimizers_ends_iterations(mode: OffloadMode) -> None:
    loop, other = Loop(), Loop()
    for _ in range(5):
        loop.step()
        other.step()
    assert mode.counts.iterations == 5


def test_infeasible_limit_is_reported_once_with_the_least_schedule(caplog: pytest.LogCaptureFixture) -> None:
    plain = losses([1024] * 6)
    engine = HostEngine(64 * MIB)
    with caplog.at_level("WARNING"), OffloadMode(engine, CPU, MIB // 4) as mode:
        assert losses([1024] * 6) == plain
        plan = mode.iterations.schedule
    engine.close()
    assert plan is not None
    assert plan.swap.limit_bytes > MIB // 4
    assert plan.swap.peak_bytes < plan.recorded.step.peak_bytes
    assert len(caplog.records) == 1
    assert "262,144 B (256 KiB)" in caplog.text
    assert "goes on within the limit" in caplog.text
    assert re.search(r": _?[a-z_]+ needs [\d,]+ B .*smallest limit with a plan is [\d.]+[KM]iB", caplog.text)


def test_lengths_that_never_recur_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    sizes = [1024, *range(1025, 1050)]
    plain = losses(sizes)
    with caplog.at_level("WARNING"), mempool.torch.install(device="cpu", limit="3MiB", background=False):
        assert losses(sizes) == plain
    said = [text for text in caplog.messages if "followed no plan of moves" in text]
    assert len(said) == 1
    assert re.match(r"16 of \d\d iterations", said[0])
    caplog.clear()
    with caplog.at_level("WARNING"), mempool.torch.install(device="cpu", limit="3MiB", background=False):
        losses([1024] * 26)
    assert not [text for text in caplog.messages if "followed no plan of moves" in text]


def test_unmarked_loop_is_detected_and_planned(mode: OffloadMode) -> None:
    """Weights larger than the limit are reloaded in turn, before their use."""
    weights = [torch.full((256, 256), i / 1e5) for i in range(12)]
    x = torch.ones(16, 256)

    def work() -> float:
        with torch.inference_mode():
            y = x
            for weight in weights:
                y = torch.tanh(y @ weight) + 1
            return float(y.sum() * y.mean())

    first = work()
    assert [work() for _ in range(60)] == [first] * 60
    counts, plan = mode.counts, mode.iterations.schedule
    assert plan is not None
    assert len(plan) >= 36  # the whole inference, not one layer
    on_demand, iterations = counts.on_demand, counts.iterations
    work()
    assert counts.iterations == iterations + 1
    assert counts.on_demand - on_demand <= 1


@pytest.mark.parametrize("limit", ["4MiB", "1GiB"])
def test_pool_serves_an_unmarked_inference_loop_from_its_plan(limit: str) -> None:
    """Without an optimizer, the pool and the mode each detect the period."""
    layers = [part for _ in range(8) for part in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
    net, x = torch.nn.Sequential(*layers), torch.ones(512, 256)
    with (
        torch.inference_mode(),
        mempool.torch.install(device="cpu", limit=limit, host_limit="64MiB", background=False) as pool,
    ):
        for step in range(80):
            if step == 60:
                before = pool.client.stats()["outcomes"]
            net(x)
            pool.plan_now()
        after = pool.client.stats()["outcomes"]
        assert (pool.report().values["swapping"]["bypassed"] > 0) == (limit == "1GiB")
    new = {name: after[name] - before[name] for name in after}
    assert new["hit"] == sum(new.values()) > 0


def test_untouched_storages_are_offloaded_and_do_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Examples are the average of a model and the data of an evaluation."""
    idle = [torch.randn(MIB) for _ in range(4)]
    sums = [one.sum().item() for one in idle]
    engine = HostEngine(64 * MIB)
    with caplog.at_level("WARNING"), OffloadMode(engine, CPU, 3 * MIB) as mode:
        assert [one.sum().item() for one in idle] == sums  # the sums register the storages
        assert losses([1024] * 6) == losses([1024] * 6)
        plan = mode.iterations.schedule
        assert plan is not None
        assert plan.swap.limit_bytes <= 3 * MIB
        assert [one.sum().item() for one in idle] == sums
    engine.close()
    assert not caplog.records


def test_recording_without_a_period_is_bounded(mode: OffloadMode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "mempool.torch.eager.recorded_iteration.OPTIONS", replace(OPTIONS, max_unperiodic_operations=128)
    )
    x, choices = torch.ones(10), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(400):
            x = x + 1 if torch.rand((), generator=choices) < 0.5 else x * 1
            assert len(mode.iterations.current) <= 128
