"""Small float64 models, each with a way to draw tasks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import gradshare as gs

WAYS, SUPPORT, QUERY = 3, 6, 7
Loss = str | Callable[[Tensor, Tensor], Tensor]


class Model(NamedTuple):
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one input
    loss: Loss = "cross_entropy"
    tokens: int = 0  # inputs are integers below this, if any

    def make(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build().double()

    def tasks(self, tasks: int, seed: int = 1) -> gs.Episodes:
        draw = torch.Generator().manual_seed(seed)
        parts = [part for n in (SUPPORT, QUERY) for part in self._part(tasks, n, draw)]
        return gs.Episodes(*parts)

    def _part(self, tasks: int, n: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        if self.tokens:
            x = torch.randint(self.tokens, (tasks, n, *self.shape), generator=draw)
        else:
            x = torch.randn(tasks, n, *self.shape, generator=draw, dtype=torch.float64)
        if self.loss != "cross_entropy":
            return x, torch.randn(tasks, n, 1, generator=draw, dtype=torch.float64)
        order = torch.stack([torch.randperm(n, generator=draw) for _ in range(tasks)])
        return x, order % WAYS


def quartic(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).pow(4).sum() / 10


class ConvNorm(nn.Module):
    """Two blocks of convolution and batch norm, with default running statistics."""

    def __init__(
        self, activation: nn.Module, pool: nn.Module, norm: Callable[[int], nn.Module] = nn.BatchNorm2d
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *[nn.Conv2d(1, 3, 3, padding=1), norm(3), activation, pool],
            *[nn.Conv2d(3, 4, 3, padding=1), norm(4), activation, pool],
        )
        self.head = nn.Linear(4 * 2 * 2, WAYS)

    def forward(self, x: Tensor) -> Tensor:  # [n, 1, 8, 8]
        return self.head(self.body(x).flatten(1))


def mlp(inputs: int, outputs: int, *middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), *middle, nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs))


def image_net(*layers: nn.Module, features: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(features * 4, WAYS))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, WAYS)

    def forward(self, x: Tensor) -> Tensor:  # [n, length, 8]
        return self.head(self.encoder(x).mean(1))


class Tokens(nn.Module):
    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5, padding_idx=padding)
        self.head = nn.Linear(5, WAYS)

    def forward(self, x: Tensor) -> Tensor:  # [n, length]
        return self.head(torch.tanh(self.embedding(x)).mean(1))


class Tied(nn.Module):
    """The second layer is the first's weight again, under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, WAYS)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Repeated(nn.Module):
    """One convolution and one batch norm, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Linear(2 * 36, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(self.norm(self.conv(x)))
        return self.head(x.flatten(1))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Linear(3 * 16, WAYS)
        self.body.weight.requires_grad_(False)
        self.norm.bias.requires_grad_(False)
        with torch.no_grad():
            self.norm.bias.normal_()

    def forward(self, x: Tensor) -> Tensor:  # [n, 1, 6, 6]
        return self.head(torch.tanh(self.norm(self.body(x))).flatten(1))


class Buffered(nn.Module):
    """A constant that is a buffer, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5, -1.5, 2.0]))
        self.register_buffer("shift", torch.tensor(0.3), persistent=False)
        self.net = mlp(3, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.scale + self.shift)


class Direct(nn.Module):
    """Uses its layers' weights without calling the layers, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gain, self.head = nn.Conv2d(1, 3, 3), nn.Parameter(torch.ones(3, 1, 1)), nn.Linear(3 * 16, WAYS)

    def forward(self, x: Tensor) -> Tensor:  # [n, 1, 6, 6]
        x = F.conv2d(x, self.conv.weight, self.conv.bias) * self.gain
        return self.head(torch.tanh(x).flatten(1))


class Unused(nn.Module):
    """Has a weight that the output does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.net = nn.Linear(2, 2), mlp(3, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class StandardisedConv2d(nn.Conv2d):
    """A user's subclass with a forward of its own: it is not a plain convolution."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight / weight.pow(2).mean((1, 2, 3), keepdim=True).sqrt(), self.bias)


class ShiftedBatchNorm2d(nn.BatchNorm2d):
    """A user's subclass with a forward of its own: it is not a plain batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square() + 0.5


class ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.7


class FunctionalNorm(nn.Module):
    """Calls F.batch_norm itself, so there is no layer to see."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3), nn.Linear(3 * 16, WAYS)
        self.gain, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:  # [n, 1, 6, 6]
        x = F.batch_norm(self.conv(x), None, None, self.gain, self.shift, training=True)
        return self.head(torch.tanh(x).flatten(1))


class KeywordConv(nn.Module):
    """Calls F.conv2d with its arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3), nn.Linear(3 * 16, WAYS)

    def forward(self, x: Tensor) -> Tensor:  # [n, 1, 6, 6]
        x = F.conv2d(input=x, weight=self.conv.weight, bias=self.conv.bias, padding=0)
        return self.head(torch.tanh(x).flatten(1))


