"""``mempool fit`` on scripts that write their loss out: it is computed again, or the verdict says without."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")


import mempool.torch
from mempool.cli.app import call
from mempool.torch.estimate.sources.model_discovery import find_target
from mempool.torch.estimate.sources.scripts import fake_execution
from mempool.torch.estimate.sources.targets import Sizes
from mempool.torch.model_spec import parse_target

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("shared_isolation")

WORDS, WIDTH, ROWS = 1000, 16, 96
HEAD = f"""
import torch, types
from torch import nn
import torch.nn.functional as F

V = {WORDS}

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.exp())
        return 2 * x
    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]

class Focal(nn.Module):
    def forward(self, o, y):
        p = o.log_softmax(-1).gather(1, y[:, None])
        return (-(1 - p.exp().detach()) ** 2 * p).mean()

class Model(nn.Module):
    def __init__(self, wrap=None):
        super().__init__()
        self.words, self.head, self.wrap = nn.Embedding(V, {WIDTH}), nn.Linear({WIDTH}, V), wrap
    def forward(self, x):
        found = self.head(self.words(x))
        return found if self.wrap is None else self.wrap(found)

def ready(shape):
    return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
"""
PROGRAM = (
    HEAD
    + """
def train(steps):
    model = Model({wrap})
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = ready({shape})
    weights = torch.ones(V)
    for _ in range(steps):
        o = model(x)
{loss}
        sgd.step()
        sgd.zero_grad()
        yield

if __name__ == "__main__":
    list(train(3))
