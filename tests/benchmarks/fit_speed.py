"""Cost of an estimate: processor seconds after imports, and resident memory.

    python tests/benchmarks/fit_speed.py [--rounds 3]

Each model in a process of its own, with AdamW and the default allocators: the first answer of the process and
the best of some more. Needs transformers, and no weights.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

SETUPS = {
    "ResNet-50, 32 pictures of 224 x 224": ("ResNetForImageClassification", "ResNetConfig", {}, 32, None),
    "GPT-2 small, 8 x 1024 words": ("GPT2LMHeadModel", "GPT2Config", {}, 8, 1024),
    "Llama, 7 billion parameters, 1 x 2048 words": ("LlamaForCausalLM", "LlamaConfig", {}, 1, 2048),
}


def one(name: str, rounds: int) -> None:
    """Print seconds of the first answer and of the best later one, resident MiB, and the peak load in GiB."""
    import torch
    import transformers

    import mempool.torch
    from mempool.torch import estimate  # noqa: F401 - imports are not counted

    model, config, settings, batch, length = SETUPS[name]
    made: Any = getattr(transformers, model), getattr(transformers, config)(**settings)
    inputs = (
        {"pixel_values": torch.empty(batch, 3, 224, 224, device="meta")}
        if length is None
        else {"input_ids": torch.zeros(batch, length, dtype=torch.long)}
    )
    inputs["labels"] = torch.zeros(batch, dtype=torch.long) if length is None else inputs["input_ids"]
    seconds = []
    for _ in range(1 + rounds):
        begin = time.process_time()
        fit = mempool.torch.fit(lambda: made[0](made[1]), inputs)
        seconds.append(time.process_time() - begin)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(seconds[0], min(seconds[1:]), resident, fit.peak_bytes / 2**30)


def main() -> None:
    """Print a table, the median of some processes for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.one, given.rounds)
        return
    print(f"{'model':46} {'first s':>8} {'later s':>8} {'MiB':>7} {'peak GiB':>9}")
    for name in SETUPS:
        command = [sys.executable, __file__, "--one", name, "--rounds", str(given.rounds)]
        said = [
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for _ in range(given.rounds)
        ]
        first, later, resident, peak = (
            statistics.median(column) for column in zip(*(map(float, s.split()) for s in said), strict=True)
        )
        print(f"{name:46} {first:8.2f} {later:8.2f} {resident:7.0f} {peak:9.2f}")


if __name__ == "__main__":
    main()
