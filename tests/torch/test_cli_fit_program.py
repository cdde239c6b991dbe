"""``mempool fit SCRIPT --main`` on a CPU build: programs run on tensors without memory, or are refused."""

from __future__ import annotations

import contextlib
import io
import textwrap
from pathlib import Path
from typing import Any

import pytest

from mempool.cli.rehearse.arguments import Request

pytest.importorskip("torch", reason="PyTorch is not installed")

import mempool.torch
from mempool.cli.app import call
from mempool.cli.fit import program
from mempool.rehearsal.standin import has_cuda_build
from mempool.torch.estimate.failures import BrokenScriptError
from mempool.torch.estimate.program import run_program

no_cuda = pytest.mark.skipif(has_cuda_build(), reason="a CUDA build rehearses programs")

HEAD = """
import sys, threading, torch, types
from torch import nn
import torch.nn.functional as F

V = 1000

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.exp())
        return 2 * x
    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]

model = nn.Sequential(nn.Embedding(V, 16), nn.Linear(16, V))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.zeros(96, dtype=torch.long), torch.zeros(96, dtype=torch.long)
"""


def loop(*lines: str) -> str:
    """Return a program with lines in its training loop."""
    body = textwrap.indent("\n".join(lines), "    ")
    return f"{HEAD}for step in range(8):\n{body}\n"


SPLIT = """
data = torch.utils.data.TensorDataset(x, y)
some, _ = torch.utils.data.random_split(data, [64, 32])
loader = torch.utils.data.DataLoader(some, 16, shuffle=True)
for a, b in loader:
    loss = F.cross_entropy(model(a), b)
    loss.backward()
    sgd.step()
    sgd.zero_grad()
"""
STEP = ("loss.backward()", "sgd.step()", "sgd.zero_grad()")
#: Training loops with losses and orders as users write them.
LOOPS = {
    "method": loop("loss = -model(x).log_softmax(-1).gather(1, y[:, None]).mean()", *STEP),
    "one hot": loop("o = model(x)", "loss = ((o - F.one_hot(y, V)) ** 2).mean()", *STEP),
    "logsumexp": loop("o = model(x)", "loss = (o.logsumexp(-1) - o[torch.arange(len(y)), y]).mean()", *STEP),
    "mse loss": loop("loss = F.mse_loss(model(x), torch.zeros(96, V))", *STEP),
    "smooth l1 loss": loop("loss = F.smooth_l1_loss(model(x), torch.zeros(96, V))", *STEP),
    "split data": HEAD + SPLIT,
    "random order": loop("i = torch.randperm(9).tolist()[step]", "loss = model(x[i : i + 64]).mean()", *STEP),
    "accuracy": loop("o = model(x)", "loss = F.cross_entropy(o, y)", *STEP,
                     "right = int((o.argmax(1) == y).sum())", "print(right / len(y))"),
    "penalty": loop("loss = model(x).exp().mean() + sum((p ** 2).sum() for p in model.parameters())", *STEP),
    "function": loop("loss = Doubled.apply(model(x)).mean()", *STEP),
    "gradients": loop("ps = list(model.parameters())", "gs = torch.autograd.grad(model(x).exp().mean(), ps)",
                      "for p, g in zip(ps, gs): p.grad = g", "sgd.step()"),
    "two calls": loop("loss = (model(x) - model(y)).square().mean()", *STEP),
    "late clearing": loop("loss = model(x).square().mean()", "sgd.zero_grad()", *STEP[:2]),
    "accumulation": loop("model(x).square().mean().backward()", "if step % 2:", "    sgd.step()",
                         "    sgd.zero_grad()"),
    "closure": loop("def loss():", "    sgd.zero_grad()", "    o = model(x).square().mean()",
                    "    o.backward()", "    return o", "sgd.step(loss)"),
    "autocast": loop("with torch.autocast('cpu', torch.bfloat16): o = model(x)",
                     "loss = (o.float() ** 2).mean()", *STEP),
    "logging": loop("loss = model(x).square().mean()", *STEP, "if torch.isnan(loss): raise ValueError",
                    "print(step, loss.item())"),
}  # fmt: skip


def real_peak(text: str) -> int:
    """Return the peak of the bytes that a real run asks for."""
    with mempool.torch.install(device="cpu") as pool, contextlib.redirect_stdout(io.StringIO()):
        exec(compile(text, "real.py", "exec"), {"__name__": "__main__"})
        return int(pool.report().to_dict()["requested_peak_bytes"])


