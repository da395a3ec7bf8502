"""Networks of the literature: their sizes, their formulas in other words, their initial weights, and mistakes.

That they run for many tasks at once with exact second derivatives: tests/method/test_against_reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradshare as gs

SMALL: dict[str, Callable[..., nn.Module]] = {
    "conv4": lambda: gs.Conv4(3, 4, (1, 16, 16)),
    "resnet12": lambda: gs.ResNet12(3, (2, 3, 4, 5), (1, 16, 16)),
    "vit": lambda: gs.ViT(3, (1, 16, 16), patch=8, width=8, depth=2, heads=2),
}
every_network = pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)


def count(model: nn.Module, head: bool = True) -> int:
    return sum(weight.numel() for name, weight in model.named_parameters() if head or not name.startswith("head."))


def test_sizes_of_the_literature() -> None:
    with torch.device("meta"):
        assert count(gs.ResNet12(), head=False) == 12_424_320
        assert count(gs.ResNet12(ways=64)) == 12_424_320 + 64 * 641
        sizes = [(3, 64), (64, 128), (128, 256), (256, 512)]
        blocks = [9 * c * w + 2 * 9 * w * w + c * w + 4 * 2 * w for c, w in sizes]
        assert count(gs.ResNet12(widths=(64, 128, 256, 512)), head=False) == sum(blocks)
        assert count(gs.Conv4(filters=32)) == 32_901  # Finn et al., 2017
        assert count(gs.Conv4(filters=64), head=False) == 113_088  # Snell et al., 2017


@torch.no_grad()
def test_resnet12_in_the_words_of_its_paper() -> None:
    """Activation, then pooling, layer by layer; only names of weights are taken from the model."""
    model = gs.ResNet12(3, (2, 3, 4, 5), (2, 21, 17)).double()
    for weight in model.parameters():
        weight += 0.2 * torch.randn(
            weight.shape, dtype=weight.dtype, generator=torch.Generator().manual_seed(len(weight))
        )
    w = dict(model.named_parameters())

    def norm(x: Tensor, name: str) -> Tensor:
        mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
        x = (x - mean) / (variance + 1e-5).sqrt()
        return x * w[f"{name}.weight"].view(1, -1, 1, 1) + w[f"{name}.bias"].view(1, -1, 1, 1)

    def leaky(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0.1 * x)

    x = images = torch.randn(6, 2, 21, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for block in ("layer1.0", "layer2.0", "layer3.0", "layer4.0"):
        y = leaky(norm(F.conv2d(x, w[f"{block}.conv1.weight"], padding=1), f"{block}.bn1"))
        y = leaky(norm(F.conv2d(y, w[f"{block}.conv2.weight"], padding=1), f"{block}.bn2"))
        y = norm(F.conv2d(y, w[f"{block}.conv3.weight"], padding=1), f"{block}.bn3")
        y = y + norm(F.conv2d(x, w[f"{block}.downsample.0.weight"]), f"{block}.downsample.1")
        x = F.max_pool2d(leaky(y), 2)
    assert x.shape == (6, 5, 1, 1)
    expected = x.mean((2, 3)) @ w["head.weight"].T + w["head.bias"]
    torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_vit_against_pytorchs_encoder() -> None:
    model = gs.ViT(3, (2, 6, 8), patch=2, width=8, depth=2, heads=2).double()
    for weight in model.parameters():
        weight += 0.2 * torch.randn(
            weight.shape, dtype=weight.dtype, generator=torch.Generator().manual_seed(len(weight))
        )
    images = torch.randn(5, 2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    patches = F.unfold(images, 2, stride=2).transpose(1, 2)  # [n, patches, C*p*p]
    x = model.embedding(patches) + model.position
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(8, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True).double()
        w = dict(block.named_parameters())
        names = {"norm1": "norm1", "norm2": "norm2", "attention": "self_attn.in_proj_", "mix": "self_attn.out_proj"}
        names |= {"mlp.0": "linear1", "mlp.2": "linear2"}
        theirs = {
            f"{there}{kind}" if there.endswith("_") else f"{there}.{kind}": w[f"{here}.{kind}"]
            for here, there in names.items()
            for kind in ("weight", "bias")
        }
        layer.load_state_dict(theirs)
        x = layer(x)
    expected = model.head(model.norm(x).mean(1))
    torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-12)


@every_network
def test_initial_weights_are_a_function_of_the_generator(make: Callable[..., nn.Module]) -> None:
    learner = gs.maml(make())
    one, same, other = (learner.init(seed).params for seed in (1, 1, 2))
    for name, weight in one.items():
        assert torch.equal(weight, same[name])
        constant = name.endswith("bias") or "norm" in name or ".bn" in name or "downsample.1" in name
        assert torch.equal(weight, other[name]) == constant, name
        if constant:
            assert (weight == (0.0 if name.endswith("bias") else 1.0)).all(), name


def test_resnet12s_initial_variance() -> None:
    """Kaiming's, by the fan out; the slope of its ReLU counts as 0.01, as in the literature's code."""
    weight = gs.ResNet12(image=(3, 84, 84), widths=(64, 64, 64, 64)).get_parameter("layer2.0.conv2.weight")
    assert weight.std().item() == pytest.approx((2 / (1 + 0.01**2) / (64 * 9)) ** 0.5, rel=0.02)


@every_network
def test_the_adapted_module_loads_into_a_plain_one(make: Callable[..., nn.Module]) -> None:
    """Also where it has batch norm, whose running statistics it then takes."""
    learner = gs.maml(make(), steps=1)
    x, y = torch.randn(1, 6, 1, 16, 16), torch.arange(3).repeat(2)[None]
    fast = learner.adapt(learner.init(0), x, y)
    plain = make()
    plain.load_state_dict(learner.module_for(fast, 0).state_dict(), strict=True)
    expected = learner.predict(fast, x, norm_statistics="support")[0]
    torch.testing.assert_close(plain.eval()(x[0]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("image", "patch"), [((3, 84, 84), 14), ((1, 28, 28), 4), ((3, 32, 32), 4), ((3, 64, 96), 8)])
def test_patches_by_default(image: tuple[int, int, int], patch: int) -> None:
    with torch.device("meta"):
        assert gs.ViT(image=image).patch == patch


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gs.ResNet12(image=(3, 8, 8)), "ResNet12 needs images of at least 16x16"),
        (lambda: gs.Conv4(image=(1, 15, 28)), "Conv4 needs images of at least 16x16 pixels, not 15x28"),
        (lambda: gs.ResNet12(widths=(64, 128)), "four blocks"),  # type: ignore[arg-type]
        (lambda: gs.ResNet12(widths=(64, 0, 64, 64)), r"widths\[1\] is 0"),
        (lambda: gs.ViT(patch=5), "patch is 5, which does not divide both sides of an image of 84x84"),
        (lambda: gs.ViT(width=10, heads=4), "width is 10, which 4 heads do not divide"),
        (lambda: gs.ViT(image=(1, 97, 97)), "no patch divides an image of 97x97"),
        (lambda: gs.ViT(depth=0), "depth is 0"),
    ],
)
def test_mistakes(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(gs.UserError, match=message):
        make()
