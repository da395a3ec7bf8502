"""The network's kernels against plain float64 formulas, on the same inputs.

Without a GPU they run in Triton's interpreter, in float32: its bfloat16 is wrong. tests/stress/test_kernels.py has the
sizes and options that are left out here. On a GPU: pytest tests/engine tests/stress/test_kernels.py
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradshare.engine.conv4.triton import convolution, device, first_block, head, pooled_norm, sharing
from gradshare.engine.conv4.triton.convolution import Sums
from gradshare.engine.conv4.triton.first_block import Moments, Patches
from tests.support import formulas
from tests.support.kernel_tools import (
    CASES,
    DEVICE,
    EPS,
    GPU,
    SLOPE,
    Case,
    as_weights,
    assert_near,
    check_convolve,
    check_correlate,
    draw,
    means_of,
    name_of,
    poisoned,
    without_checks,
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch)
    if device.INTERPRETED:
        monkeypatch.setattr(device, "MOST_PARTS", 2)  # so that few programs need several rounds


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


USED = [(1, False, "moments"), (2, False, "means"), (1, True, "pooled"), (2, True, "pooled")]  # by the network
FEW = CASES if GPU else [CASES[0], CASES[3]]  # the last one has several tiles for a program


@pytest.mark.parametrize("case", FEW, ids=name_of)
@pytest.mark.parametrize("pairs, adjoint, sums", USED)
def test_convolve(case: Case, pairs: int, adjoint: bool, sums: str) -> None:
    check_convolve(case, pairs, adjoint, sums)


@pytest.mark.parametrize("case", FEW, ids=name_of)
@pytest.mark.parametrize("pairs, taps, finest", [(2, 9, False), (1, 9 if GPU else 1, True)])
def test_correlate(case: Case, pairs: int, taps: int, finest: bool) -> None:
    check_correlate(case, pairs, taps, finest)


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
    for found, expected in zip(as_bytes[:3], as_floats[:3], strict=True):
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
