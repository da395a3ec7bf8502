"""Networks of the few-shot literature: ordinary modules without any code for meta-learning."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gradshare.errors import UserError, check_whole, short_repr


class _Network(nn.Module):
    """What our networks share: a linear head, initial weights by a generator, and weights with running statistics."""

    image: tuple[int, int, int]
    head: nn.Linear

    def _check(self, image: Any, halvings: int, **sizes: Any) -> tuple[int, int, int]:
        """Channels, height and width of an image that can be halved so often; a UserError for other sizes."""
        if not isinstance(image, tuple | list) or len(image) != 3:
            raise UserError(f"image is {short_repr(image)}; it must be (channels, height, width)")
        channels, height, width = image
        for name, value in (*sizes.items(), ("channels", channels), ("height", height), ("width", width)):
            check_whole(name, value, 1)
        least = 2**halvings
        if min(height, width) < least:
            raise UserError(
                f"{type(self).__name__} needs images of at least {least}x{least} pixels, not {height}x{width}"
            )
        return channels, height, width

    def initialise(self, generator: Generator | None = None) -> None:
        """Draw the initial weights: gains of one, biases of zero, and weights as `_draw` has them."""
        for layer in self.modules():
            for name, parameter in layer.named_parameters(recurse=False):
                if name == "bias":
                    nn.init.zeros_(parameter)
                elif isinstance(layer, nn.BatchNorm2d | nn.LayerNorm):
                    nn.init.ones_(parameter)
                else:
                    self._draw(layer, parameter, generator)

    def _draw(self, layer: nn.Module, weight: Tensor, generator: Generator | None) -> None:
        nn.init.xavier_uniform_(weight, generator=generator)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take running statistics where the weights come with some: those of `learner.module_for`."""
        for name, layer in self.named_modules():
            if isinstance(layer, nn.BatchNorm2d) and f"{prefix}{name}.running_mean" in state_dict:
                start_statistics(layer, self.head.weight)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Conv4(_Network):
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
        channels, height, width = self._check(image, 4, ways=ways, filters=filters)
        self.image = image
        inputs = [channels, filters, filters, filters]
        self.convs = nn.ModuleList(nn.Conv2d(size, filters, 3, padding=1) for size in inputs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(filters, track_running_stats=False) for _ in inputs)
        self.head = nn.Linear(filters * (height // 16) * (width // 16), ways)
        self.initialise()

    def forward(self, x: Tensor) -> Tensor:  # [n, C, H, W] -> [n, ways]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            # The activation is increasing, so pooling first gives the same result with a quarter of the work.
            x = F.leaky_relu(F.max_pool2d(norm(conv(x)), 2), self.SLOPE)
        return self.head(x.flatten(1))


class ResNet12(_Network):
    """The residual network of the few-shot literature with twelve convolutions (Oreshkin et al., 2018).

    A block has three 3x3 convolutions without bias, each with batch norm, and a 1x1 convolution with batch norm as its
    shortcut. A leaky ReLU (0.1) follows the first two and the sum; then 2x2 max pooling. After four blocks come the
    mean over all pixels and a linear head. There is no dropout. Widths, initial weights and the names of the layers are
    those of MetaOptNet's code (Lee et al., 2019), so that its state_dicts fit.

    Args:
        ways: the number of classes of a task.
        widths: the number of filters in each block; some papers have (64, 128, 256, 512).
        image: channels, height and width of the images.

    Example:
        >>> model = ResNet12(ways=5)
        >>> sum(weight.numel() for name, weight in model.named_parameters() if "head" not in name)
        12424320
    """

    SLOPE = 0.1  # slope of the leaky ReLU below zero

    def __init__(
        self,
        ways: int = 5,
        widths: tuple[int, int, int, int] = (64, 160, 320, 640),
        image: tuple[int, int, int] = (3, 84, 84),
    ) -> None:
        super().__init__()
        if not isinstance(widths, tuple | list) or len(widths) != 4:
            raise UserError(f"widths is {short_repr(widths)}; it must be the filters of four blocks")
        sizes = {f"widths[{block}]": width for block, width in enumerate(widths)}
        channels, *_ = self._check(image, 4, ways=ways, **sizes)
        self.image = image
        blocks = [nn.Sequential(_Residual(*sizes, self.SLOPE)) for sizes in pairwise((channels, *widths))]
        self.layer1, self.layer2, self.layer3, self.layer4 = blocks
        self.head = nn.Linear(widths[-1], ways)
        self.initialise()

    def _draw(self, layer: nn.Module, weight: Tensor, generator: Generator | None) -> None:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="leaky_relu", generator=generator)
        else:
            super()._draw(layer, weight, generator)

    def forward(self, x: Tensor) -> Tensor:  # [n, C, H, W] -> [n, ways]
        for block in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = block(x)
        return self.head(x.mean((2, 3)))


class _Residual(nn.Module):
    """A block of ResNet12."""

    def __init__(self, channels: int, width: int, slope: float) -> None:
        super().__init__()
        self.slope = slope
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, padding=1, bias=False), _norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), _norm(width)
        self.conv3, self.bn3 = nn.Conv2d(width, width, 3, padding=1, bias=False), _norm(width)
        self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, bias=False), _norm(width))

    def forward(self, x: Tensor) -> Tensor:  # [n, channels, H, W] -> [n, width, H/2, W/2]
        y = F.leaky_relu(self.bn1(self.conv1(x)), self.slope)
        y = F.leaky_relu(self.bn2(self.conv2(y)), self.slope)
        y = self.bn3(self.conv3(y)) + self.downsample(x)
        # The activation is increasing, so pooling first gives the same result with a quarter of the work.
        return F.leaky_relu(F.max_pool2d(y, 2), self.slope)


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, track_running_stats=False)