"""
)
#: Lines of a loop from the model's output to the backward, by name.
LOSSES = {
    "method": "loss = -o.log_softmax(-1).gather(1, y[:, None]).mean()\nloss.backward()",
    "one_hot": "loss = ((o - F.one_hot(y, V)) ** 2).mean()\nloss.backward()",
    "logsumexp": "loss = (torch.logsumexp(o, -1) - o[torch.arange(len(y)), y]).mean()\nloss.backward()",
    "square": "o.square().mean().backward()",
    "exp": "p = o.exp() / o.exp().sum(-1, keepdim=True)\nloss = -p[range(len(y)), y].log().mean()\n"
    "loss.backward()",
    "weighted": "loss = -(o.log_softmax(-1) * weights).gather(1, y[:, None]).mean()\nloss.backward()",
    "penalty": "loss = o.logsumexp(-1).mean() + sum((p ** 2).sum() for p in model.parameters())\n"
    "loss.backward()",
    "tied": "h = o.softmax(-1) @ model.words.weight\nloss = (h @ model.words.weight.T).square().mean()\n"
    "loss.backward()",
    "two": "a, b = F.cross_entropy(o, y), o.abs().mean()\n(a + 0.1 * b).backward()",
    "function": "loss = Doubled.apply(o).mean()\nloss.backward()",
    "module": "loss = Focal()(o, y)\nloss.backward()",
    "in_place": "t = torch.zeros(len(y), V)\nt.scatter_(1, y[:, None], 1.0)\nt[:, 0] = 0.5\n"
    "loss = -(t * o.log_softmax(-1)).sum(-1).mean()\nloss.backward()",
    "unbound": "a, b = o.view(2, -1, V)\nloss = (a - b).square().mean()\nloss.backward()",
    "metrics": "loss = F.cross_entropy(o, y)\nwith torch.no_grad():\n    p = o.softmax(-1)\n"
    "    hits = (p.argmax(-1) == y).float().mean()\nloss.backward()",
    "vector": "losses = o.log_softmax(-1).gather(1, y[:, None])\nlosses.backward(torch.ones_like(losses))",
    "autograd": "loss = o.square().mean()\ntorch.autograd.backward(loss)",
    "gradients": "loss = o.square().mean()\nps = list(model.parameters())\n"
    "for p, g in zip(ps, torch.autograd.grad(loss, ps)): p.grad = g",
    "autocast": "with torch.autocast('cpu', torch.bfloat16):\n    h = o @ o.T\n"
    "loss = h.float().square().mean()\nloss.backward()",
    "gradient_hook": "o.retain_grad()\nloss = o.logsumexp(-1).mean()\nloss.backward()",
}


def program(loss: str, shape: Any = (ROWS,), wrap: str = "") -> str:
    return PROGRAM.format(loss=textwrap.indent(loss, " " * 8), shape=shape, wrap=wrap)


Fitted = Any


def real_peak(text: str) -> int:
    """Return the peak of the bytes that a real run asks for."""
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(text, namespace)
    with mempool.torch.install(device="cpu") as pool:
        list(namespace["train"](3))
        return int(pool.report().to_dict()["requested_peak_bytes"])


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_peak_with_a_written_loss_equals_a_real_run(fitted: Fitted, loss: str) -> None:
    """On the CPU, within one per cent, and without a caveat."""
    text = program(loss)
    answer = fitted(text, "--device", "cpu")
    assert answer["caveats"] == []
    assert answer["peak_bytes"] == pytest.approx(real_peak(text), rel=0.01)
    assert "sum of its floating outputs" not in " ".join(answer["warnings"])


WRAPPED = {
    "mapping": ("lambda o: {'logits': o, 'more': None}", "o['logits'].logsumexp(-1).mean().backward()"),
    "object": ("lambda o: types.SimpleNamespace(logits=o)", "o.logits.logsumexp(-1).mean().backward()"),
    "tuple": ("lambda o: (o, [o.sum()])", "(o[0].logsumexp(-1).mean() + o[1][0]).backward()"),
    "loss within": (
        "lambda o: {'loss': o.square().mean(), 'o': o}",
        "(o['loss'] + o['o'].exp().mean()).backward()",
    ),
}


@pytest.mark.parametrize(("wrap", "loss"), WRAPPED.values(), ids=WRAPPED)
def test_output_in_a_structure_is_found(fitted: Fitted, wrap: str, loss: str) -> None:
    text = program(loss, wrap=wrap)
    answer = fitted(text, "--device", "cpu")
    assert answer["caveats"] == []
    assert answer["peak_bytes"] == pytest.approx(real_peak(text), rel=0.01)


@pytest.mark.parametrize(
    ("loss", "own"),
    [("(o['loss'] / 2 + 1).backward()", True), ("(o['loss'] + o['o'].exp().mean()).backward()", False)],
)
def test_loss_of_the_model_itself_is_left_to_the_model(tmp_path: Path, loss: str, own: bool) -> None:
    """So that remedies which change this loss are tried."""
    path = tmp_path / "train.py"
    path.write_text(program(loss, wrap="lambda o: {'loss': o.square().mean(), 'o': o}"))
    with fake_execution():
        target = find_target(parse_target(str(path)), Sizes(main=True))
    assert ("loss" not in target.attributes) is own


def test_loss_behind_an_autocast_forward_is_in_full_precision(fitted: Fitted) -> None:
    text = program("loss = o.exp().logsumexp(-1).mean()\nloss.backward()")
    lower = text.replace("o = model(x)", "with torch.autocast('cpu', torch.bfloat16): o = model(x)")
    for one in (lower, lower.replace("o.exp()", "o.float().exp()")):
        assert fitted(one, "--device", "cpu")["peak_bytes"] == pytest.approx(real_peak(one), rel=0.01)


def test_variables_hold_parts_of_the_loss_in_the_backward(fitted: Fitted) -> None:
    """Until the next step has replaced it; a part that no variable holds goes when it was read."""
    held = program("p = o * 2\nq = p.argmax(-1)\nloss = (o + 1).logsumexp(-1).mean()\nloss.backward()")
    free = held.replace("p = o * 2", "").replace("p.argmax", "(o * 2).argmax")
    peaks = [fitted(text, "--device", "cpu")["peak_bytes"] for text in (held, free)]
    assert peaks[0] - peaks[1] == 4 * ROWS * WORDS
    assert peaks == [pytest.approx(real_peak(text), rel=0.01) for text in (held, free)]


#: Lines of a loop that use sizes of the batch as numbers, by name; samples have 4 words.
SIZED = {
    "flat": "loss = F.cross_entropy(o.view(-1, V), y.view(-1))\nloss.backward()",
    "product": "B, T, _ = o.shape\nloss = F.nll_loss(o.view(B * T, V).log_softmax(-1), y.reshape(B * T))\n"
    "loss.backward()",
    "expanded": "m = torch.zeros(1, 1, V).expand(o.size(0), o.size(1), V)\n(o * m).sum().backward()",
    "made": "t = torch.full((o.shape[0], o.shape[1], V), 0.1)\n((o - t) ** 2).mean().backward()",
    "grid": "p = o.log_softmax(-1)\nb, t = torch.arange(len(y))[:, None], torch.arange(4)[None]\n"
    "loss = -p[b, t, y].mean()\nloss.backward()",
    "halves": "h = len(o) // 2\na, b = o[:len(o) // 2], o[h:]\n(a - b).square().mean().backward()",
    "chunks": "a, b = o.chunk(2)\n(a * b).mean().backward()",
    "mask": "m = (y != 3).float()\np = F.cross_entropy(o.transpose(1, 2), y, reduction='none')\n"
    "((p * m).sum() / m.sum()).backward()",
    "shifted": "a, b = o[:, :-1], y[:, 1:]\nF.cross_entropy(a.reshape(-1, V), b.reshape(-1)).backward()",
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_other_batch_equals_the_program_with_this_batch(fitted: Fitted, loss: str) -> None:
    other = fitted(program(loss, (2 * ROWS,)), "--batch", "24")
    assert other["peak_bytes"] == fitted(program(loss, (24,)))["peak_bytes"]


@pytest.mark.parametrize("loss", [SIZED[name] for name in SIZED if name != "halves"])
def test_literal_sizes_follow_the_batch(fitted: Fitted, loss: str) -> None:
    wanted = [fitted(program(loss, (batch, 4)))["peak_bytes"] for batch in (6, 10, 32)]
    for batch, peak_bytes in zip((6, 10, 32), wanted, strict=True):
        assert fitted(program(loss, (10, 4)), "--batch", str(batch))["peak_bytes"] == peak_bytes


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (SIZED["halves"], "__getitem__ at train.py:{next} (samples None to 5)"),
        ("o[:5].square().mean().backward()", "__getitem__ at train.py:{line} (samples None to 5)"),
        (
            "sum(o[k].square().mean() for k in range(len(o))).backward()",
            "at train.py:{line} (sample 1 alone)",
        ),
        (
            "sum(a.square().mean() for a in o).backward()",
            "unbind at train.py:{line} (20 tensors instead of 10)",
        ),
        ("t = torch.zeros(10 * 7, 7)\n(o.flatten()[:, None] + t[0]).mean().backward()", ""),
        ("(o + torch.zeros(5 * 2 * 4).view(10, 4, 1)).mean().backward()", "add at train.py:{line}"),
    ],
)
def test_unknown_numbers_for_another_batch_are_named(
    fitted: Fitted, capsys: pytest.CaptureFixture[str], loss: str, named: str
) -> None:
    """The program's own batch is estimated nevertheless, without a largest batch."""
    text = program(loss, (10, 4))
    line = text[: text.index(loss[:15])].count("\n") + 1
    named = named.format(line=line, next=line + 1)
    alone = fitted(text, "--limit", "24GiB", "--no-remedies")
    assert (alone["fits"], alone["caveats"]) == (True, [])
    if not named:
        assert alone["largest_batch"] > 10
        return
    assert alone["largest_batch"] is None
    assert any(named in text for text in alone["warnings"])
    capsys.readouterr()
    assert call(["fit", "train.py", "--main", "--batch", "20"]) == 2
    assert named in capsys.readouterr().err


