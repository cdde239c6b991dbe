"""Peak rates of GPUs by name, and their links to the host, from `gpus.csv`: times are estimated by them.

Sources: the makers' data sheets and white papers of the architectures, at boost clock; for cards with several
forms the fastest, for laptops at the highest power. GeForce sums in 32 bits at half the rate of sums in 16.
Links with 8 lanes have the generation before, whose 16 lanes are as fast.
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
        convolutions: float32 operations per second in convolutions and recurrent layers, which PyTorch lets
            round to TF32 where the card can.
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


#: Least compute capability at which float32 may be rounded to TF32, at half the rate of 16 bits.
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
