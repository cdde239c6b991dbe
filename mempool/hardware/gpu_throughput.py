"""Peak rates of GPUs by name, and their links to the host, for estimating times without a run."""

from __future__ import annotations

from dataclasses import dataclass

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


# GB/s, TFLOPS in float32, TFLOPS in 16 bits, and the generation of PCI Express, or another link's name.
# Sources: the makers' data sheets and white papers of the architectures, at boost clock; for cards with
# several forms the fastest, for laptops at the highest power. GeForce sums in 32 bits at half the rate of
# sums in 16. Links with 8 lanes have the generation before, whose 16 lanes are as fast.
_RATES: dict[str, tuple[float, float, float, int | str]] = {
    "GTX 1080 Ti": (484, 11.3, 11.3, 3),  # 16 bits are slower than 32
    "RTX 2060": (336, 6.5, 25.8, 3),
    "RTX 2060 SUPER": (448, 7.2, 28.7, 3),
    "RTX 2070": (448, 7.5, 29.9, 3),
    "RTX 2070 SUPER": (448, 9.1, 36.3, 3),
    "RTX 2080": (448, 10.1, 40.3, 3),
    "RTX 2080 SUPER": (496, 11.2, 44.6, 3),
    "RTX 2080 Ti": (616, 13.4, 53.8, 3),
    "TITAN RTX": (672, 16.3, 130, 3),
    "RTX 3050": (224, 9.1, 18.2, 3),
    "RTX 3050 Laptop": (192, 7.1, 14.2, 3),
    "RTX 3050 Ti Laptop": (192, 8.7, 17.4, 3),
    "RTX 3060 Laptop": (336, 13.1, 26.1, 3),
    "RTX 3060 Ti": (448, 16.2, 32.4, 4),
    "RTX 3060": (360, 12.7, 25.5, 4),
    "RTX 3070": (448, 20.3, 40.6, 4),
    "RTX 3070 Laptop": (448, 16.6, 33.2, 3),
    "RTX 3070 Ti": (608, 21.7, 43.5, 4),
    "RTX 3070 Ti Laptop": (448, 17.5, 35, 3),
    "RTX 3080 Laptop 8GB": (448, 21, 42, 3),
    "RTX 3080 Laptop 16GB": (448, 21, 42, 3),
    "RTX 3080 Ti": (912, 34.1, 68.2, 4),
    "RTX 3080 Ti Laptop": (512, 23.6, 47.2, 3),
    "RTX 3080 10GB": (760, 29.8, 59.5, 4),
    "RTX 3080 12GB": (912, 30.6, 61.3, 4),
    "RTX 3090": (936, 35.6, 71, 4),
    "RTX 3090 Ti": (1008, 40, 80, 4),
    "RTX 4050 Laptop": (192, 12.1, 24.3, 3),
    "RTX 4060 Laptop": (256, 14.6, 29.1, 3),
    "RTX 4060": (272, 15.1, 30.2, 3),
    "RTX 4060 Ti 8GB": (288, 22.1, 44.1, 3),
    "RTX 4060 Ti 16GB": (288, 22.1, 44.1, 3),
    "RTX 4070": (504, 29.1, 58.3, 4),
    "RTX 4070 Laptop": (256, 20, 40.1, 3),
    "RTX 4070 SUPER": (504, 35.5, 71, 4),
    "RTX 4070 Ti": (504, 40.1, 80.2, 4),
    "RTX 4070 Ti SUPER": (672, 44.1, 88.2, 4),
    "RTX 4080": (717, 48.7, 97.5, 4),
    "RTX 4080 Laptop": (432, 33.9, 67.7, 4),
    "RTX 4080 SUPER": (736, 52.2, 104.4, 4),
    "RTX 4090 Laptop": (576, 39.7, 79.4, 4),
    "RTX 4090": (1008, 82.6, 165.2, 4),
    "RTX 5060 Ti 16GB": (448, 23.7, 47.4, 4),
    "RTX 5070": (672, 30.9, 61.7, 5),
    "RTX 5070 Ti": (896, 43.9, 87.9, 5),
    "RTX 5080": (960, 56.3, 112.6, 5),
    "RTX 5090": (1792, 104.8, 209.5, 5),
    "RTX A4000": (448, 19.2, 76.7, 4),
    "RTX A5000": (768, 27.8, 111.1, 4),
    "RTX A6000": (768, 38.7, 154.8, 4),
    "RTX 6000 Ada": (960, 91.1, 364.2, 4),
    "RTX PRO 6000": (1792, 126, 503.8, 5),
    "P100": (732, 10.6, 21.2, 3),
    "V100 16GB": (900, 15.7, 125, 3),
    "V100 32GB": (900, 15.7, 125, 3),
    "T4": (320, 8.1, 65, 3),
    "A10": (600, 31.2, 125, 4),
    "A10G": (600, 31.5, 70, 4),
    "A16": (200, 4.5, 17.9, 3),
    "A30": (933, 10.3, 165, 4),
    "A40": (696, 37.4, 149.7, 4),
    "L4": (300, 30.3, 121, 4),
    "L40": (864, 90.5, 181, 4),
    "L40S": (864, 91.6, 362, 4),
    "A100 40GB": (1555, 19.5, 312, 4),
    "A100 80GB": (2039, 19.5, 312, 4),
    "H20": (4000, 44, 148, 5),
    "H100": (3350, 67, 989, 5),
    "H100 NVL": (3900, 60, 835, 5),
    "H200": (4800, 67, 989, 5),
    "GH200": (4000, 67, 989, "nvlink-c2c"),
    "B200": (8000, 80, 2250, 5),
    "GB200": (8000, 80, 2500, "nvlink-c2c"),
    "B300": (8000, 75, 2250, 5),
    "GB300": (8000, 80, 2500, "nvlink-c2c"),
    "MI300X": (5300, 163.4, 1307, 5),
}
#: Least compute capability at which float32 may be rounded to TF32, at half the rate of 16 bits.
_TF32 = (8, 0)


def rates_of(name: str = DEFAULT, capability: tuple[int, int] = _TF32) -> Rates:
    """Return the rates of a card by name in `mempool.hardware.gpu_memory.CARDS`."""
    bandwidth, single, half, link = _RATES[name]
    convolutions = max(half / 2, single) if capability >= _TF32 else single
    return Rates(
        name,
        bandwidth * 1e9,
        single * 1e12,
        convolutions * 1e12,
        half * 1e12,
        f"pcie{link}" if isinstance(link, int) else link,
    )
