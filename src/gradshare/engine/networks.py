"""Networks: ordinary modules without any code for meta-learning."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gradshare.errors import UserError, check_whole, short_repr


class Conv4(nn.Module):
    """The paper's convolutional network with four blocks, the same as in the reference code of MAML++.

    A block is a 3x3 convolution with bias, batch norm, leaky ReLU (0.01) and 2x2 max pooling. A linear head follows.

    Args:
        ways: the number of classes of a task.
        filters: the number of filters in each convolution.
        image: channels, height and width of the images.

    Example:
        >>> model = Conv4(ways=5, filters=48, image=(3, 84, 84))
        >>> sum(weight.numel() for name, weight in model.named_parameters() if "norm" not in name)
        69701
    """

    SLOPE = 0.01  # slope of the leaky ReLU below zero

    def __init__(self, ways: int = 5, filters: int = 48, image: tuple[int, int, int] = (3, 84, 84)) -> None:
        super().__init__()
        if not isinstance(image, tuple | list) or len(image) != 3:
            raise UserError(f"image is {short_repr(image)}; it must be (channels, height, width)")
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
        """Draw Xavier-uniform weights and set biases to zero, as in the reference code."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.startswith("norms"):
                nn.init.ones_(parameter)
            else:
                nn.init.xavier_uniform_(parameter, generator=generator)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take running statistics where the weights come with some: those of `learner.module_for`."""
        for layer, norm in enumerate(self.norms):
            if f"{prefix}norms.{layer}.running_mean" in state_dict:
                start_statistics(norm, self.head.weight)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: Tensor) -> Tensor:  # [n, C, H, W] -> [n, ways]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            # The activation is increasing, so pooling first gives the same result with a quarter of the work.
            x = F.leaky_relu(F.max_pool2d(norm(conv(x)), 2), self.SLOPE)
        return self.head(x.flatten(1))


def start_statistics(norm: Any, like: Tensor) -> None:
    """Give a batch norm layer running statistics, 0 and 1 for now, of the type of a weight."""
    norm.track_running_stats = True
    norm.running_mean = torch.zeros(norm.num_features, dtype=like.dtype, device=like.device)
    norm.running_var = torch.ones_like(norm.running_mean)
    norm.num_batches_tracked = torch.tensor(1, device=like.device)  # the support set is one batch


def is_plain_conv4(module: nn.Module) -> TypeGuard[Conv4]:
    """Whether the module is an unchanged Conv4, without hooks and replaced layers, so that faster code can run it."""
    if type(module) is not Conv4 or module.SLOPE < 0 or any(_is_changed(layer) for layer in module.modules()):
        return False
    return all(_is_plain_block(*layers) for layers in zip(module.convs, module.norms, strict=True)) and (
        type(module.head) is nn.Linear and module.head.bias is not None
    )


def _is_changed(layer: nn.Module) -> bool:
    if nn.modules.module._has_any_global_hook():
        return True
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks) or "forward" in vars(layer)


def _is_plain_block(conv: nn.Module, norm: nn.Module) -> bool:
    if type(conv) is not nn.Conv2d or type(norm) is not nn.BatchNorm2d:
        return False
    options = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)
    return options == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros") and norm.affine and conv.bias is not None
