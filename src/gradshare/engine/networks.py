"""Backbones: ordinary modules that know nothing of meta-learning."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gradshare.errors import UserError, check_whole, shown


class Conv4(nn.Module):
    """The four-layer convolutional net of the paper, equal to the reference MAML++ code's.

    Four times [3x3 convolution with bias, batch norm, leaky ReLU 0.01, 2x2 max pool], then a linear head.

    Example:
        >>> model = Conv4(ways=5, filters=48, image=(3, 84, 84))
        >>> sum(weight.numel() for name, weight in model.named_parameters() if "norm" not in name)
        69701
    """

    SLOPE = 0.01  # of the leaky ReLU below zero

    def __init__(self, ways: int = 5, filters: int = 48, image: tuple[int, int, int] = (3, 84, 84)) -> None:
        super().__init__()
        if not isinstance(image, tuple | list) or len(image) != 3:
            raise UserError(f"image is {shown(image)}; it must be (channels, height, width)")
        channels, height, width = image
        sizes = {"ways": ways, "filters": filters, "channels": channels, "height": height, "width": width}
        for name, value in sizes.items():
            check_whole(name, value, 1)
        if min(height, width) < 16:
            raise UserError(
                f"Conv4 halves the image four times, so it needs at least 16x16 pixels, not {height}x{width}"
            )
        self.image = image
        inputs = [channels, filters, filters, filters]
        self.convs = nn.ModuleList(nn.Conv2d(size, filters, 3, padding=1) for size in inputs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(filters, track_running_stats=False) for _ in inputs)
        self.head = nn.Linear(filters * (height // 16) * (width // 16), ways)
        self.initialise()

    def initialise(self, generator: Generator | None = None) -> None:
        """Xavier-uniform weights and zero biases, as the reference."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.startswith("norms"):
                nn.init.ones_(parameter)
            else:
                nn.init.xavier_uniform_(parameter, generator=generator)

    def forward(self, x: Tensor) -> Tensor:  # [n, C, H, W] -> [n, ways]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            # The activation rises everywhere, so pooling first gives the same with a quarter of the work.
            x = F.leaky_relu(F.max_pool2d(norm(conv(x)), 2), self.SLOPE)
        return self.head(x.flatten(1))