@pytest.mark.parametrize("text", LOOPS.values(), ids=LOOPS)
def test_peak_of_a_program_equals_a_real_run(fitted: Any, text: str) -> None:
    """The peaks agree within one per cent on the CPU, without a caveat."""
    answer = fitted(text, "--device", "cpu", "--limit", "1GiB", "--no-remedies", "--no-largest-batch")
    assert (answer["fits"], answer["caveats"], answer["mode"]) == (True, [], "train")
    assert answer["peak_bytes"] == pytest.approx(real_peak(text), rel=0.01)


def test_reads_of_numbers_are_named(fitted: Any) -> None:
    answer = fitted(loop("n = y.max().item()", "loss = model(x[: n + 9]).mean()", *STEP), "--device", "cpu")
    assert "the program reads some at train.py:21, and a size or a branch" in answer["warnings"][0]


GENERATES = """
import torch
from torch import nn
head = nn.Linear(64, 64)
def generate(ids, most=50):
    with torch.no_grad():
        for step in range(most):
            ids = torch.cat([ids, head(ids[-8:])])
            if (ids > 2).all():
                break
    return ids
if __name__ == "__main__":
    generate(torch.zeros(8, 64))
"""


def test_loop_that_ends_by_a_value_runs_to_its_bound_with_a_caveat(
    fitted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = fitted(GENERATES, "--device", "cpu")
    assert answer["peak_bytes"] == pytest.approx(real_peak(GENERATES), rel=0.01)
    assert (answer["mode"], answer["fits"]) == ("inference", None)
    [caveat] = answer["caveats"]
    assert caveat["label"] == "only of what ran"
    assert caveat["reason"].startswith("train.py:9 decides by values of tensors, unknown before the run")
    assert call(["fit", "train.py", "--main", "--limit", "1GiB"]) == 1
    verdict, warning, *rest = capsys.readouterr().out.splitlines()
    assert verdict.startswith("not known whether it fits in 1 GiB: ")
    assert verdict.endswith("(only of what ran)")
    assert warning == f"warning: only of what ran: {caveat['reason']}"
    assert not any("yes" in line for line in rest)


@pytest.mark.parametrize("body", ["time.sleep(60)", "try:\n        model(x)\n    except BaseException: pass"])
def test_program_without_a_step_is_refused_after_some_time(tmp_path: Path, body: str) -> None:
    path = tmp_path / "waits.py"
    path.write_text(f"{HEAD}import time\nwhile True:\n    {body}\n")
    with pytest.raises(BrokenScriptError, match=r"waits\.py:\d+: no optimizer step within 3 s"):
        run_program(str(path), seconds=3)


def test_program_that_catches_every_exception_ends_after_its_steps(fitted: Any) -> None:
    body = (
        "try:",
        "    model(x).square().mean().backward()",
        "    sgd.step()",
        "except BaseException:",
        "    pass",
    )
    endless = loop(*body).replace("for step in range(8):", "while True:")
    assert fitted(endless)["peak_bytes"] == fitted(loop(*body))["peak_bytes"]


@no_cuda
def test_memory_of_the_host_is_counted_and_said(fitted: Any) -> None:
    step = loop("loss = model(x).square().mean()", *STEP)
    more = fitted(step.replace("x, y =", "data = torch.zeros(1 << 20)\nx, y ="))
    assert more["peak_bytes"] - fitted(step)["peak_bytes"] == 4 << 20
    assert any("those of the host, such as a data set, count, too" in text for text in more["warnings"])


@no_cuda
def test_models_that_are_not_called_are_counted(fitted: Any) -> None:
    copies = "import copy\naverage = copy.deepcopy(model)\n"
    step = loop("loss = model(x).square().mean()", *STEP)
    one, two = fitted(step), fitted(step.replace("x, y =", f"{copies}x, y ="))
    assert two["by_class_bytes"]["parameters"] == 2 * one["by_class_bytes"]["parameters"]


@no_cuda
def test_notes_name_omitted_parts(fitted: Any, tmp_path: Path) -> None:
    """A compiler, a file that keeps its content, and the build without CUDA."""
    (tmp_path / "last.pt").write_bytes(b"weeks of work")
    lines = "model = torch.compile(model)\ntorch.save(model.state_dict(), 'last.pt')\n"
    lines += (
        "from safetensors.torch import save_file\nsave_file(model.state_dict(), 'last.safetensors')\nx, y ="
    )
    text = loop("loss = model(x).square().mean()", *STEP).replace("x, y =", lines)
    compiled, saved, other, cuda = fitted(text)["warnings"]
    assert compiled.startswith("compile at train.py:19 is left out: the result is of the eager model")
    assert (saved, other) == tuple(
        f"{name} was passed over" for name in ("torch.save('last.pt')", "save_file('last.safetensors')")
    )
    assert cuda.startswith("this PyTorch has no CUDA: ")
    assert cuda.endswith("`mempool rehearse train.py` runs it itself")
    assert (tmp_path / "last.pt").read_bytes() == b"weeks of work"


TRAINER = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return {"input_ids": torch.ones(32, dtype=torch.long), "labels": torch.tensor(0)}
config = BertConfig(
    vocab_size=99, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, gradient_accumulation_steps=4, save_steps=1, report_to="none")
Trainer(model=BertForSequenceClassification(config), args=arguments, train_dataset=Data()).train()
"""


@no_cuda
@pytest.mark.full
def test_trainer_accumulates_and_saves(fitted: Any) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    once = fitted(TRAINER.replace("steps=4", "steps=1"))
    often = fitted(TRAINER)
    assert often["by_phase_bytes"]["forward"] > once["by_phase_bytes"]["forward"]
    assert (once["caveats"], often["caveats"]) == ([], [])


REMEDY = "a CUDA build of PyTorch runs the program itself: pip install torch, then mempool rehearse bad.py"
BAD = {
    "CUDA": ("torch.cuda.synchronize()", "bad.py:20: AssertionError: Torch not compiled with CUDA enabled"),
    "shape": ("i = x.unique()", "bad.py:20: DynamicOutputShape"),
    "NumPy": ("x.numpy()", "bad.py:20: RuntimeError: .numpy()"),
    "branch": ("if not (x == 0).all(): raise ValueError('no')",
               "bad.py:20: ValueError: no (behind bad.py:20, which decides by a value: conditions are taken"),
    "exit": ("sys.exit(2)", "bad.py:20: ends itself (2): give its arguments behind --"),
    "syntax": ("def f(:", "bad.py:20: "),
    "input": ("input()", "bad.py:20: EOFError"),
    "thread": ("t = threading.Thread(target=lambda: model(x).sum().backward())\nt.start(); t.join()",
               "bad.py:20: it runs a model in another thread"),
}  # fmt: skip


@no_cuda
@pytest.mark.usefixtures("warm_programs")
@pytest.mark.parametrize(("lines", "reason"), BAD.values(), ids=BAD)
def test_program_that_cannot_be_tried_is_refused_with_line_and_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lines: str,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(f"{HEAD}{lines}\n")
    assert call(["fit", "bad.py", "--main"]) == 3
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mempool: {reason}")
    assert line.endswith(REMEDY)


@no_cuda
def test_distributed_program_is_sent_to_a_rehearsal_with_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "ddp.py").write_text("import torch\ntorch.distributed.init_process_group('gloo')\n")
    assert call(["fit", "ddp.py", "--main"]) == 3
    assert capsys.readouterr().err.endswith("then mempool rehearse --ranks 2 ddp.py\n")


@pytest.mark.parametrize(
    "options", [("--batch", "4"), ("--accumulate", "4"), ("--largest-batch",), ("--checkpoint",)]
)
def test_options_of_a_model_are_refused_for_a_program(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["fit", "train.py", "--main", *options]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{options[0]} is of a model, and a program decides itself: give its own arguments" in said


def test_cuda_build_rehearses_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is the memory of the device, and names of allocators are a rehearsal's."""
    seen: list[Request] = []
    monkeypatch.setattr(program, "has_cuda_build", lambda: True)
    monkeypatch.setattr(program, "rehearse_request", lambda request, *_, **__: seen.append(request))
    asked = ("--limit", "8GiB", "-a", "pytorch_expandable", "-a", "planned")
    assert call(["fit", "train.py", "--main", *asked, "--", "--bs", "4"]) == 0
    [request] = seen
    assert request.program == ("train.py", "--bs", "4")
    assert request.allocators == ("expandable", "mempool")
    assert request.machine.card is not None
    assert (request.machine.card.name, request.machine.card.memory_bytes) == ("A100 80GB", 8 << 30)
    assert request.limit_bytes is None
    assert call(["fit", "train.py", "--main", "-a", "cupy"]) == 2
