"""Each kernel against plain float64 formulas, on the same inputs. On a GPU: pytest tests/test_kernels*.py"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.support import formulas
from tests.support.kernel_tools import (
    DEVICE,
    EPS,
    GPU,
    SLOPE,
    TOLERANCES,
    as_weights,
    assert_near,
    draw,
    poisoned,
    without_checks,
)
from tests.support.steps import together
from torch import Tensor

import gradshare as gs
from gradshare.engine.conv4.triton import convolution, device, first_block, head, pooled_norm, sharing
from gradshare.engine.conv4.triton.convolution import Sums
from gradshare.engine.conv4.triton.first_block import Moments, Patches
from gradshare.engine.conv4.triton.programs import with_programs
from gradshare.method import controls


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch)
    if device.INTERPRETED:
        monkeypatch.setattr(device, "MOST_PARTS", 2)  # so that few programs are many


class Case(NamedTuple):
    """A block: its activations, and its channels before and after the convolution."""

    precision: Any
    tasks: int
    n: int
    height: int
    width: int
    inputs: int
    outputs: int

    @property
    def kind(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.precision]

    def draw(self, seed: int, channels: int, shrink: int = 1) -> Tensor:
        """Activations, or pooled ones."""
        size = (self.height // shrink, self.width // shrink)
        return draw(seed, self.tasks, self.n, *size, channels, kind=self.kind)

    def weights(self, seed: int, taps: int = 9) -> Tensor:
        rows = taps * self.inputs
        return as_weights(draw(seed, self.tasks, rows, self.outputs, kind=self.kind) / rows**0.5)


ON_CPU = [
    Case("float32", 2, 3, 7, 6, 5, 7),
    Case("float32", 1, 2, 5, 9, 18, 12),
    Case("float32", 8, 1, 3, 5, 2, 20),
    Case("float32", 2, 12, 9, 10, 4, 6),
]
ON_GPU = [
    Case("float32", 2, 3, 7, 6, 5, 7),
    Case("tf32", 3, 7, 21, 19, 48, 48),
    Case("bf16", 3, 7, 21, 19, 48, 48),
]
CASES = ON_GPU if GPU else ON_CPU


def name_of(case: Case) -> str:
    return f"{case.precision}-{case.tasks}x{case.n}x{case.height}x{case.width}-{case.inputs}to{case.outputs}"


every_case = pytest.mark.parametrize("case", CASES, ids=name_of)
one_or_two_pairs = pytest.mark.parametrize("pairs", [1, 2], ids=["one pair", "two pairs"])


class Block(NamedTuple):
    """A block's inputs as its kernels get them, and what they should give, in float64."""

    z: Tensor
    statistics: Tensor
    gain: Tensor
    bias: Tensor
    code: Tensor
    peak: Tensor
    g: Tensor
    q: Tensor
    c: Tensor
    means_q: Tensor  # [T, 2, C], float64
    orders: formulas.Orders


@cache
def block_of(case: Case) -> Block:
    z = case.draw(1, case.outputs) * 2 + 1
    return block_from(case, z, z.double(), case.draw(2, case.outputs).double())


def block_from(case: Case, z: Tensor, exact_z: Tensor, q: Tensor) -> Block:
    gain, bias = gain_and_bias(case.outputs)
    statistics = formulas.statistics(exact_z, EPS)
    y = formulas.normalised(exact_z, statistics)
    best, which = formulas.windows(y * gain.double() + bias.double()).max(4)
    code = (which + 4 * (best > 0)).to(torch.uint8)
    g, c = (case.draw(seed, case.outputs, shrink=2) for seed in (3, 4))
    orders = formulas.orders(exact_z, gain.double(), code, g.double(), q, c.double(), EPS, SLOPE)
    means_q = torch.stack([formulas.over_positions(q), formulas.over_positions(q * y)], 1)
    peak = formulas.taken(y, code).to(case.kind)
    return Block(z, statistics.float(), gain, bias, code, peak, g, q.to(case.kind), c, means_q, orders)


