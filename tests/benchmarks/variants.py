"""Hit rates of training with iteration variants in random order.

    python tests/benchmarks/variants.py [--only PROGRAM ...] [--steps 400] [--json FILE]

Each program runs in three separate processes: with each variant planned as if the variant followed itself
("apart"), with joint plans for all variants, and with the defaults, where many variants that differ in sizes
only have one envelope plan. *Hits* are the hit rate of the last 50 steps; *dynamic* is the fraction of
allocations that the plan leaves to the fallback. *Arena* and *peak* are in MB: the pool's arena, and the
largest load of one variant. Each step ends with a short pause, which leaves time for the planner.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import own_process

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

LAST = 50
PAUSE_SECONDS = 0.02


def learned(optimizer: torch.optim.Optimizer, out: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Run one optimizer step and return the outputs, which the program keeps."""
    import torch

    loss = torch.nn.functional.cross_entropy(out.flatten(0, -2), right.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return out


def transformer(lengths: tuple[int, ...]) -> tuple[Callable[[], object], list[torch.optim.Optimizer]]:
    """Return steps with batches of random lengths, whose outputs live until the next step."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    body, head = torch.nn.TransformerEncoder(layer, 3), torch.nn.Linear(64, 2000)
    words = torch.nn.Embedding(2000, 64)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters(), *words.parameters()])

    def step() -> object:
        batch = torch.randint(2000, (8, random.choice(lengths)))
        out = head(body(words(batch)))
        return learned(optimizer, out, batch)

    return step, [optimizer]


def recurrent(lengths: tuple[int, ...]) -> tuple[Callable[[], object], list[torch.optim.Optimizer]]:
    """Return steps of an LSTM word by word, which allocates more often for longer batches."""
    import torch

    cell, head = torch.nn.LSTMCell(32, 64), torch.nn.Linear(64, 100)
    words = torch.nn.Embedding(100, 32)
    parameters = [*cell.parameters(), *head.parameters(), *words.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def step() -> object:
        batch = torch.randint(100, (16, random.choice(lengths)))
        state = torch.zeros(16, 64), torch.zeros(16, 64)
        outputs = []
        for word in batch.T:
            state = cell(words(word), state)
            outputs.append(head(state[0]))
        out = torch.stack(outputs, 1)
        return learned(optimizer, out, batch)

    return step, [optimizer]


def pictures(sizes: tuple[int, ...]) -> tuple[Callable[[], object], list[torch.optim.Optimizer]]:
    """Return steps with pictures of random sizes."""
    import torch

    layers: list[torch.nn.Module] = []
    for before, after in itertools.pairwise((3, 16, 32, 64)):
        layers += [
            torch.nn.Conv2d(before, after, 3, 2, 1),
            torch.nn.BatchNorm2d(after),
            torch.nn.ReLU(),
        ]
    body, head = torch.nn.Sequential(*layers), torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01, momentum=0.9)

    def step() -> object:
        size = random.choice(sizes)
        out = head(body(torch.randn(8, 3, size, size)).mean((2, 3)))
        return learned(optimizer, out, torch.randint(10, (8,)))

    return step, [optimizer]


def gathered() -> tuple[Callable[[], object], list[torch.optim.Optimizer]]:
    """Return steps with a random number of accumulated batches."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> object:
        out = model(torch.randn(32, 64))
        out.square().mean().backward()
        if random.random() < 0.3:
            optimizer.step()
            optimizer.zero_grad()
        return out

    return step, [optimizer]


def adversarial() -> tuple[Callable[[], object], list[torch.optim.Optimizer]]:
    """Return steps of a discriminator, one to three times, then of the generator."""
    import torch

    generator = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 784))
    discriminator = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    first, second = (torch.optim.Adam(model.parameters()) for model in (generator, discriminator))
    judge = torch.nn.functional.binary_cross_entropy_with_logits

    def step() -> object:
        for _ in range(random.choice((1, 2, 3))):
            second.zero_grad()
            made = generator(torch.randn(64, 16)).detach()
            loss = judge(discriminator(torch.randn(64, 784)), torch.ones(64, 1))
            (loss + judge(discriminator(made), torch.zeros(64, 1))).backward()
            second.step()
        first.zero_grad()
        made = generator(torch.randn(64, 16))
        judge(discriminator(made), torch.ones(64, 1)).backward()
        first.step()
        return made

    return step, [first, second]


PROGRAMS: dict[str, Callable[[], tuple[Callable[[], object], list[Any]]]] = {
    "transformer, 4 lengths": functools.partial(transformer, (24, 32, 40, 56)),
    "transformer, 12 lengths": functools.partial(transformer, tuple(range(16, 64, 4))),
    "transformer, 100 lengths": functools.partial(transformer, tuple(range(28, 128))),
    "LSTM, 4 lengths": functools.partial(recurrent, (10, 14, 17, 22)),
    "LSTM, 12 lengths": functools.partial(recurrent, tuple(range(8, 20))),
    "pictures, 5 sizes": functools.partial(pictures, (32, 40, 48, 56, 64)),
    "pictures, 40 sizes": functools.partial(pictures, tuple(range(32, 72))),
    "gathered gradients": gathered,
    "GAN": adversarial,
}


WAYS = ("apart", "together", "as it is")


def measured(name: str, steps: int, way: str) -> dict[str, Any]:
    """Run one program in this process and return the pool's report."""
    import torch

    import mempool.torch
    from mempool.planning.options import OPTIONS
    from mempool.reporting.outcomes import missed
    from traces.iterations import envelope

    if way == "apart":
        vars(OPTIONS)["joint_collisions"] = sys.maxsize
    if way != "as it is":
        envelope.FEW_KINDS = sys.maxsize
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    with mempool.torch.install(device="cpu") as pool:
        step, _ = PROGRAMS[name]()
        kept, before = None, {}
        for number in range(steps):
            if number == steps - LAST:
                before = dict(pool.client.stats()["outcomes"])
            with pool.iteration():
                kept = step()
            time.sleep(PAUSE_SECONDS)
        del kept
        now = pool.client.stats()["outcomes"]
        new = {kind: count - before[kind] for kind, count in now.items()}
        known = list(pool.planner.learner.registry)
        return {
            "program": name,
            "way": way,
            "plans": len(known),
            "hits": new["hit"] / max(new["hit"] + missed(new) + new["unplanned"], 1),
            "dynamic": new["dynamic"] / max(sum(new.values()) - new["out_of_iteration"], 1),
            "arena_bytes": pool.report().to_dict()["arena_bytes"],
            "peak_bytes": max((planned.peak_load_bytes for planned in known), default=0),
        }


def main() -> None:
    """Run the chosen programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(measured(*chosen.one)))
        return
    rows = []
    for name in chosen.only:
        for way in WAYS:
            row = own_process.run_separately(__file__, name, chosen.steps, way)
            rows.append(row)
            print(
                f"{row['program']:24} {way:9} {row['plans']:3} plans"
                f" {row['hits']:8.2%} hits {row['dynamic']:6.1%} dynamic"
                f" arena {row['arena_bytes'] / 1e6:7.2f} peak {row['peak_bytes'] / 1e6:7.2f}",
                flush=True,
            )
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
