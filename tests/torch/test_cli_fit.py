"""``mempool fit`` as a user runs it: on scripts and functions of one's own, in this process."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from torch import nn

from mempool.cli.app import call
from mempool.torch.estimate import Job, fit_job
from traces.formats.parquet import read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("shared_isolation")

CNN = """
import torch
from torch import nn

print("printed by the script")

class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))

def make(batch, image=16):
    return Net(), torch.zeros(batch, 3, image, image)
"""
TRAINS = """
import torch
from cnn import Net

model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn(640, 3, 16, 16), torch.randint(0, 10, (640,)))
for x, y in torch.utils.data.DataLoader(data, batch_size=64, shuffle=True, num_workers=2, pin_memory=True):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x.to("cuda")), y.to("cuda"))
    loss.backward()
    raise AssertionError("the backward is where it ends")
"""
PROGRAM = """
import argparse
import torch
from cnn import Net

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bs", type=int, default=16)
    parser.add_argument("data")
    given = parser.parse_args()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    loss = nn_loss(model(torch.randn(given.bs, 3, 16, 16)), torch.zeros(given.bs, dtype=torch.int64))
    loss.backward()
    optimizer.step()
    print(loss.item())

nn_loss = torch.nn.CrossEntropyLoss()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in {"cnn": CNN, "trains": TRAINS, "program": PROGRAM}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in ("cnn", "trains", "program", *(set(sys.modules) - modules)):
        if getattr(sys.modules.get(name), "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


def net(width: int = 32) -> nn.Module:
    namespace: dict[str, Any] = {"__name__": "own"}
    exec(CNN, namespace)
    made: nn.Module = namespace["Net"](width)
    return made


def expected(batch: int, **more: Any) -> Any:
    job = Job(
        model=net, inputs=lambda b: ((torch.zeros(b, 3, 16, 16),), {}), batch=batch,
        **({"optimizer": torch.optim.AdamW} | more),
    )  # fmt: skip
    return fit_job(job)


def test_a_function_a_class_and_a_script_with_inputs_are_the_same_job(folder: Path, fit_json: Any) -> None:
    spec = ["--inputs", "float32[B,3,16,16]", "--batch", "4"]
    answers = [
        fit_json("cnn.py:make", "--batch", "4"),
        fit_json("cnn:make(image=16)", "--batch", "4"),
        fit_json("cnn:Net", *spec),
        fit_json("cnn.py:Net(width=32)", *spec),
    ]
    wanted = expected(4)
    for answer in answers:
        assert answer["peak_bytes"] == sum(answer["by_class_bytes"].values()) == wanted.peak_bytes
        assert answer["reserved_bytes"] == wanted.reserved_bytes
        assert (answer["fits"], answer["largest_batch"], answer["batch"]) == (None, None, 4)


def test_script_is_estimated_with_its_model_optimizer_and_loss(folder: Path, fit_json: Any) -> None:
    """Model, batch, optimizer and loss are the script's own, and nothing comes after its first backward."""
    sgd = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    labels = lambda b: torch.zeros(b, dtype=torch.int64)  # noqa: E731
    wanted = expected(64, optimizer=sgd, loss=nn.functional.cross_entropy, labels=labels)
    answer = fit_json("trains.py")
    assert (answer["batch"], answer["peak_bytes"]) == (64, wanted.peak_bytes)
    assert answer["by_class_bytes"] == wanted.by_class_bytes
    other = fit_json("trains.py", "--batch", "32")
    assert other["by_class_bytes"]["activations"] < answer["by_class_bytes"]["activations"]


def test_a_program_runs_with_its_arguments_up_to_its_first_backward(folder: Path, fit_json: Any) -> None:
    answer = fit_json("program.py", "--main", "--", "--bs", "5", "data")
    labels = lambda b: torch.zeros(b, dtype=torch.int64)  # noqa: E731
    wanted = expected(5, optimizer=torch.optim.Adam, loss=nn.functional.cross_entropy, labels=labels)
    assert (answer["batch"], answer["peak_bytes"]) == (5, wanted.peak_bytes)


def test_floats_read_by_a_script_are_zero_and_calls_without_gradients_are_inference(
    folder: Path, fit_json: Any
) -> None:
    (folder / "run.py").write_text(
        "import torch\nfrom cnn import Net\ndata = torch.zeros(100, 3, 16, 16)\nnet = Net()\n"
        "net = torch.compile(net, dynamic=True)\n"
        "assert torch.isfinite(data).all() and data.sum().item() == 0\n"
        "with torch.no_grad():\n    net(data[:6])\n"
    )
    answer = fit_json("run.py")
    assert (answer["mode"], answer["batch"], answer["model"]) == ("inference", 6, "Net of run.py")
    assert fit_json("run.py", "--mode", "train")["mode"] == "train"


def test_the_verdict_comes_first_and_is_the_exit_code(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["fit", "cnn.py:make", "--batch", "4", "--limit", "8GiB", "--no-largest-batch"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("fits in 8 GiB with ")
    assert "printed by the script" in output.err
    assert (
        call(["fit", "cnn.py:make", "--batch", "4", "--limit", "1MiB", "--no-remedies", "--no-largest-batch"])
        == 1
    )
    assert capsys.readouterr().out.startswith("does not fit in 1 MiB: ")


def test_largest_batch_fits_and_the_next_does_not(folder: Path, fit_json: Any) -> None:
    limit = ["--limit", "600MiB", "--device", "cpu", "-a", "planned"]
    largest = fit_json("cnn.py:make", "--batch", "4", *limit, "--no-remedies")["largest_batch"]
    assert largest > 4
    rest = ["--no-largest-batch", "--no-remedies"]
    assert fit_json("cnn.py:make", "--batch", str(largest), *limit, *rest)["fits"] is True
    assert fit_json("cnn.py:make", "--batch", str(largest + 1), *limit, *rest, code=1)["fits"] is False


def test_sweep_lists_the_estimate_of_each_size(
    folder: Path, capsys: pytest.CaptureFixture[str], fit_json: Any
) -> None:
    rows = fit_json("cnn.py:make", "--batch", "2,8", "--image", "8,16")
    assert [(row["image"], row["batch"]) for row in rows] == [(8, 2), (8, 8), (16, 2), (16, 8)]
    alone = fit_json("cnn.py:make", "--batch", "8", "--image", "16")
    assert rows[3]["peak_bytes"] == alone["peak_bytes"]
    assert rows[3].keys() == alone.keys()
    assert call(["fit", "cnn.py:make", "--batch", "2,8", "--limit", "1GiB", "--plot", "fit.svg"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("2 of 2 sizes fit in 1 GiB")
    assert (folder / "fit.svg").read_text().count("<circle") == 2
    assert call(["fit", "cnn.py:make", "--batch", "2,8", "--limit", "1MiB"]) == 1


def test_the_trace_of_a_fit_is_read_by_the_other_verbs(
    folder: Path, capsys: pytest.CaptureFixture[str], fit_json: Any
) -> None:
    answer = fit_json("cnn.py:make", "--batch", "4", "--trace", "fit.trace")
    assert len(read_trace(folder / "fit.trace")) > 0
    assert call(["compare", "fit.trace", "-a", "pytorch", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["peak_reserved_bytes"] == answer["reserved_bytes"]["pytorch"]
    for more in ([], ["--bandwidth", "1000GB"]):
        assert call(["swap", "fit.trace", "--json", *more]) == 0
        out, error = capsys.readouterr()
        assert ("times are those of A100 80GB's full rates" in error) == (not more)
        swaps = json.loads(out)
        assert swaps["limits"]
        assert swaps["repeats"]
        assert swaps["peak_load_bytes"] == pytest.approx(answer["peak_bytes"], rel=0.05)  # as a GPU rounds


def test_margin_option_replaces_the_estimate(
    folder: Path, capsys: pytest.CaptureFixture[str], fit_json: Any
) -> None:
    answer = fit_json("cnn.py:make", "--margin", "cuda_context=1GiB", "--margin", "kernels=0")
    assert answer["margin_bytes"]["cuda_context"] == 1 << 30
    assert answer["margin_bytes"].get("kernels", 0) == 0
    assert "nccl" not in answer["margin_bytes"]
    many = fit_json("cnn.py:make", "--processes", "2")["margin_bytes"]
    assert many["ddp_buckets"] > 0 < many["nccl"]
    assert call(["fit", "cnn.py:make", "--margin", "contxt=1"]) == 2
    assert "no margin 'contxt'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "more"), [("12GiB", ""), ("12 GB", ""), ("48GiB", ", which is more than programs get of it")]
)
def test_limit_overrides_the_card_with_a_note(limit: str, more: str, folder: Path, fit_json: Any) -> None:
    answer = fit_json("cnn.py:make", "--card", "RTX 4090", "--limit", limit, "--no-largest-batch")
    assert answer["limit_bytes"] == {"12GiB": 12 << 30, "12 GB": 12 * 10**9, "48GiB": 48 << 30}[limit]
    size = {"12 GB": "11.18 GiB"}.get(limit, limit.replace("G", " G"))
    line = f"--limit {size} counts{more}, not the 23.52 GiB of the RTX 4090, whose kernels and link are taken"
    assert line in answer["warnings"]
    alone = fit_json("cnn.py:make", "--card", "RTX 4090", "--no-largest-batch")
    assert alone["limit_bytes"] == 24081 << 20
    assert not any("counts" in text for text in alone["warnings"])


def test_card_without_modelled_kernels_gives_a_warning(folder: Path, fit_json: Any) -> None:
    answer = fit_json("cnn.py:make", "--card", "MI300X", "--no-largest-batch")
    assert any(text.startswith("MI300X: AMD's kernels and context are not") for text in answer["warnings"])


def test_remedies_are_printed_with_code_if_the_job_does_not_fit(
    folder: Path, capsys: pytest.CaptureFixture[str], fit_json: Any
) -> None:
    sizes = ["cnn.py:make", "--batch", "64", "--no-largest-batch", "--limit"]
    assert call(["fit", *sizes, "1MiB", "--remedies-seconds", "1"]) == 1
    text = capsys.readouterr().out
    assert "what would help" in text
    assert "saves" in text
    assert fit_json(*sizes, "8GiB")["remedies"] == []


BAD = {
    "syntax.py": ("def f(:", 3, "syntax.py:1: "),
    "ends.py": ("import sys\nsys.exit(3)", 3, "ends.py:2 ends itself (exit code 3)"),
    "fails.py": ("x = 1\nraise ValueError('[bold]no[/bold]')", 3, "fails.py:2: ValueError: [bold]no[/bold]"),
    "index.py": ("import torch\ni = torch.randint(9, (1,)).item()", 3, "index.py:2: DataDependent"),
    "asks.py": ("input()", 3, "asks.py:1: EOFError"),
    "looks.py": ("import torch\nprint(torch.ones(2).numpy())", 3, "looks.py:2: RuntimeError: .numpy()"),
    "two.py": ("from cnn import Net\na, b = Net(), Net()", 2, "say which, two.py:a, two.py:b"),
    "nothing.py": ("x = 1", 2, "nothing.py has no model at its top level"),
    "data.py": (
        "import torch\nclass Net(torch.nn.Module):\n def __init__(self):\n  super().__init__()\n"
        "  self.p = torch.nn.Parameter(torch.ones(3))\n def forward(self, x):\n"
        "  return x if (x * self.p).sum() > 0 else -x\ndef make(batch): return Net(), torch.ones(batch, 3)",
        2, "data.py:7",
    ),
    "none.py": ("def make(): return 3", 2, "make returns a int"),
    "needs.py": ("def make(depth): return depth", 2, "nothing"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_broken_script_gives_a_single_line(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    text, code, reason = BAD[name]
    (folder / name).write_text(text)
    target = f"{name}:make" if name in ("none.py",) else name
    assert call(["fit", target]) == code
    error = capsys.readouterr().err
    if name != "needs.py":
        assert reason in error
    assert sum(line.startswith("mempool:") for line in error.splitlines()) == 1
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["gone.py"], 3, "gone.py: No such file"),
        (["gone_module:f"], 2, "no module 'gone_module'"),
        (["cnn:Ned"], 2, "it has Net"),
        (["cnn.py:make", "--seq", "3"], 2, "--seq would change nothing"),
        (["cnn.py:Net"], 2, "what goes into Net? Give --inputs"),
        (["cnn.py:Net", "--inputs", "[B,4,8,8]"], 2, "to have 3 channels, but got 4"),
        (["cnn.py:make", "--optimizer", "adamx"], 2, "did you mean adamax"),
        (["cnn.py:make", "--loss", "crossentropy"], 2, "did you mean cross-entropy"),
        (["cnn.py:make", "--optimizer", "sgd(nestrov=True)"], 2, "nestrov"),
        (["program.py", "--main"], 3, "give its arguments behind --"),
        (["program.py"], 2, "--main runs it as a program"),
        (["cnn.py:make", "-a", "nobody"], 2, "no allocator 'nobody'"),
    ],
)
def test_invalid_arguments_give_the_nearest_name(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, reason: str
) -> None:
    assert call(["fit", *arguments]) == code
    error = capsys.readouterr().err
    assert reason in error
    assert "Traceback" not in error


def test_module_training_at_import_is_stopped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "real.py").write_text(
        "import torch\nfrom cnn import Net\nnet = Net(4)\nnet(torch.ones(2, 3, 8, 8)).sum().backward()\n"
        "raise AssertionError\n"
    )
    assert call(["fit", "real:net"]) == 3
    assert "real trains when it is imported" in capsys.readouterr().err


def test_no_file_is_written_while_a_script_is_tried(folder: Path, fit_json: Any) -> None:
    """Neither before its first backward nor when what stops it unwinds; and a real array is what it is."""
    (folder / "saves.py").write_text(
        "import numpy, torch\nfrom cnn import Net\nnet = Net(4)\ntorch.save(net.state_dict(), 'last.pt')\n"
        "numpy.save('last.npy', next(net.parameters()))\nnumpy.save('real.npy', numpy.zeros(3))\n"
        "try:\n    net(torch.ones(2, 3, 8, 8)).sum().backward()\nfinally:\n    torch.save(net, 'end.pt')\n"
    )
    files = {name: folder / name for name in ("last.pt", "last.npy", "end.pt")}
    for file in files.values():
        file.write_bytes(b"weeks of work")
    save = torch.save
    warnings = fit_json("saves.py")["warnings"]
    assert torch.save is save
    assert not any("catches" in text for text in warnings)
    assert "saves.py's torch.save(...) was passed over" in warnings
    assert "saves.py's numpy.save(...) was passed over" in warnings
    assert [file.read_bytes() for file in files.values()] == [b"weeks of work"] * 3
    assert (folder / "real.npy").exists()
    (folder / "saves.py").write_text("import torch\ntorch.save(torch.ones(1), 'last.pt')\nraise ValueError")
    assert call(["fit", "saves.py"]) == 3
    assert torch.save is save
    assert files["last.pt"].read_bytes() == b"weeks of work"


def test_function_saving_its_model_leaves_the_file_alone(folder: Path, fit_json: Any) -> None:
    (folder / "makes.py").write_text(
        "import torch\nfrom cnn import Net\ndef make(batch):\n    net = Net(4)\n"
        "    torch.save(net, 'made.pt')\n    return net, torch.ones(batch, 3, 8, 8)\n"
    )
    fit_json("makes.py")
    assert not (folder / "made.pt").exists()


def script(folder: Path, name: str, *lines: str) -> str:
    head = ("import torch", "from torch import nn", "from cnn import Net", "x = torch.zeros(6, 3, 16, 16)")
    (folder / name).write_text("\n".join((*head, *lines)) + "\n")
    return name


def test_validation_call_after_the_forward_is_not_the_estimated_call(
    folder: Path, capsys: pytest.CaptureFixture[str], fit_json: Any
) -> None:
    """Validation of the same model, or of another model that is too small to matter."""
    lines = [
        "net = Net()",
        "y = net(x)",
        "with torch.no_grad():",
        "    net(x[:2])",
        "    nn.Linear(3, 3)(x[:2, 0, 0, :3])",
    ]
    answer = fit_json(script(folder, "val.py", *lines, "y.sum().backward()"))
    assert (answer["model"], answer["batch"]) == ("Net of val.py", 6)
    assert answer["warnings"][0] == "not counted: Linear, 48 B of parameters, and what trains it"
    assert call(["fit", "val.py", "--limit", "9GiB", "--no-largest-batch"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("fits in")
    assert second == f"warning: {answer['warnings'][0]}"


@pytest.mark.parametrize(
    "lines",
    [
        ("a, b = Net(), Net(16)", "b(a(x).reshape(-1, 1, 1, 1).expand(-1, 3, 16, 16)).sum().backward()"),
        ("teacher = Net().requires_grad_(False)", "(Net()(x) - teacher(x)).sum().backward()"),
        ("net, other = Net(), Net()", "torch.optim.SGD(other.parameters())", "net(x).sum().backward()"),
    ],
)
def test_several_large_models_are_refused_with_a_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str], lines: tuple[str, ...]
) -> None:
    assert call(["fit", script(folder, "many.py", *lines)]) == 2
    error = capsys.readouterr().err
    assert "of parameters; name a function that returns one module" in error
    assert sum(line.startswith("mempool:") for line in error.splitlines()) == 1


def test_small_module_before_the_model_is_not_counted_and_named(folder: Path, fit_json: Any) -> None:
    lines = ["first, net = nn.Conv2d(3, 3, 1), Net()", "net(first(x)).sum().backward()"]
    answer = fit_json(script(folder, "row.py", *lines))
    assert answer["model"] == "Net of row.py"
    assert answer["warnings"][0].startswith("not counted: Conv2d, 48 B of")


def test_model_called_twice_before_the_backward_gives_a_caveat(folder: Path, fit_json: Any) -> None:
    lines = ["net = Net()", "(net(x) - net(x)).sum().backward()"]
    answer = fit_json(script(folder, "twin.py", *lines))
    assert [caveat["label"] for caveat in answer["caveats"]] == ["one of 2 calls"]
    assert "calls the Net 2 times before its backward" in answer["warnings"][0]


def test_optimizer_has_the_parameters_of_the_scripts_optimizer(folder: Path, fit_json: Any) -> None:
    """Groups keep their settings; a parameter of two optimizers belongs to the last."""

    def state(*lines: str) -> int:
        name = script(folder, "own.py", "net = Net()", *lines, "net(x).sum().backward()")
        return int(fit_json(name)["by_class_bytes"].get("optimizer_state", 0))

    def sizes(module: nn.Module) -> tuple[int, int]:
        parameters = list(module.parameters())
        return 4 * sum(p.numel() for p in parameters), len(parameters)

    own = net()
    (head, heads), (body, bodies) = sizes(own.get_submodule("head")), sizes(own.get_submodule("body"))
    rounded = 512 * (heads + bodies)
    all_of_it, part = (
        state("torch.optim.AdamW(net.parameters())"),
        state("torch.optim.AdamW(net.head.parameters())"),
    )
    assert 2 * head <= part <= 2 * head + 2 * 512 * heads + 4 * heads < all_of_it
    assert (
        state("torch.optim.AdamW(net.head.parameters())", "torch.optim.AdamW(net.body.parameters())")
        == all_of_it
    )
    momentum = "torch.optim.SGD(net.body.parameters(), lr=0.1, momentum=0.9)"
    assert state(momentum, "torch.optim.AdamW(net.head.parameters())") == state(momentum) + part
    assert state("torch.optim.AdamW(net.parameters())", momentum) == state(momentum) + part
    groups = "[{'params': net.body.parameters(), 'momentum': 0.9}, {'params': net.head.parameters()}]"
    assert body <= state(f"torch.optim.SGD({groups}, lr=0.1)") <= body + rounded


def test_unused_models_of_a_script_are_a_margin(folder: Path, fit_json: Any) -> None:
    """A copy of the trained one, alive and never called; not one that is gone, nor a part of another."""

    def margin(*lines: str, asked: str = "") -> Any:
        name = script(folder, "copies.py", "import copy", "net = Net()", *lines, "net(x).sum().backward()")
        return fit_json(name, *asked.split())["margin_bytes"].get("other_models")

    held = "average = torch.optim.swa_utils.AveragedModel(net)"
    whole = sum(t.nbytes for t in (*net().parameters(), *net().buffers()))
    assert margin(held) == whole + 8  # and how many were averaged
    assert margin("net = copy.deepcopy(net)", "gone = Net()", "gone.me = [gone]", "del gone") is None
    assert margin(held, asked="--margin other_models=5MiB") == 5 << 20


def test_accumulated_gradients_of_a_script_are_alive_in_the_backward(folder: Path, fit_json: Any) -> None:
    def answer(batches: int, *asked: str) -> dict[str, Any]:
        lines = [
            "net = Net()",
            f"every, sgd = {batches}, torch.optim.SGD(net.parameters(), lr=0.1)",
            "for step in range(8):",
            "    net(x).sum().backward()",
            "    if (step + 1) % every == 0:",
            "        sgd.step()",
            "        sgd.zero_grad()",
        ]
        return fit_json(script(folder, "adds.py", *lines), *asked)

    once, often = answer(1), answer(4)
    assert once["by_phase_bytes"]["forward"] < often["by_phase_bytes"]["forward"]
    assert "lets gradients of 4 batches add up: tried with two" in " ".join(often["warnings"])
    assert answer(4, "--accumulate", "1")["peak_bytes"] == once["peak_bytes"]


def test_attributes_of_a_function_hold_unless_options_override_them(folder: Path, fit_json: Any) -> None:
    own = "{'model': Net(), 'inputs': torch.zeros(6, 3, 16, 16), 'device': 'cpu', 'accumulate': 2}"
    name = script(folder, "own_job.py", "def make():", f"    return {own}")
    assert fit_json(name)["device"] == "cpu"
    assert fit_json(name, "--device", "cuda")["device"] == "cuda"
    more, less = fit_json(name), fit_json(name, "--accumulate", "1")
    assert more["by_phase_bytes"]["forward"] > less["by_phase_bytes"]["forward"]


STEP = "    try:\n        net(x).sum().backward()\n    except BaseException as e:\n        "


@pytest.mark.parametrize(
    "lines",
    [
        (f"while True:\n{STEP}pass",),
        (f"found = []\nwhile True:\n{STEP}found.append(e)",),
        (f"def step():\n{STEP}print(e)", "while True: step()"),
        (f"def step():\n{STEP}pass", "while True:\n    try: step()\n    except: pass"),
        (f"def run():\n  while True:\n{STEP}pass", "while True:\n    try: run()\n    except: continue"),
        ("import contextlib\nwhile True:\n    with contextlib.suppress(BaseException):",
         "        net(x).sum().backward()"),
    ],
)  # fmt: skip
def test_script_catching_all_exceptions_is_stopped(
    folder: Path, fit_json: Any, lines: tuple[str, ...]
) -> None:
    trace = sys.gettrace()
    answer = fit_json(script(folder, "holds.py", "net = Net()", *lines))
    assert sys.gettrace() is trace
    assert any("catches all exceptions" in text for text in answer["warnings"])
    assert not any("before its backward" in text for text in answer["warnings"])


def test_lightning_modules_get_a_note_on_their_training_step(folder: Path, fit_json: Any) -> None:
    lines = ("class Lit(Net):", "    def training_step(self, batch, at):", "        return self(batch).sum()")
    name = script(folder, "lit.py", *lines)
    inputs = ["--inputs", "float32[B,3,16,16]"]
    for target in (f"{name}:Lit", f"{name}:Lit(width=8)"):
        warnings = fit_json(target, *inputs)["warnings"]
        assert any(text.startswith("Lit's own training_step") for text in warnings)
    assert not any("training_step" in text for text in fit_json(f"{name}:Net", *inputs)["warnings"])
