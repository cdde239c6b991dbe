"""The convolutional networks of the published figures, in plain PyTorch."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

VGG = {
    16: (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0),
    19: (64, 64, 0, 128, 128, 0, *[256] * 4, 0, *[512] * 4, 0, *[512] * 4, 0),
}
RESNET = {
    18: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}


def vgg(depth: int, *, cifar: bool = True, inplace: bool = True, norm: bool = True) -> nn.Module:
    """Return a VGG (Simonyan and Zisserman 2015).

    At CIFAR's size with batch norm and one final linear layer.
    """
    layers: list[nn.Module] = []
    before = 3
    for width in VGG[depth]:
        if width == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers.append(nn.Conv2d(before, width, 3, padding=1))
        if norm:
            layers.append(nn.BatchNorm2d(width))
        layers.append(nn.ReLU(inplace=inplace))
        before = width
    if cifar:
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))
    relu = partial(nn.ReLU, inplace=inplace)
    head = [nn.Linear(512 * 49, 4096), relu(), nn.Linear(4096, 4096), relu(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, nn.Flatten(), *head)


class _Block(nn.Module):
    """A residual block, basic or with a bottleneck (He et al. 2016)."""

    def __init__(self, before: int, width: int, stride: int, *, deep: bool, inplace: bool) -> None:
        super().__init__()
        after = width * (4 if deep else 1)
        sizes = [(before, width, 1, 1), (width, width, 3, stride), (width, after, 1, 1)]
        if not deep:
            sizes = [(before, width, 3, stride), (width, width, 3, 1)]
        parts: list[nn.Module] = []
        for a, b, kernel, step in sizes:
            parts += [
                nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False),
                nn.BatchNorm2d(b),
                nn.ReLU(inplace),
            ]
        self.body = nn.Sequential(*parts[:-1])
        self.relu = nn.ReLU(inplace)
        self.inplace = inplace
        self.short: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        short = self.short(x)
        y = self.body(x)
        return self.relu(y.add_(short) if self.inplace else y + short)


def resnet(depth: int, *, cifar: bool = True, inplace: bool = True, classes: int = 10) -> nn.Module:
    """Return a ResNet (He et al. 2016); at CIFAR's size with a first layer of 3x3 and no pooling."""
    deep = depth >= 50
    stem: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False)]
    if not cifar:
        stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False)]
    stem += [nn.BatchNorm2d(64), nn.ReLU(inplace)]
    if not cifar:
        stem.append(nn.MaxPool2d(3, 2, 1))
    blocks: list[nn.Module] = []
    before = 64
    for stage, count in enumerate(RESNET[depth]):
        width = 64 << stage
        for k in range(count):
            stride = 2 if k == 0 and stage else 1
            blocks.append(_Block(before, width, stride, deep=deep, inplace=inplace))
            before = width * (4 if deep else 1)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
