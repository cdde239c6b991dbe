"""Small convolutional network with AdamW in PyTorch, as a user would write one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTHS = (32, 32, 64, 64, 128, 128)
BATCH, SIDE, CLASSES = 16, 32, 10
TITLE = f"a network of {len(WIDTHS)} convolutions with AdamW, batch {BATCH}"


class Network:
    """Convolutions with batch normalisation and two halvings of the resolution, and a linear layer."""

    def __init__(self, seed: int = 0, widths: tuple[int, ...] = WIDTHS) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(mode=True)
        layers: list[nn.Module] = []
        before = 3
        for number, width in enumerate(widths):
            layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if number in (1, 3) else []
            before = width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Train on one batch, float32[batch, 3, 32, 32] and int64[batch]; return the loss before the step."""
        self.optimizer.zero_grad()
        loss: Any = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    @property
    def parameters(self) -> list[Any]:
        """All parameters and statistics, as NumPy arrays."""
        return [tensor.numpy() for tensor in self.model.state_dict().values()]


class Data:
    """Ten classes of noisy images, made batch by batch."""

    def __init__(self, seed: int = 0) -> None:
        self._random = torch.Generator().manual_seed(seed + 1)
        self._centres = torch.randn(CLASSES, 3, SIDE, SIDE, generator=self._random)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the next images and labels."""
        labels = torch.randint(0, CLASSES, (BATCH,), generator=self._random)
        return self._centres[labels] + 3 * torch.randn(BATCH, 3, SIDE, SIDE, generator=self._random), labels


def warm_up() -> None:
    """Load and touch all memory of training as a baseline."""
    small, data = Network(widths=(4, 4)), Data()
    for _ in range(3):
        small.step(*data.batch())
