"""Peak rates of GPUs by name, and their links to the host, from `gpus.csv`, for estimates of times.

Sources: the makers' data sheets and white papers of the architectures, at boost clock; the fastest of several
forms of a card, and laptops at the highest power. GeForce cards sum in 32 bits at half the rate of 16 bits. A
link of 8 lanes is given as 16 lanes of the previous generation, which are as fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from mempool.hardware.gpu_memory import GPUS

#: Card for estimates without a named card.
DEFAULT = "A100 80GB"


@dataclass(frozen=True)
class Rates:
    """Peak rates as published by the maker; programs reach less.

    Attributes:
        name: name of the card.
        bandwidth: memory bandwidth, in bytes per second.
        single: float32 operations per second.
        convolutions: float32 operations per second in convolutions and recurrent layers, for which PyTorch
            permits TF32 if the card supports it.
        half: operations per second of 16-bit products, summed in 32 bits, without sparsity.
        link: link to the host, a name in `solvers.swap.PRESETS`.
    """

    name: str
    bandwidth: float
    single: float
    convolutions: float
    half: float
    link: str

    def __str__(self) -> str:
        tera = [f"{rate / 1e12:g}" for rate in (self.single, self.convolutions, self.half)]
        return (
            f"{self.name}'s full rates ({self.bandwidth / 1e9:,.0f} GB/s; {tera[0]} TFLOPS in float32, "
            f"{tera[1]} in convolutions, {tera[2]} in 16 bits)"
        )


#: Least compute capability with TF32, which has half the rate of 16 bits.
_TF32 = (8, 0)


def rates_of(name: str = DEFAULT, capability: tuple[int, int] = _TF32) -> Rates:
    """Return the rates of a card by name in `mempool.hardware.gpu_memory.CARDS`."""
    row = GPUS[name]
    single, half = float(row["tflops_32_bit"]), float(row["tflops_16_bit"])
    convolutions = max(half / 2, single) if capability >= _TF32 else single
    return Rates(
        name,
        float(row["gb_per_second"]) * 1e9,
        single * 1e12,
        convolutions * 1e12,
        half * 1e12,
        row["link"],
    )