def gain_and_bias(channels: int) -> tuple[Tensor, Tensor]:
    """Gains of both signs, one of them zero."""
    gain = draw(5, channels)
    gain[channels // 2] = 0
    return gain, draw(6, channels) / 2


def assert_pooled(out: Tensor, peak: Tensor, code: Tensor, y: Tensor, gain: Tensor, bias: Tensor, tol: float) -> None:
    """The output is the largest element, the code says where one is that large, and peak is y there."""
    values = y * gain.double() + bias.double()
    largest = formulas.windows(values).amax(4)
    chosen = formulas.taken(values, code)
    assert_near(chosen, largest, tol, what="the coded element")
    assert_near(peak, formulas.taken(y, code), tol, what="peak")
    assert_near(out, formulas.activated(chosen, code, SLOPE), tol, what="output")
    clear = largest.abs() > tol * largest.abs().max()
    assert code.max() < 8 and torch.equal((code >= 4)[clear], (largest > 0)[clear])


SUMS = ["none", "moments", "means", "pooled"]
USED = [(1, False, "moments"), (2, False, "means"), (1, True, "pooled"), (2, True, "pooled")]
ALL = [(pairs, adjoint, sums) for pairs in (1, 2) for adjoint in (False, True) for sums in SUMS]


@every_case
@pytest.mark.parametrize("pairs, adjoint, sums", USED if GPU else ALL)
def test_convolve(case: Case, pairs: int, adjoint: bool, sums: Any) -> None:
    source, channels = (case.outputs, case.inputs) if adjoint else (case.inputs, case.outputs)
    x = [case.draw(10 + pair, source) for pair in range(pairs)]
    w = [case.weights(20 + pair) for pair in range(pairs)]
    z, code = case.draw(30, channels), (4 * case.draw(31, channels)).abs().clamp(max=7).to(torch.uint8)
    statistics, count = formulas.statistics(z.double(), EPS).float(), 4 * case.n * case.height * case.width + 3
    wanted = {
        "none": None,
        "moments": Sums.moments(EPS),
        "means": Sums.means(z, statistics),
        "pooled": Sums.pooled(z, code, count, SLOPE),
    }
    with poisoned():
        found, summed = convolution.convolve(
            list(zip(x, w, strict=True)), channels, 9, case.precision, adjoint, wanted[sums]
        )
    exact = [(a.double(), b.double()) for a, b in zip(x, w, strict=True)]
    expected = sum(formulas.towards_images(a, b, 9) if adjoint else formulas.conv(a, b) for a, b in exact)
    assert isinstance(expected, Tensor) and found.dtype == case.kind
    assert_near(found, expected, case.tolerance)
    value, other = found.double(), z.double()  # sums are over what was stored, in float32
    if sums == "moments":
        assert_near(summed, formulas.statistics(value, EPS), 1e-5, what="moments")
    elif sums == "means":
        y = formulas.normalised(other, statistics.double())
        assert_near(summed, means_of(value, y), 1e-5, scale=value.abs().mean(), what="means")
    elif sums == "pooled":
        a = formulas.activated(value, code, SLOPE)
        scaled = means_of(a, other) * (case.n * case.height * case.width / count)
        assert_near(summed, scaled, 1e-5, scale=a.abs().mean() / 4, what="pooled means")


def means_of(a: Tensor, y: Tensor) -> Tensor:  # [T, 2, C]
    return torch.stack([formulas.over_positions(a), formulas.over_positions(a * y)], 1)


@pytest.mark.skipif(GPU, reason="the network has no such convolution: not worth a compilation")
@one_or_two_pairs
def test_convolve_with_one_tap(pairs: int) -> None:
    case = CASES[0]
    x, w = ([of(seed) for seed in range(pairs)] for of in (lambda s: case.draw(s, 5), lambda s: case.weights(s, 1)))
    found, _ = convolution.convolve(list(zip(x, w, strict=True)), case.outputs, 1, "float32")
    expected = torch.stack([formulas.conv(a.double(), b.double()) for a, b in zip(x, w, strict=True)]).sum(0)
    assert_near(found, expected, 1e-5)


def test_moments_keep_their_digits_beside_a_large_mean() -> None:
    x = (draw(1, 1, 2, 9, 10, 16) / 100 + 1000).contiguous()
    w = as_weights(torch.eye(16).expand(1, 1, 16, 16).flatten(1, 2).to(DEVICE))
    z, found = convolution.convolve([(x, w)], 16, 1, "float32", sums=Sums.moments(EPS))
    assert torch.equal(z, x)
    assert_near(found, formulas.statistics(x.double(), EPS), 1e-4)


@every_case
def test_pool(case: Case) -> None:
    block = block_of(case)
    with poisoned():
        out, peak, code = pooled_norm.pool(block.z, block.statistics, block.gain, block.bias, SLOPE)
    y = formulas.normalised(block.z.double(), block.statistics.double())
    assert out.dtype == peak.dtype == case.kind and code.dtype == torch.uint8
    assert_pooled(out, peak, code, y, block.gain, block.bias, case.tolerance)


@every_case
def test_pool_takes_the_first_of_equal_elements(case: Case) -> None:
    z = torch.ones_like(block_of(case).z)
    statistics = torch.ones(case.tasks, 2, case.outputs, device=DEVICE) * torch.tensor([[0.5], [2.0]], device=DEVICE)
    ones = torch.ones(case.outputs, device=DEVICE)
    for bias, code in ((0.0, 4), (-1.0, 0), (-3.0, 0)):  # above, at and below zero
        out, peak, found = pooled_norm.pool(z, statistics, ones, bias * ones, SLOPE)
        assert (found == code).all() and (peak == 1).all()
        assert_near(out, torch.full_like(out, max(1 + bias, SLOPE * (1 + bias))), case.tolerance)


@every_case
def test_pooled_means(case: Case) -> None:
    block, positions = block_of(case), case.n * case.height * case.width
    with poisoned():
        found = pooled_norm.pooled_means(block.g, block.peak, block.code, positions, SLOPE)
    a = formulas.activated(block.g.double(), block.code, SLOPE)
    share = block.peak[0].numel() / case.outputs / positions
    assert_near(found, means_of(a, block.peak.double()) * share, 1e-5, scale=a.abs().mean() * share)
    assert_near(found, block.orders.means, case.tolerance, scale=a.abs().mean() * share)


@every_case
def test_gather(case: Case) -> None:
    block = block_of(case)
    with poisoned():
        to_g, mixed = pooled_norm.gather(
            block.q, block.peak, block.code, block.g, block.statistics, block.gain, block.means_q.float(),
            block.orders.means.float(), SLOPE,
        )  # fmt: skip
    assert to_g.dtype == case.kind
    assert_near(to_g, block.orders.to_g, case.tolerance)
    assert_near(mixed, block.orders.mixed, case.tolerance)


@every_case
def test_spread(case: Case) -> None:
    block = block_of(case)
    with poisoned():
        dz = pooled_norm.scatter(
            block.z, block.statistics, block.gain, block.code, block.g, block.orders.means.float(), SLOPE
        )
    assert dz.dtype == case.kind
    assert_near(dz, block.orders.dz, case.tolerance)


@every_case
def test_spread_of_the_outer_gradient(case: Case) -> None:
    block = block_of(case)
    orders = block.orders
    more = pooled_norm.SecondOrder(
        block.q, block.means_q.float(), orders.mixed.float(), block.c, orders.later_means.float()
    )  # fmt: skip
    with poisoned():
        cz = pooled_norm.scatter(
            block.z, block.statistics, block.gain, block.code, block.g, orders.means.float(), SLOPE, more
        )
    assert_near(cz, orders.cz, case.tolerance)


@every_case
@one_or_two_pairs
@pytest.mark.parametrize("taps", [9] if GPU else [1, 9])
@pytest.mark.parametrize("finest", [False, True], ids=["usual parts", "finest parts"])
def test_correlate(case: Case, pairs: int, taps: int, finest: bool) -> None:
    x = [case.draw(10 + pair, case.inputs) for pair in range(pairs)]
    g = [case.draw(20 + pair, case.outputs) for pair in range(pairs)]
    rows, positions = taps * case.inputs, case.n * case.height * case.width
    parts = convolution.splits(case.tasks, positions, rows, case.precision, DEVICE)
    if finest:
        depth = convolution.CORRELATION[case.precision].depth
        parts = (-(-positions // depth), depth)
    with_bias = taps == 1
    wanted = ((16, parts[0], rows * case.outputs), (16 + rows * case.outputs + 5, parts[0], case.outputs))
    rooms = convolution.partial_sums(wanted, case.tasks, wanted[1][0] + case.outputs + 3, DEVICE)
    with poisoned():
        room = rooms.buffer()
        weights, bias = (room[part] for part in rooms.slices)
        both = list(zip(x, g, strict=True))
        convolution.correlate(both, taps, case.precision, weights, parts, bias if with_bias else None)
        if not with_bias:
            bias.fill_(0)
        found = rooms.add(room)
    expected = sum(formulas.towards_filters(a.double(), b.double(), taps) for a, b in both)
    assert isinstance(expected, Tensor)
    exact = torch.zeros_like(found, dtype=torch.float64)
    exact[:, 16 : 16 + rows * case.outputs] = expected.flatten(1)
    if with_bias:
        exact[:, wanted[1][0] : wanted[1][0] + case.outputs] = g[0].double().sum((1, 2, 3))
    assert_near(found, exact, case.tolerance)
    assert torch.equal(found == 0, exact == 0)  # where nothing is summed


def test_parts_are_added_up_whatever_their_number() -> None:
    wanted = ((0, 70, 5), (7, 1, 300), (330, 33, 129))
    rooms = convolution.partial_sums(wanted, 2, 500, DEVICE)
    room = draw(1, rooms.elements)
    with poisoned():
        found = rooms.add(room)
    expected = torch.zeros(2, 500, dtype=torch.float64, device=DEVICE)
    for (offset, parts, size), part in zip(wanted, rooms.slices, strict=True):
        expected[:, offset : offset + size] = room[part].double().view(2, parts, size).sum(1)
    assert_near(found, expected, 1e-6)
    assert torch.equal(found == 0, expected == 0)


class Stem(NamedTuple):
    """A first block: its images, its patches and filters as the kernels get them, and what they should give."""

    images: Tensor  # [T, n, C, H, W]
    patches: Patches
    w: Tensor  # [T, K, O]
    v: Tensor  # [T, K, O]: what comes back to the gradient by w
    own: Moments
    cross: Moments
    block: Block

    def rows(self, z: Tensor) -> Tensor:  # [T, n, H, W, O] -> [T, K, O]
        """X^T z."""
        return self.patches.x.double().flatten(1, 3).mT @ z.flatten(1, 3)


def padded(x: Tensor, *sizes: int) -> Tensor:
    """Zeros after the last axes of x, up to these sizes."""
    more = [size - have for size, have in zip(sizes, x.shape[-len(sizes) :], strict=True)]
    return F.pad(x, [place for size in reversed(more) for place in (0, size)])


@cache
def stem_of(case: Case) -> Stem:
    images = draw(7, case.tasks, case.n, case.inputs, case.height, case.width) + 0.3
    rows = 9 * case.inputs
    size = -(-rows // 16) * 16
    block_size = 1 << (size - 1).bit_length()
    x = formulas.patches(images.double(), images[:, 0].double().mean((-2, -1)))
    x = padded(x, size).to(case.kind)
    exact = x.double()
    covariance = formulas.covariance(exact)
    patches = Patches(
        x, padded(formulas.over_positions(exact), block_size).float(),
        padded(covariance, block_size, block_size).float(),
    )  # fmt: skip
    w, v = (
        as_weights(padded(draw(seed, case.tasks, rows, case.outputs, kind=case.kind) / rows**0.5, size, case.outputs))
        for seed in (8, 9)
    )
    z, q = (formulas.conv(exact, filters.double()) for filters in (w, v))
    block = block_from(case, z.to(case.kind), z, q)
    columns = device.padded_channels(case.outputs)
    own, cross = (
        Moments(means.float().contiguous(), padded(covariance @ filters.double(), block_size, columns).float())
        for means, filters in ((formulas.statistics(z, EPS), w), (block.means_q, v))
    )
    return Stem(images, patches, w, v, own, cross, block)


FIRST = [case._replace(inputs=inputs) for case, inputs in zip(CASES, (3, 3, 3) if GPU else (3, 1, 6, 2), strict=True)]
every_first = pytest.mark.parametrize("case", FIRST, ids=name_of)


@every_first
def test_patches(case: Case) -> None:
    stem = stem_of(case)
    with poisoned():
        found = first_block.patches(stem.images, case.precision)
    assert found.x.dtype == case.kind and found.positions == case.n * case.height * case.width
    assert_near(found.x, stem.patches.x, 1e-6 if case.kind == torch.float32 else case.tolerance)
    exact = found.x.double()  # moments are of what was stored
    block_size = found.mean.shape[-1]
    assert_near(found.mean, padded(formulas.over_positions(exact), block_size), 2e-5, scale=exact.abs().mean())
    assert_near(found.covariance, padded(formulas.covariance(exact), block_size, block_size), 3e-5)


def test_patches_of_other_types_and_layouts() -> None:
    images = torch.randint(256, (2, 5, 3, 8, 6), dtype=torch.uint8, device=DEVICE).transpose(-1, -2)
    as_bytes, as_floats = first_block.patches(images, "float32"), first_block.patches(images.float(), "float32")
    for found, expected in zip(as_bytes, as_floats, strict=True):
        assert torch.equal(found, expected)


@every_first
def test_moments_of_the_first_block(case: Case) -> None:
    stem = stem_of(case)
    with poisoned():
        found = first_block.moments(stem.patches, stem.w, EPS)
    assert_near(found.statistics, stem.own.statistics, 2e-5)
    assert_near(found.product, stem.own.product, 1e-5)


@every_first
def test_cross_moments_of_the_first_block(case: Case) -> None:
    stem = stem_of(case)
    with poisoned():
        found = first_block.cross_moments(stem.patches, stem.v, stem.own)
    assert_near(found.statistics, stem.cross.statistics, 2e-5, scale=stem.block.q.abs().mean())
    assert_near(found.product, stem.cross.product, 1e-5)


@every_first
def test_forward_of_the_first_block(case: Case) -> None:
    stem, block = stem_of(case), stem_of(case).block
    with poisoned():
        out, peak, code = first_block.forward(
            stem.patches, stem.w, stem.own, block.gain, block.bias, SLOPE, case.precision
        )
    z = formulas.conv(stem.patches.x.double(), stem.w.double())
    y = formulas.normalised(z, stem.own.statistics.double())
    assert out.dtype == peak.dtype == case.kind and code.dtype == torch.uint8
    assert_pooled(out, peak, code, y, block.gain, block.bias, case.tolerance)


@every_first
def test_correlate_of_the_first_block(case: Case) -> None:
    stem, block = stem_of(case), stem_of(case).block
    parts, size = first_block.parts(stem.patches), stem.patches.x.shape[-1]
    with poisoned():
        room = torch.empty(case.tasks, parts, size, case.outputs, device=DEVICE)
        first_block.correlate(stem.patches, block.g, block.code, SLOPE, case.precision, room)
    a = formulas.put_back(formulas.activated(block.g.double(), block.code, SLOPE), block.code, case.height, case.width)
    assert_near(room.sum(1), stem.rows(a), case.tolerance)


@every_first
def test_finish_of_the_first_block(case: Case) -> None:
    stem, block = stem_of(case), stem_of(case).block
    of_g, of_c = (
        stem.rows(
            formulas.put_back(formulas.activated(g.double(), block.code, SLOPE), block.code, case.height, case.width)
        )
        for g in (block.g, block.c)
    )
    target = as_weights(of_g.float())
    with poisoned():
        sparse = first_block.finish(target, stem.patches, stem.own, block.gain, block.orders.means.float())
    assert_near(sparse, padded(of_g, *sparse.shape[1:]), 1e-6)
    assert_near(target, stem.rows(block.orders.dz), 1e-5, scale=of_g.abs().mean())
    target = as_weights(of_c.float())
    more = first_block.SecondOrder(sparse, stem.cross, block.orders.mixed.float(), block.orders.later_means.float())
    with poisoned():
        first_block.finish(target, stem.patches, stem.own, block.gain, block.orders.means.float(), more)
    assert_near(target, stem.rows(block.orders.cz), 2e-5, scale=of_c.abs().mean())


@every_first
def test_gather_of_the_first_block(case: Case) -> None:
    stem, block = stem_of(case), stem_of(case).block
    with poisoned():
        to_g, mixed = first_block.gather(
            stem.patches, stem.v, block.peak, block.code, block.g, stem.own, block.gain, stem.cross,
            block.orders.means.float(), SLOPE, case.precision,
        )  # fmt: skip
    assert to_g.dtype == case.kind
    assert_near(to_g, block.orders.to_g, case.tolerance)
    assert_near(mixed, block.orders.mixed, case.tolerance)


HEADS = [(1, 1, 2, 5), (2, 19, 5, 75), (2, 9, 20, 130)] if not GPU else [(2, 19, 5, 75), (3, 101, 20, 1200)]
KINDS = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
every_head = pytest.mark.parametrize("tasks, n, ways, size", HEADS)


@every_head
@one_or_two_pairs
@pytest.mark.parametrize("kind", KINDS)
def test_linear(tasks: int, n: int, ways: int, size: int, pairs: int, kind: torch.dtype) -> None:
    x = [draw(pair, tasks, n, size, kind=kind) for pair in range(pairs)]
    w = [as_weights(draw(10 + pair, tasks, ways, size)) for pair in range(pairs)]
    g = [draw(20 + pair, tasks, n, ways) for pair in range(pairs)]
    bias = as_weights(draw(30, tasks, 1, ways))
    with poisoned():
        scores = head.scores(list(zip(x, w, strict=True)), bias)
        to_features = head.features_gradient(list(zip(g, w, strict=True)), kind)
        to_weights, to_bias = torch.empty(tasks, ways, size, device=DEVICE), torch.empty(tasks, ways, device=DEVICE)
        head.weights_gradient(list(zip(x, g, strict=True)), to_weights, to_bias)
    exact = [tuple(part.double() for part in parts) for parts in zip(x, w, g, strict=True)]
    assert_near(scores, bias.double() + torch.stack([a @ b.mT for a, b, _ in exact]).sum(0), 1e-5)
    assert to_features.dtype == kind
    expected = torch.stack([c @ b for _, b, c in exact]).sum(0)
    assert_near(to_features, expected, 1e-5 if kind == torch.float32 else 1e-2)
    assert_near(to_weights, torch.stack([c.mT @ a for a, _, c in exact]).sum(0), 1e-5)
    assert_near(to_bias, g[0].double().sum(1), 1e-5, scale=1.0)


@pytest.mark.parametrize("tasks, n, ways", [(1, 1, 2), (3, 7, 5), (2, 130, 20)])
@pytest.mark.parametrize("size", [1.0, 30.0], ids=["usual logits", "large logits"])
def test_cross_entropy(tasks: int, n: int, ways: int, size: float) -> None:
    logits, targets = size * draw(1, tasks, n, ways), torch.arange(tasks * n, device=DEVICE).view(tasks, n) % ways
    g, v = draw(2, tasks), draw(3, tasks, n, ways)

    def by_task(logits: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([F.cross_entropy(*task) for task in zip(logits, targets, strict=True)])

    with poisoned():
        found = of_orders(head.cross_entropy, logits, targets, g, v)
    expected = of_orders(by_task, logits.double(), targets, g.double(), v.double())
    for order, value in found.items():
        assert_near(value, expected[order], 1e-5, scale=size if order == "losses" else 0.1 / n, what=order)


def test_cross_entropy_leaves_ignored_examples_out_and_knows_no_other_classes() -> None:
    logits, targets = draw(1, 2, 6, 3), torch.tensor([[0, -100, 2, 1, -100, 0], [1, 1, 1, 0, 2, 2]], device=DEVICE)
    g, v = draw(2, 2), draw(3, 2, 6, 3)

    def by_task(logits: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([F.cross_entropy(*task) for task in zip(logits, targets, strict=True)])

    found = of_orders(head.cross_entropy, logits, targets, g, v)
    expected = of_orders(by_task, logits.double(), targets, g.double(), v.double())
    for order, value in found.items():
        assert_near(value, expected[order], 1e-5, what=order)
    targets[1, 0] = 3
    first, second = head.cross_entropy(logits, targets)
    assert first.isfinite() and second.isnan()


def of_orders(loss: Any, logits: Tensor, targets: Tensor, g: Tensor, v: Tensor) -> dict[str, Tensor]:
    logits, g = logits.clone().requires_grad_(), g.clone().requires_grad_()
    losses = loss(logits, targets)
    (gradient,) = torch.autograd.grad(losses, logits, g, create_graph=True)
    by_logits, by_g = torch.autograd.grad(gradient, (logits, g), v)
    return {"losses": losses, "gradient": gradient, "second, by logits": by_logits, "second, by g": by_g}


def test_cross_entropy_of_an_expanded_gradient_and_any_layout() -> None:
    logits = draw(1, 5, 3, 4).permute(1, 2, 0)  # [3, 4, 5]
    targets = torch.arange(12, device=DEVICE).view(4, 3).mT % 5
    wanted = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
    leaf = logits.clone().requires_grad_()
    loss = head.cross_entropy(leaf, targets).mean()  # its gradient comes as one number for all tasks
    assert_near(loss, wanted, 1e-6)
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    exact = logits.double().clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(exact.flatten(0, 1), targets.flatten()), exact, create_graph=True)
    assert_near(gradient, expected, 1e-5)
    assert_near(
        *(torch.autograd.grad(of.square().sum(), x)[0] for of, x in ((gradient, leaf), (expected, exact))), 1e-5
    )


SHARED = {
    "usual": (3, 50, 1.0),
    "one task": (1, 7, 1.0),
    "several programs": (2, 2 * sharing.ELEMENTS + 5, 1.0),
    "small": (2, 50, 1e-30),
    "large": (2, 50, 1e30),
}


@pytest.mark.parametrize("tasks, size, scale", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("seen", [False, True], ids=["first iteration", "later iteration"])
def test_share(tasks: int, size: int, scale: float, seen: bool) -> None:
    given = draw(1, tasks, size), draw(2, 3), draw(3, 3), draw(4, size) / size**0.5, draw(5, tasks, size)
    known = torch.tensor(seen, device=DEVICE)
    expected = shared_by(in_plain_operations, known, scale, *(part.double() for part in given))
    with poisoned():
        found = shared_by(sharing.share, known, scale, *given)
    for (what, value), exact in zip(found.items(), expected.values(), strict=True):
        assert_near(value, exact, 1e-5, scale=1.0 if what in ("by m", "by lam") else None, what=what)


def in_plain_operations(gradients: Tensor, m: Tensor, lam: Tensor, stored: Tensor, seen: Tensor, step: int) -> Any:
    memory = {"ghat": {"w": stored.expand(len(m), -1)}, "seen": seen}
    direction, running = together(gs.share_gradients(), {"w": gradients}, {"m": m, "lam": lam}, memory, step)
    return direction["w"], running["w"]


def shared_by(
    share: Any, seen: Tensor, scale: float, gradients: Tensor, m: Tensor, lam: Tensor, stored: Tensor, v: Tensor
) -> dict[str, Tensor]:
    leaves = [(gradients * scale).requires_grad_(), m.clone().requires_grad_(), lam.clone().requires_grad_()]
    direction, running = share(*leaves, stored, seen, 1)
    to_gradients, to_m, to_lam = torch.autograd.grad(direction, leaves, v)
    # a small sum has a large derivative: as a share of it, so that one tolerance fits all
    least = min(scale, 1.0)
    return {
        "direction": direction / max(scale, 1.0),
        "running": running,
        "by gradients": to_gradients * least,
        "by m": to_m,
        "by lam": to_lam / max(scale, 1.0),
    }


@pytest.mark.parametrize("seen", [False, True], ids=["first iteration", "later iteration"])
def test_sharing_of_gradients_that_cancel(seen: bool) -> None:
    one, v, stored = draw(1, 40), draw(2, 2, 40), draw(3, 40)
    zeros = torch.zeros(3, device=DEVICE)
    inputs = torch.stack([one, -one]), zeros, zeros, stored, v
    found = shared_by(sharing.share, torch.tensor(seen, device=DEVICE), 1.0, *inputs)
    expected = shared_by(
        in_plain_operations, torch.tensor(seen, device=DEVICE), 1.0, *(part.double() for part in inputs)
    )
    for (what, value), exact in zip(found.items(), expected.values(), strict=True):
        assert_near(value, exact, 1e-5, what=what)
    if not seen:
        assert (found["running"] == 0).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's sums
@pytest.mark.parametrize("seen", [False, True], ids=["first iteration", "later iteration"])
@pytest.mark.parametrize("large", [1.0, 2e38], ids=["usual", "sums too large for a number"])
def test_sharing_with_a_task_that_diverges(seen: bool, large: float) -> None:
    gradients, zeros, v = draw(1, 4, 40), torch.zeros(3, device=DEVICE), draw(2, 4, 40)
    gradients[1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    gradients[:, 7], gradients[:, 9] = large, -large
    inputs = gradients, zeros, zeros, draw(3, 40), v
    known = torch.tensor(seen, device=DEVICE)
    found, expected = (shared_by(share, known, 1.0, *inputs) for share in (sharing.share, in_plain_operations))
    assert found["running"].isfinite().all()
    assert torch.equal(found["direction"].isfinite(), gradients.isfinite())
    for what in ("running", "by gradients", "by m"):
        assert_near(found[what], expected[what].double(), 1e-5, what=what)
    finite = gradients.isfinite() & (gradients.abs() < 1e38)
    assert_near(found["direction"][finite], expected["direction"][finite].double(), 1e-5)


RULES = {
    "conditioned": gs.GradientSharing(conditioned=True),
    "batch only": controls.BatchOnly(),
    "memory only": controls.MemoryOnly(),
}


def usual(gradients: Tensor) -> None: ...


def with_a_task_of_zeros(gradients: Tensor) -> None:
    gradients[1] = 0


def with_a_task_that_diverges(gradients: Tensor) -> None:
    gradients[1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("sharing", RULES.values(), ids=RULES)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("change", [usual, with_a_task_of_zeros, with_a_task_that_diverges])
@pytest.mark.parametrize("seen", [False, True], ids=["first iteration", "later iteration"])
def test_other_ways_of_sharing(seen: bool, change: Any, scale: float, sharing: Any) -> None:
    rule, gradients = sharing.rule(), draw(1, 3, 50)
    change(gradients)
    learned, _ = rule.init({"w": gradients[0]}, 2)
    learned = {name: draw(seed, 2) for seed, name in enumerate(sorted(learned), start=2)}
    stored, v = seen * draw(6, 2, 50), draw(7, 3, 50)

    def by(update: Any, kind: torch.dtype) -> dict[str, Tensor]:
        own = (gradients * scale).to(kind).requires_grad_()
        values = {name: value.to(kind).requires_grad_() for name, value in learned.items()}
        memory = {"ghat": {"w": stored.to(kind)}, "seen": torch.tensor(seen, device=DEVICE)}
        direction, running = together(rule, {"w": own}, values, memory, 1, update)
        leaves = {"gradients": own, **values}
        by = torch.autograd.grad(direction["w"], list(leaves.values()), v.to(kind), allow_unused=True)
        by_leaf = {
            name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), by, strict=True)
        }
        return {"direction": direction["w"], "running": running["w"], **by_leaf}

    with poisoned():
        found = by(with_programs(rule).update, torch.float32)
    for what, exact in by(rule.update, torch.float64).items():
        value = found[what]
        usual_size = {"running": 1.0, "m": 1.0, "gradients": 1 / min(scale, 1.0)}.get(what, max(scale, 1.0))
        if what == "gradients":
            value, exact = value[[0, 2]], exact[[0, 2]]  # those of a task that diverges are of no use
        assert torch.equal(value.isfinite(), exact.isfinite()), what
        finite = exact.isfinite()
        assert_near(value[finite], exact[finite], 1e-5, scale=usual_size, what=what)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's exp(200)
def test_a_closed_gate_leaves_every_gradient_as_it_is() -> None:
    gradients, closed = draw(1, 3, 30), torch.full((2,), -200.0, device=DEVICE)
    seen = torch.tensor(True, device=DEVICE)
    direction, _ = sharing.share(gradients, torch.zeros_like(closed), closed, draw(2, 30), seen, 1)
    assert torch.equal(direction, gradients)
    direction, running = sharing.share(gradients, torch.zeros_like(closed), -closed, draw(2, 30), seen, 1)
    assert torch.equal(direction, running.expand(3, -1))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
def test_sharing_of_gradients_near_the_smallest_number_there_is() -> None:
    zeros, gradients = torch.zeros(3, device=DEVICE), draw(1, 2, 40) * 1e-40
    direction, running = sharing.share(gradients, zeros, zeros, draw(2, 40), torch.tensor(False, device=DEVICE), 1)
    assert direction.isfinite().all()
    assert running.norm().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("module", [convolution, first_block, head, pooled_norm, sharing])
def test_every_program_waits_for_those_before_it(module: Any) -> None:
    """It may be launched before they have ended, so that anything it reads earlier could be old."""
    for function in ast.parse(inspect.getsource(module)).body:
        is_program = isinstance(function, ast.FunctionDef) and any(
            "jit" in ast.unparse(d) for d in function.decorator_list
        )
        if is_program and not function.name.startswith("_"):
            first, *_ = function.body[ast.get_docstring(function) is not None :]
            assert ast.unparse(first) == "wait()", function.name


def test_every_launch_may_overlap() -> None:
    for module in (convolution, first_block, head, pooled_norm, sharing):
        for call in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
                assert any(ast.unparse(given) == "**OVERLAPPED" for given in call.keywords), ast.unparse(call.func)