def test_ambiguous_dimension_sizes_are_refused(fitted: Fitted, capsys: pytest.CaptureFixture[str]) -> None:
    text = program("t = torch.zeros(V, V)\n((o - t) ** 2).mean().backward()", (WORDS,))
    assert fitted(text)["caveats"] == []
    assert call(["fit", "train.py", "--main", "--batch", "20"]) == 2
    assert "zeros at train.py:40 (1000 is the size of more than one dimension)" in capsys.readouterr().err


WITHOUT = "peak without the loss"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("", ""),
        (
            "with torch.no_grad(): p = o.exp()\np.requires_grad_()\np.sum().backward()",
            "by values only: no gradient",
        ),
        ("torch.ones(3, requires_grad=True).sum().backward()", "does not depend on the output of the model"),
        ("for p in model.parameters(): p.grad = torch.zeros_like(p)", "was not seen: no backward"),
        (
            "g, = torch.autograd.grad(o.sum(), model.words.weight, create_graph=True)\n"
            "(o.mean() + g.square().mean()).backward()",
            "cannot be computed again: grad at train.py:",
        ),
        ("Unseen(o).sum().backward()", "goes through MulBackward0, which"),
    ],
)
def test_verdict_names_the_missing_loss(
    fitted: Fitted, capsys: pytest.CaptureFixture[str], lines: str, reason: str
) -> None:
    unseen = "\ndef Unseen(o):\n    with torch._C.DisableTorchFunction():\n        return o * 2\n"
    text = program(lines if reason else "o.sum().backward()").replace("def ready", unseen + "def ready")
    answer = fitted(text, "--limit", "24GiB", "--no-remedies", code=1 if reason else 0)
    assert answer["fits"] is (None if reason else True)
    call(["fit", "train.py", "--main", "--limit", "24GiB", "--no-remedies"])
    verdict, second = capsys.readouterr().out.splitlines()[:2]
    if not reason:
        assert (answer["caveats"], verdict.startswith("fits in 24 GiB")) == ([], True)
        return
    [caveat] = answer["caveats"]
    assert caveat["label"] == WITHOUT
    assert reason in caveat["reason"]
    assert caveat["reason"].endswith("; the sum of the output stands for it, --loss names another")
    assert not any("no loss was given" in text for text in answer["warnings"])
    assert verdict.startswith("not known whether it fits in 24 GiB: ")
    assert verdict.endswith(f"({WITHOUT})")
    assert second == f"warning: {answer['warnings'][0]}" == f"warning: {WITHOUT}: {caveat['reason']}"