class Residual(nn.Module):
    """A residual block as torchvision writes it: activation and sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norms, self.head = nn.ModuleList([nn.BatchNorm2d(3), nn.BatchNorm2d(3)]), nn.Linear(3, WAYS)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:  # [n, 1, 6, 6]
        x = self.relu(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(x))
        y += x
        return self.head(self.relu(y).mean((2, 3)))


class Attention(nn.Module):
    """Attention by the function, and by the layer that returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.head = nn.Linear(8, 24), nn.Linear(8, WAYS)
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # [n, length, 8]
        x = F.scaled_dot_product_attention(*self.inputs(x).chunk(3, -1), is_causal=True)
        return self.head(self.layer(x, x, x, need_weights=True)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 5), nn.Linear(5, WAYS)

    def forward(self, x: Tensor) -> Tensor:  # [n, length, 4]
        hidden = None
        for step in range(x.shape[1]):
            hidden = self.cell(x[:, step], hidden)
        return self.head(hidden)


class ConstantInput(nn.Module):
    """Convolves, normalises and pools a constant, which is then the same for every task and example."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.randn(1, 1, 6, 6))
        self.conv, self.norm, self.head = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(36 + 8, WAYS)

    def forward(self, x: Tensor) -> Tensor:  # [n, 1, 6, 6]
        place = F.max_pool2d(self.norm(self.conv(self.grid)), 2).flatten()
        return self.head(torch.cat([x.flatten(1), place.expand(len(x), -1)], 1))


def hooked() -> nn.Module:
    """A convolution with a forward hook that changes its output."""
    net = image_net(nn.Conv2d(1, 3, 3), features=3)
    net[0].register_forward_hook(lambda module, args, output: output * 1.5 + 0.2)
    return net


def weight_normed() -> nn.Module:
    return image_net(parametrizations.weight_norm(nn.Conv2d(1, 3, 3)), features=3)


def spectral_normed() -> nn.Module:
    return image_net(parametrizations.spectral_norm(nn.Conv2d(1, 3, 3)), features=3)


def conv1d_net() -> nn.Module:
    return nn.Sequential(
        *[nn.Conv1d(2, 3, 3, padding=1), nn.BatchNorm1d(3), nn.Tanh()],
        *[nn.Conv1d(3, 4, 3, stride=2), nn.Flatten(), nn.Linear(12, WAYS)],
    )


def conv3d_net() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 27, WAYS))


IMAGE = (1, 6, 6)

CONV4 = Model(lambda: gs.Conv4(ways=WAYS, filters=3, image=(1, 16, 16)), (1, 16, 16))
RELU_NORM = Model(lambda: ConvNorm(nn.ReLU(), nn.MaxPool2d(2)), (1, 8, 8))
TANH_NORM = Model(lambda: ConvNorm(nn.Tanh(), nn.AvgPool2d(2)), (1, 8, 8))
SILU_NORM = Model(lambda: ConvNorm(nn.SiLU(), nn.AvgPool2d(2)), (1, 8, 8))
REGRESSION = Model(lambda: mlp(2, 1), (2,), loss="mse")
QUARTIC = Model(lambda: mlp(2, 1), (2,), loss=quartic)

EXTRAS = {
    "silu batch norm net": SILU_NORM,
    "callable loss": QUARTIC,
    "ResNet12": Model(lambda: gs.ResNet12(WAYS, (2, 3, 2, 4), (2, 16, 16)), (2, 16, 16)),
    "ViT": Model(lambda: gs.ViT(WAYS, (2, 6, 4), patch=2, width=4, depth=2, heads=2), (2, 6, 4)),
    "mlp with batch norm 1d": Model(lambda: mlp(4, WAYS, nn.BatchNorm1d(6)), (4,)),
    "transformer": Model(Transformer, (4, 8)),
    "group norm": Model(lambda: image_net(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), features=4), IMAGE),
    "layer norm": Model(lambda: mlp(4, WAYS, nn.LayerNorm(6)), (4,)),
    "layer norm over images": Model(lambda: image_net(nn.Conv2d(1, 2, 3), nn.LayerNorm([2, 4, 4]), features=2), IMAGE),
    "instance norm": Model(
        lambda: ConvNorm(nn.SiLU(), nn.AvgPool2d(2), lambda c: nn.InstanceNorm2d(c, affine=True)), (1, 8, 8)
    ),
    "instance norm, running": Model(
        lambda: image_net(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), features=4),
        IMAGE,
    ),
    "instance norm, no gain": Model(lambda: image_net(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4), features=4), IMAGE),
    "strided conv": Model(
        lambda: image_net(nn.Conv2d(1, 3, 3, stride=2), nn.Conv2d(3, 4, 2, stride=(1, 2), padding=1), features=4),
        (1, 9, 9),
    ),
    "dilated conv": Model(
        lambda: image_net(nn.Conv2d(1, 4, 3, dilation=2, padding=1), nn.Conv2d(4, 2, 2, dilation=(2, 1)), features=2),
        (1, 8, 8),
    ),
    "grouped conv": Model(
        lambda: image_net(nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(4, 4, 3, groups=4, bias=False), features=4), (2, 7, 7)
    ),
    "strided grouped conv, uneven": Model(
        lambda: image_net(nn.Conv2d(2, 4, 3, stride=2, dilation=2, padding=(2, 1), groups=2), features=4), (2, 8, 7)
    ),
    "conv 1x1 and big kernel": Model(
        lambda: image_net(nn.Conv2d(1, 3, 1), nn.Conv2d(3, 3, 5, padding=4), features=3), IMAGE
    ),
    "conv 1d, batch norm 1d": Model(conv1d_net, (2, 8)),
    "conv 3d, batch norm 3d": Model(conv3d_net, (1, 4, 4, 4)),
    "conv transpose": Model(
        lambda: image_net(nn.ConvTranspose2d(1, 3, 3, stride=2, output_padding=1), features=3), (1, 4, 4)
    ),
    "padding same": Model(
        lambda: image_net(
            nn.Conv2d(1, 3, 3, padding="same"), nn.Conv2d(3, 3, 4, padding="same", dilation=2), features=3
        ),
        IMAGE,
    ),
    "padding valid": Model(lambda: image_net(nn.Conv2d(1, 3, 3, padding="valid"), features=3), IMAGE),
    "padding circular": Model(
        lambda: image_net(nn.Conv2d(1, 3, 3, padding=1, padding_mode="circular"), features=3), IMAGE
    ),
    "padding reflect": Model(
        lambda: image_net(nn.Conv2d(1, 3, 3, padding=(2, 1), padding_mode="reflect"), features=3), IMAGE
    ),
    "embedding": Model(Tokens, (4,), tokens=7),
    "embedding with padding": Model(lambda: Tokens(padding=0), (4,), tokens=7),
    "tied weights": Model(Tied, (4,)),
    "layers used twice": Model(Repeated, (2, 6, 6)),
    "frozen weights": Model(Frozen, IMAGE),
    "buffers": Model(Buffered, (3,)),
    "weights used directly": Model(Direct, IMAGE),
    "unused weight": Model(Unused, (3,)),
    "subclass of convolution": Model(lambda: image_net(StandardisedConv2d(1, 3, 3), features=3), IMAGE),
    "subclass of batch norm": Model(lambda: image_net(nn.Conv2d(1, 3, 3), ShiftedBatchNorm2d(3), features=3), IMAGE),
    "subclass of linear": Model(lambda: nn.Sequential(ScaledLinear(4, 5), nn.Tanh(), nn.Linear(5, WAYS)), (4,)),
    "functional batch norm": Model(FunctionalNorm, IMAGE),
    "forward hook": Model(hooked, IMAGE),
    "weight norm": Model(weight_normed, IMAGE),
    "batch norm without gain": Model(
        lambda: image_net(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, affine=False), features=3), IMAGE
    ),
    "batch norm, other settings": Model(
        lambda: image_net(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, eps=0.1, momentum=None), features=3), IMAGE
    ),
    "convolution by keywords": Model(KeywordConv, IMAGE),
    "in-place activation": Model(lambda: image_net(nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True), features=3), IMAGE),
    "in-place activation of a linear layer": Model(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, WAYS)), (4,)
    ),
    "residual block, in place": Model(Residual, IMAGE),
    "attention": Model(Attention, (3, 8)),
    "recurrent cell": Model(Recurrent, (3, 4)),
    "constant input": Model(ConstantInput, IMAGE),
    "prelu and upsampling": Model(
        lambda: image_net(nn.Conv2d(1, 3, 3), nn.PReLU(3), nn.Upsample(scale_factor=2, mode="bilinear"), features=3),
        IMAGE,
    ),
}
