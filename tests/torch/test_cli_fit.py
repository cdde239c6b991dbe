"""``mempool fit`` as a user runs it: on scripts and functions of one's own, in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import nn

import mempool.torch
from mempool.cli.app import call
from mempool.torch.estimate import Job, fit_job
from traces.formats.parquet import read_trace

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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in {"cnn": CNN}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in ("cnn", *(set(sys.modules) - modules)):
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
    rows = fit_json("cnn.py:make", "--batch", "2,8")
    assert [row["batch"] for row in rows] == [2, 8]
    alone = fit_json("cnn.py:make", "--batch", "8")
    assert rows[1]["peak_bytes"] == alone["peak_bytes"]
    assert rows[1].keys() == alone.keys()
    assert call(["fit", "cnn.py:make", "--batch", "2,8", "--limit", "1GiB"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("2 of 2 sizes fit in 1 GiB")
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
    assert call(["fit", "cnn.py:make", "--margin", "contxt=1"]) == 2
    assert "no margin 'contxt'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "more"), [("12GiB", ""), ("12 GB", ""), ("48GiB", ", which is more than programs get of it")]
)
def test_limit_overrides_the_card_with_a_note(limit: str, more: str, folder: Path, fit_json: Any) -> None:
    answer = fit_json("cnn.py:make", "--card", "RTX 4090", "--limit", limit, "--no-largest-batch")
    assert answer["limit_bytes"] == {"12GiB": 12 << 30, "12 GB": 12 * 10**9, "48GiB": 48 << 30}[limit]
    size = {"12 GB": "11.18 GiB"}.get(limit, limit.replace("G", " G"))
    line = f"--limit {size} counts{more}, not the 23.52 GiB of the RTX 4090, whose kernels are taken"
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
    "ends.py": ("import sys\nsys.exit(3)", 3, "ends.py:2 ends itself (3)"),
    "fails.py": ("x = 1\nraise ValueError('[bold]no[/bold]')", 3, "fails.py:2: ValueError: [bold]no[/bold]"),
    "index.py": ("import torch\ni = torch.randint(9, (1,)).item()", 3, "index.py:2: DataDependent"),
    "trains.py": (
        "import torch\nfrom cnn import Net\nNet()(torch.ones(2, 3, 8, 8)).sum().backward()", 3,
        "trains.py:3: it trains where a model is looked for; name a function that only makes the model, or "
        "run a script as a program, with --main",
    ),
    "looks.py": ("import torch\nprint(torch.ones(2).numpy())", 3, "looks.py:2: RuntimeError: .numpy()"),
    "data.py": (
        "import torch\nclass Net(torch.nn.Module):\n def __init__(self):\n  super().__init__()\n"
        "  self.p = torch.nn.Parameter(torch.ones(3))\n def forward(self, x):\n"
        "  return x if (x * self.p).sum() > 0 else -x\ndef make(batch): return Net(), torch.ones(batch, 3)",
        2, "data.py:7",
    ),
    "none.py": ("def make(): return 3", 2, "make returns a int"),
    "needs.py": ("def make(depth): return depth", 2, "make needs depth: say make(depth=...)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_broken_script_gives_a_single_line(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    text, code, reason = BAD[name]
    (folder / name).write_text(text)
    assert call(["fit", f"{name}:make"]) == code
    error = capsys.readouterr().err
    assert reason in error
    assert sum(line.startswith("mempool:") for line in error.splitlines()) == 1
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["gone.py:make"], 3, "gone.py: No such file"),
        (["gone_module:f"], 2, "no module 'gone_module'"),
        (["cnn:Ned"], 2, "it has Net"),
        (["cnn.py"], 2, "which model? Give cnn.py:NAME; --main runs cnn.py as a program"),
        (["cnn"], 2, "which model? Give cnn:NAME"),
        (["cnn.py:make", "--seq", "3"], 2, "--seq would change nothing"),
        (["cnn.py:Net"], 2, "what goes into Net? Give --inputs"),
        (["cnn.py:Net", "--inputs", "[B,4,8,8]"], 2, "to have 3 channels, but got 4"),
        (["cnn.py:make", "--optimizer", "adamx"], 2, "did you mean adamax"),
        (["cnn.py:make", "--loss", "crossentropy"], 2, "did you mean cross-entropy"),
        (["cnn.py:make", "--optimizer", "sgd(nestrov=True)"], 2, "nestrov"),
        (["cnn.py", "--", "--bs", "4"], 2, "--main and arguments are for a script.py that runs as a program"),
        (["cnn.py:Net", "--main"], 2, "--main and arguments are for a script.py that runs as a program"),
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


def test_function_saving_its_model_leaves_the_file_alone(folder: Path, fit_json: Any) -> None:
    (folder / "makes.py").write_text(
        "import torch\nfrom cnn import Net\ndef make(batch):\n    net = Net(4)\n"
        "    torch.save(net, 'made.pt')\n    return net, torch.ones(batch, 3, 8, 8)\n"
    )
    fit_json("makes.py:make")
    assert not (folder / "made.pt").exists()


def script(folder: Path, name: str, *lines: str) -> str:
    head = ("import torch", "from torch import nn", "from cnn import Net", "x = torch.zeros(6, 3, 16, 16)")
    (folder / name).write_text("\n".join((*head, *lines)) + "\n")
    return name


def test_attributes_of_a_function_hold_unless_options_override_them(folder: Path, fit_json: Any) -> None:
    own = "{'model': Net(), 'inputs': torch.zeros(6, 3, 16, 16), 'device': 'cpu', 'accumulate': 2}"
    name = script(folder, "own_job.py", "def make():", f"    return {own}")
    target = f"{name}:make"
    assert fit_json(target)["device"] == "cpu"
    assert fit_json(target, "--device", "cuda")["device"] == "cuda"
    more, less = fit_json(target), fit_json(target, "--accumulate", "1")
    assert more["by_phase_bytes"]["forward"] > less["by_phase_bytes"]["forward"]


def test_lightning_modules_get_a_note_on_their_training_step(folder: Path, fit_json: Any) -> None:
    lines = ("class Lit(Net):", "    def training_step(self, batch, at):", "        return self(batch).sum()")
    name = script(folder, "lit.py", *lines)
    inputs = ["--inputs", "float32[B,3,16,16]"]
    for target in (f"{name}:Lit", f"{name}:Lit(width=8)"):
        warnings = fit_json(target, *inputs)["warnings"]
        assert any(text.startswith("Lit's own training_step") for text in warnings)
    assert not any("training_step" in text for text in fit_json(f"{name}:Net", *inputs)["warnings"])


WIDTH = 32
MODULE = """
import torch
from torch import nn

