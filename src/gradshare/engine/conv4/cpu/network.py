"""Conv4 on a CPU: all tasks at once, with the tasks folded into the channels and the channels last in memory.

[tasks, n, C, H, W] becomes [n, tasks*C, H, W]. In this layout convolution, batch norm and pooling are all fast. The
bias of a convolution before batch norm has no effect, so it is not added, and its gradient is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradshare.engine.conv4.cpu.first_block import Images, first_block
from gradshare.engine.conv4.cpu.pooled_norm import pooled_norm
from gradshare.engine.networks import CONV4_HEAD, Conv4, is_plain_conv4
from gradshare.engine.operations import Geometry, conv
from gradshare.engine.vmapped import Given, VmapBackend
from gradshare.errors import UserError
from gradshare.method.episodes import Inputs
from gradshare.method.rules import Weights


class CpuConv4(VmapBackend):
    """Conv4 by the functions below where they fit its inputs; any other module, and other inputs, as in general.

    Args:
        low: type of the operands of convolutions after the first block; None: that of the weights.
    """

    def __init__(
        self, module: nn.Module, adapted: tuple[str, ...], any_layout: bool = False, low: torch.dtype | None = None
    ) -> None:
        self.channels_last = type(module) is Conv4
        super().__init__(module, adapted, any_layout)
        self.low = low

    def inputs(self, x: Inputs, mask: Tensor | None = None) -> Given | Images:
        if isinstance(x, Tensor) and is_plain_conv4(self.module):
            check_images(self.module, x)
            if mask is None and fits(self.module, x):
                return Images(x)
        return super().inputs(x, mask)

    def forward(self, fast: Weights, shared: Mapping[str, Tensor], x: Given | Images, inner: bool) -> Tensor:
        if isinstance(x, Given):
            return super().forward(fast, shared, x, inner)
        assert isinstance(self.module, Conv4)
        same = {**dict(self.module.named_parameters()), **shared}  # a weight that is not trained is in neither
        own = self.by_name(fast)
        weights = {name: weight.expand(len(x.x), *weight.shape) for name, weight in same.items() if name not in own}
        weights |= own
        kept = x.kept if own.keys() <= CONV4_HEAD else None
        into = None if kept is None else kept.by(shared)
        if into is None:
            if has_zero_gain({**same, **own}):
                return super().forward(fast, shared, Given(x.x), inner)
            into = features(self.module, weights, x, self.low)
        if kept is not None:
            kept.into, kept.shared = into, shared
        return torch.baddbmm(weights["head.bias"].unsqueeze(1), into, weights["head.weight"].mT)


def check_images(module: Conv4, x: Tensor) -> None:  # [tasks, n, C, H, W]
    """Raise an error for images that the filters or the head cannot take."""
    channels, *size = module.image
    if x.dim() != 5 or x.shape[2] != channels or [side // 16 for side in x.shape[3:]] != [side // 16 for side in size]:
        raise UserError(f"the model takes images of {list(module.image)}, not {list(x.shape[2:])}: gs.Conv4(image=...)")


def fits(module: nn.Module, x: Tensor) -> bool:  # [tasks, n, C, H, W]
    """Whether this code can run the module on these images: an unchanged Conv4, images of its shape, on a CPU."""
    if not is_plain_conv4(module) or not x.is_cpu:
        return False
    return x.shape[2:] == module.image and x.dtype == module.head.weight.dtype


def has_zero_gain(weights: Mapping[str, Tensor]) -> bool:
    """Whether batch norm makes a channel constant: then all elements of a window are equal, and only the general path
    takes the same one of them as the module does."""
    return any((w == 0).any() for name, w in weights.items() if name.startswith("norms") and name.endswith("weight"))


def features(  # [tasks, n, F]
    module: Conv4, weights: Mapping[str, Tensor], images: Images, low: torch.dtype | None = None
) -> Tensor:
    """What comes into the head, by each task's weights, `{name in the module: [tasks, *shape]}`."""
    tasks = len(images.x)
    geometry = Geometry([1, 1], [1, 1], [1, 1], False, [0, 0], tasks)
    x = images.folded
    for layer, norm in enumerate(module.norms):
        assert isinstance(norm, nn.BatchNorm2d)
        filters = weights[f"convs.{layer}.weight"].movedim(2, -1).flatten(0, 1).movedim(-1, 1)  # channels last
        gain, bias = (weights[f"norms.{layer}.{part}"].flatten() for part in ("weight", "bias"))
        if (gain < 0).any():  # pooling comes before the gain, so the gain must not reverse the order of elements
            sign = torch.where(gain < 0, -1.0, 1.0).to(gain.dtype)
            filters, gain = filters * sign.view(-1, 1, 1, 1), gain * sign
        filters = filters.contiguous(memory_format=torch.channels_last)
        if layer == 0 and not x.requires_grad:
            x = first_block(images, filters, gain, bias, geometry, norm.eps, module.SLOPE)
        else:
            z = conv(x.to(low or x.dtype), filters.to(low or x.dtype), None, geometry).to(x.dtype)
            x = pooled_norm(z, gain, bias, norm.eps, module.SLOPE)
    n, _, height, width = x.shape
    into = x.reshape(n, tasks, -1, height, width).transpose(0, 1).flatten(2)
    return _WithUnused.apply(into, *(weights[f"convs.{layer}.bias"] for layer in range(len(module.convs))))


class _WithUnused(torch.autograd.Function):
    """Returns the first argument. The others get a gradient of zero, as the unused biases do in the module itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *unused: Tensor) -> Tensor:
        ctx.shapes = [other.shape for other in unused]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        return g, *(g.new_zeros(shape) for shape in ctx.shapes)