class ViT(_Network):
    """A small vision transformer (Dosovitskiy et al., 2021), without class token and without dropout.

    The image is cut into patches; a linear layer and a learned position make a vector of each. A block is attention and
    then a perceptron with GELU, each after layer norm and each added to its input. Layer norm, the mean over all
    patches and a linear head follow. There is no batch norm, so the inner loop adapts every weight.

    Args:
        ways: the number of classes of a task.
        image: channels, height and width of the images.
        patch: pixels of a patch's side, which divides both sides of the image. None: the largest that gives 6 to 16
            patches along the shorter side.
        width: length of a patch's vector.
        depth: the number of blocks.
        heads: heads of the attention; they divide the width.

    Example:
        >>> model = ViT(ways=5, image=(1, 28, 28))
        >>> model.patch, sum(weight.numel() for weight in model.parameters())
        (4, 802437)
    """

    def __init__(
        self,
        ways: int = 5,
        image: tuple[int, int, int] = (3, 84, 84),
        patch: int | None = None,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
    ) -> None:
        super().__init__()
        channels, *sides = self._check(image, 0, ways=ways, width=width, depth=depth, heads=heads)
        if width % heads:
            raise UserError(f"width is {width}, which {heads} heads do not divide")
        patch = _patch(*sides) if patch is None else patch
        check_whole("patch", patch, 1)
        if any(side % patch for side in sides):
            raise UserError(f"patch is {patch}, which does not divide both sides of an image of {sides[0]}x{sides[1]}")
        self.image, self.patch = image, patch
        patches = (sides[0] // patch) * (sides[1] // patch)
        self.position = nn.Parameter(torch.empty(patches, width))
        self.embedding = nn.Linear(channels * patch * patch, width)
        self.blocks = nn.Sequential(*(_Attending(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, ways)
        self.initialise()

    def _draw(self, layer: nn.Module, weight: Tensor, generator: Generator | None) -> None:
        if layer is self:
            nn.init.normal_(weight, std=0.02, generator=generator)  # the positions
        else:
            super()._draw(layer, weight, generator)

    def forward(self, x: Tensor) -> Tensor:  # [n, C, H, W] -> [n, ways]
        rows, columns = x.shape[2] // self.patch, x.shape[3] // self.patch
        x = x.unflatten(3, (columns, self.patch)).unflatten(2, (rows, self.patch))  # [n, C, rows, p, columns, p]
        x = x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [n, patches, C*p*p]
        return self.head(self.norm(self.blocks(self.embedding(x) + self.position)).mean(1))


class _Attending(nn.Module):
    """A block of ViT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.attention, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # [n, patches, width]
        parts = self.attention(self.norm1(x)).unflatten(2, (3, self.heads, -1))  # [n, patches, 3, heads, width/heads]
        found = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4))  # [n, heads, patches, width/heads]
        x = x + self.mix(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def _patch(height: int, width: int) -> int:
    """The side of a patch that gives 6 to 16 patches along the shorter side of an image, as few as possible."""
    for count in range(6, 17):
        patch, rest = divmod(min(height, width), count)
        if patch and not rest and not max(height, width) % patch:
            return patch
    raise UserError(f"no patch divides an image of {height}x{width} into 6 to 16 parts: give patch, or other images")


def start_statistics(norm: Any, like: Tensor) -> None:
    """Give a batch norm layer running statistics, 0 and 1 for now, of the type of a weight."""
    norm.track_running_stats = True
    norm.running_mean = torch.zeros(norm.num_features, dtype=like.dtype, device=like.device)
    norm.running_var = torch.ones_like(norm.running_mean)
    norm.num_batches_tracked = torch.tensor(1, device=like.device)  # the support set is one batch


CONV4_HEAD = {"head.weight", "head.bias"}


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
