"""Conv4 on a CPU: all tasks in one go, with the tasks folded into channels and the channels last.

[tasks, n, C, H, W] becomes [n, tasks*C, H, W], in the layout that is fastest here for convolutions, batch norm and
pooling alike. The bias of a convolution before batch norm changes nothing, so it is not applied, and its gradient is
zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from gradshare.engine.conv4.pooled_norm import pooled_norm
from gradshare.engine.conv4.stem import Images, first_block
from gradshare.engine.convolution import Geometry, conv
from gradshare.engine.networks import Conv4
from gradshare.engine.vmapped import VmapBackend
from gradshare.method.rules import Weights


class CpuConv4(VmapBackend):
    """Conv4 by the functions below where they fit its inputs; any other module, and other inputs, as in general."""

    def start(self, params: Mapping[str, Tensor]) -> Weights:
        weights = super().start(params)
        if type(self.module) is not Conv4:
            return weights
        return {name: in_memory_order(weight) for name, weight in weights.items()}

    def inputs(self, x: Tensor) -> Tensor | Images:
        return Images(x) if fits(self.module, x) else x

    def forward(self, fast: Weights, shared: Mapping[str, Tensor], x: Tensor | Images, inner: bool) -> Tensor:
        if isinstance(x, Tensor):
            return super().forward(fast, shared, x, inner)
        assert isinstance(self.module, Conv4)
        same = {**dict(self.module.named_parameters()), **shared}  # a weight that is not trained is in neither
        if has_zero_gain({**same, **fast}):
            return super().forward(fast, shared, x.x, inner)
        weights = {name: weight.expand(len(x.x), *weight.shape) for name, weight in same.items() if name not in fast}
        return forward(self.module, {**weights, **fast}, x)


def fits(module: nn.Module, x: Tensor) -> bool:
    """Whether the module is Conv4, as it is and nothing else, with images for it on a CPU."""
    if not is_plain(module) or not x.is_cpu:
        return False
    return x.shape[2:] == module.image and x.dtype == module.head.weight.dtype


def is_plain(module: nn.Module) -> TypeGuard[Conv4]:
    """Whether the module is Conv4, as it is and nothing else: no hooks, no layer changed or put in another's place."""
    if type(module) is not Conv4 or module.SLOPE < 0 or any(_is_changed(layer) for layer in module.modules()):
        return False
    return all(_is_usual(*layers) for layers in zip(module.convs, module.norms, strict=True)) and (
        type(module.head) is nn.Linear and module.head.bias is not None
    )


def _is_changed(layer: nn.Module) -> bool:
    if nn.modules.module._has_any_global_hook():
        return True
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks) or "forward" in vars(layer)


def _is_usual(conv: nn.Module, norm: nn.Module) -> bool:
    if type(conv) is not nn.Conv2d or type(norm) is not nn.BatchNorm2d:
        return False
    shape = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)
    return shape == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros") and norm.affine and conv.bias is not None


def has_zero_gain(weights: Mapping[str, Tensor]) -> bool:
    """Whether a channel is constant after batch norm: then it is a convention which element of a window is largest."""
    return any((w == 0).any() for name, w in weights.items() if name.startswith("norms") and name.endswith("weight"))


def in_memory_order(w: Tensor) -> Tensor:
    """The same weight; filters [O, C, 3, 3] in the memory order that convolutions want, and give their gradients in."""
    return w.contiguous(memory_format=torch.channels_last) if w.dim() == 4 and w.is_cpu else w


def forward(module: Conv4, weights: Mapping[str, Tensor], images: Images) -> Tensor:  # [tasks, n, ways]
    """Run Conv4 on each task's images with that task's weights, [tasks, *shape] by their names in the module."""
    tasks = len(images.x)
    geometry = Geometry([1, 1], [1, 1], [1, 1], False, [0, 0], tasks)
    x = images.folded
    for layer, norm in enumerate(module.norms):
        assert isinstance(norm, nn.BatchNorm2d)
        filters = weights[f"convs.{layer}.weight"].flatten(0, 1)
        gain, bias = (weights[f"norms.{layer}.{part}"].flatten() for part in ("weight", "bias"))
        if (gain < 0).any():  # pooling comes before the gain, which must not turn its order around
            sign = torch.where(gain < 0, -1.0, 1.0).to(gain.dtype)
            filters, gain = filters * sign.view(-1, 1, 1, 1), gain * sign
        filters = filters.contiguous(memory_format=torch.channels_last)
        if layer == 0 and not x.requires_grad:
            x = first_block(images, filters, gain, bias, geometry, norm.eps, module.SLOPE)
        else:
            x = pooled_norm(conv(x, filters, None, geometry), gain, bias, norm.eps, module.SLOPE)
    n, _, height, width = x.shape
    features = x.reshape(n, tasks, -1, height, width).transpose(0, 1).flatten(2)
    logits = torch.baddbmm(weights["head.bias"].unsqueeze(1), features, weights["head.weight"].mT)
    return _Beside.apply(logits, *(weights[f"convs.{layer}.bias"] for layer in range(len(module.convs))))


class _Beside(torch.autograd.Function):
    """The first argument; the others change nothing and get a gradient of zero, as in the module's own graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [other.shape for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        return g, *(g.new_zeros(shape) for shape in ctx.shapes)