class Attention(nn.Module):
    def forward(self, x):
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2)

LAYERS = {
    "linear": lambda: nn.Linear(32, 32), "dropout": lambda: nn.Dropout(0.1),
    "norm": lambda: nn.LayerNorm(32), "tanh": nn.Tanh, "attention": Attention,
}

class Net(nn.Module):
    def __init__(self, names="linear"):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), *(LAYERS[name]() for name in names.split()))
    def forward(self, x):
        return self.layers(x)
"""
LAYERS = ("linear", "dropout", "norm", "tanh", "attention")


@pytest.fixture(scope="module")
def device_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("devices")
    (path / "layered.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.syspath_prepend(str(path))
        yield path


def device_net(names: str) -> nn.Module:
    namespace: dict[str, Any] = {"__name__": "own"}
    exec(MODULE, namespace)
    made: nn.Module = namespace["Net"](names)
    return made


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.filterwarnings("ignore:Using a target size")
@settings(max_examples=12)
@given(
    layers=st.lists(st.sampled_from(LAYERS), min_size=1, max_size=5),
    optimizer=st.sampled_from(("AdamW", "SGD")),
    autocast=st.sampled_from((None, torch.bfloat16)),
    batch=st.integers(1, 64),
)
def test_command_and_python_call_agree_on_each_device(
    device_folder: Path,
    fit_json: Any,
    device: str,
    layers: Sequence[str],
    optimizer: str,
    autocast: torch.dtype | None,
    batch: int,
) -> None:
    names = " ".join(layers)
    lower = [] if autocast is None else ["--autocast", "bfloat16"]
    form = ("--inputs", "float32[B,16,32]", "--batch", str(batch), "--device", device)
    target = f"layered.py:Net(names='{names}')"
    command = fit_json(target, *form, "--optimizer", optimizer.lower(), *lower)
    python = mempool.torch.fit(
        lambda: device_net(names), torch.zeros(batch, 16, WIDTH), getattr(torch.optim, optimizer),
        device=device, autocast=autocast,
    )  # fmt: skip
    assert command["device"] == device
    for name in ("peak_bytes", "by_class_bytes", "reserved_bytes", "by_phase_bytes", "margin_bytes"):
        assert command[name] == getattr(python, name)


def test_device_of_a_function_counts_where_the_command_names_none(device_folder: Path, fit_json: Any) -> None:
    make = "def make():\n    return {'model': Net('dropout tanh'), 'inputs': torch.zeros(64, 16, 32)%s}\n"
    for name, more in {"told": ", 'device': 'cpu'", "untold": ""}.items():
        (device_folder / f"{name}.py").write_text("from layered import *\n" + make % more)
    told, asked = (fit_json("told.py:make"), fit_json("untold.py:make", "--device", "cpu"))
    assert told["peak_bytes"] == asked["peak_bytes"] > fit_json("untold.py:make")["peak_bytes"]