def test_remedies_of_a_step_without_loss_are_no_verdicts(
    fitted: Fitted, capsys: pytest.CaptureFixture[str]
) -> None:
    text = program("for p in model.parameters(): p.grad = torch.zeros_like(p)", (16 * ROWS,))
    on = ("--device", "cpu", "-a", "planned")
    asked = ("--limit", str(fitted(text, *on)["needed_bytes"] * 3 // 4), *on)
    answer = fitted(text, *asked, code=1)
    assert answer["fits"] is False
    assert answer["remedies"]
    assert not any(remedy["fits"] for remedy in answer["remedies"])
    assert answer["cheapest_remedy"]["fits"] is None
    call(["fit", "train.py", "--main", *asked])
    assert "it fits" not in capsys.readouterr().out


def test_named_loss_replaces_an_unseen_loss(fitted: Fitted) -> None:
    text = program("for p in model.parameters(): p.grad = torch.zeros_like(p)")
    assert fitted(text, code=0)["caveats"]
    named = fitted(text, "--loss", "cross-entropy")
    assert named["caveats"] == []
    own = fitted(program("F.cross_entropy(o, torch.zeros(len(o), dtype=torch.long)).backward()"))
    assert named["peak_bytes"] == pytest.approx(own["peak_bytes"], rel=0.01)
    assert fitted(text, "--mode", "inference")["caveats"] == []
