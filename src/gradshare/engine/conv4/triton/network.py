"""The whole of Conv4 as one function of all weights, with its own first and second derivative.

A block is convolution - batch norm - max pool - leaky ReLU. With z = conv(x, w), y its normalised form, P the
derivative of y by z (see normalisation.py), and a gradient g by the block's output taken back through activation and
pooling as a (one element of each window, zero elsewhere):

    first order   dz = gain P(a)            dx = conv'(dz, w)         dw = patches(x)^T dz

The inner loop asks for dw, and the outer gradient comes back through it as V, and as v through dx from the block below:

    q  = conv(v, w) + conv(x, V)            what comes back to dz
    to g: gain P(q) at the element that pooling took: the v of the block above
    cz = gain P(c) + (what dz's dependence on z gives)     c: the outer gradient by the block's own output
    to x: conv'(cz, w) + conv'(dz, V)       to w: patches(x)^T cz + patches(v)^T dz

q goes up through the blocks, and cz down; each line is one program for both its terms. The first block has programs of
its own (stem.py). A bias before batch norm changes nothing, so it is not applied, and its gradient is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradshare.engine.conv4.triton import filters, first_block, launch, linear
from gradshare.engine.conv4.triton.first_block import Moments, Patches
from gradshare.engine.conv4.triton.launch import Second, Sums
from gradshare.engine.conv4.triton.plan import Plan
from gradshare.errors import UserError

NOTHING = torch.empty(0)


class _Block(NamedTuple):
    """What a block leaves for its derivatives. The first one's `x` and `z` are not kept: `_Run.patches` gives them."""

    x: Tensor
    z: Tensor
    statistics: Tensor  # [tasks, 2, C]: mean, 1 / deviation
    peak: Tensor
    code: Tensor
    positions: int


@dataclass
class _Run:
    """A run of the network: what is kept for its derivatives, and what these leave for each other."""

    plan: Plan
    inner: bool
    patches: Patches
    flat: Tensor  # [tasks, P]
    weights: Tensor  # the same in the type of the activations
    norms: Tensor  # [blocks, 2, C]: gain, bias
    moments: Moments  # of the first block
    blocks: list[_Block]
    features: Tensor  # [tasks, n, H*W*C]
    first: _First | None = None
    up: _Up | None = None


class _First(NamedTuple):
    """What the first derivative leaves; lists by block."""

    g: Tensor  # the gradient by the logits
    gradients: list[Tensor]  # by each block's output
    means: list[Tensor]  # of a and a y
    dz: list[Tensor]  # the first block's is not kept
    sparse_a: Tensor  # the first block's X^T a


class _Up(NamedTuple):
    """What the way up through the first derivative leaves."""

    flat: Tensor  # what came back to the inner loop's gradient
    weights: Tensor  # the same in the type of the activations
    v: list[Tensor]  # what comes back to each block's gradient by its output
    q: list[Tensor]  # the first block's is not kept
    means_q: list[Tensor]
    means_aq: list[Tensor]
    cross: Moments  # of the first block


def network(flat: Tensor, norms: Tensor, patches: Patches, plan: Plan, inner: bool) -> Tensor:  # [tasks, n, ways]
    """Logits.

    Args:
        flat: all adapted weights, [tasks, P], float32.
        norms: gain and bias of batch norm, [blocks, 2, C].
        patches: the images.
        inner: whether the inner loop differentiates it, so that the outer one differentiates it twice.
    """
    return _Network.apply(flat, norms, patches, plan, inner)[0]


class _Network(torch.autograd.Function):
    """Its second output carries nothing: the first derivative depends on it, so the outer pass goes there first."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, norms: Tensor, patches: Patches, plan: Plan, inner: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.run, logits = _forward(flat, norms, patches, plan, inner)
        ctx.set_materialize_grads(False)
        order = flat.new_empty(())
        ctx.save_for_backward(flat, norms, order)
        return logits, order

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        run = ctx.run
        if run is None:
            raise UserError("the fast kernels keep nothing for a second pass over one graph; use precision='float32'")
        if torch.is_grad_enabled():  # the inner loop's gradient, to be differentiated again
            if not run.inner or run.first is not None:
                raise UserError("the fast kernels have two derivatives; for a third use precision='float32'")
            return _FirstDerivative.apply(g, *ctx.saved_tensors, run), None, None, None, None
        ctx.run = None
        if g is None:  # the loss is linear in the logits, so that only the inner loop's gradient has one
            g = torch.zeros_like(run.first.g)
        to_flat, means = _first(run, g) if run.up is None else _second(run, g)
        to_norms = _to_norms(run, means) if ctx.needs_input_grad[1] else None
        return to_flat, to_norms, None, None, None


class _FirstDerivative(torch.autograd.Function):
    """The gradient by all weights. Its own derivative is that by g alone; the rest is left for the network's."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, flat: Tensor, norms: Tensor, order: Tensor, run: _Run) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(order)
        return _first(run, g)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return _climb(ctx.run, v.contiguous()), None, None, order.detach(), None


def _forward(flat: Tensor, norms: Tensor, patches: Patches, plan: Plan, inner: bool) -> tuple[_Run, Tensor]:
    weights = flat.to(patches.x.dtype)
    stem = plan.filters[0].of(weights)
    moments = first_block.moments(patches, stem, plan.eps[0])
    out, peak, code = first_block.forward(patches, stem, moments, norms[0, 0], norms[0, 1], plan.slope, plan.precision)
    blocks = [_Block(NOTHING, NOTHING, moments.statistics, peak, code, patches.positions)]
    for layer, part in enumerate(plan.filters[1:], start=1):
        x = out
        z, statistics = launch.convolve(
            [(x, part.of(weights))], part.columns, 9, plan.precision, sums=Sums("moments", eps=plan.eps[layer])
        )
        out, peak, code = launch.pool(z, statistics, norms[layer, 0], norms[layer, 1], plan.slope)
        blocks.append(_Block(x, z, statistics, peak, code, z[0].numel() // z.shape[-1]))
    features = out.flatten(2)
    logits = linear.scores([(features, plan.head.of(flat))], plan.head_bias.of(flat))
    run = _Run(plan, inner, patches, flat.detach(), weights, norms.detach(), moments, blocks, features)
    return run, logits


class _Sums:
    """The gradient by all weights, its sums over positions taken in parts."""

    def __init__(self, run: _Run) -> None:
        plan, place = run.plan, run.flat.device
        tasks = len(run.flat)
        self.plan = plan
        self.parts = [
            filters.splits(tasks, block.positions, part.rows, plan.precision, place)
            for block, part in zip(run.blocks[1:], plan.filters[1:], strict=True)
        ]
        sums = [(plan.filters[0], first_block.parts(run.patches))]
        sums += [(part, parts) for part, (parts, _) in zip(plan.filters[1:], self.parts, strict=True)]
        sums += [(plan.head, 1), (plan.head_bias, 1)]
        wanted = tuple((part.offset, parts, part.rows * part.columns) for part, parts in sums)
        self.rooms = filters.rooms(wanted, tasks, plan.size, place)
        self.room = self.rooms.empty()
        self.aside = launch.Aside(place)

    def stem(self, run: _Run, gradient: Tensor) -> None:
        room = self.room[self.rooms.slices[0]]
        first_block.correlate(run.patches, gradient, run.blocks[0].code, self.plan.slope, self.plan.precision, room)

    def block(self, layer: int, pairs: list[launch.Pair]) -> None:
        with self.aside(pairs):
            room = self.room[self.rooms.slices[layer]]
            filters.correlate(pairs, 9, self.plan.precision, room, self.parts[layer - 1])

    def head(self, pairs: list[launch.Pair]) -> None:
        with self.aside(pairs):
            linear.towards_weights(pairs, *(self.room[self.rooms.slices[place]] for place in (-2, -1)))

    def finish(self) -> Tensor:  # [tasks, P]
        self.aside.join()
        return self.rooms.add(self.room)


def _first(run: _Run, g: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The gradient by all weights; and the means of a and a y of each block, which give that by the norms."""
    plan, sums, g = run.plan, _Sums(run), g.contiguous()
    gradient, means = _through_head(run, [(g, run.flat)])
    sums.head([(run.features, g)])
    all_gradients, all_means, all_dz = [gradient], [means], []
    for layer in reversed(range(1, len(run.blocks))):
        block = run.blocks[layer]
        dz = launch.spread(block.z, block.statistics, run.norms[layer, 0], block.code, gradient, means, plan.slope)
        sums.block(layer, [(block.x, dz)])
        gradient, means = _to_images(run, layer, [(dz, plan.filters[layer].of(run.weights))])
        all_gradients.append(gradient)
        all_means.append(means)
        all_dz.append(dz)
    sums.stem(run, gradient)
    total = sums.finish()
    sparse_a = first_block.finish(plan.filters[0].of(total), run.patches, run.moments, run.norms[0, 0], means)
    if run.inner:
        run.first = _First(g, all_gradients[::-1], all_means[::-1], [NOTHING, *all_dz[::-1]], sparse_a)
    return total, all_means[::-1]


def _climb(run: _Run, v: Tensor) -> Tensor:
    """From what comes back to the inner loop's gradient, [tasks, P], to that by g, through the blocks upwards."""
    plan, weights, first = run.plan, run.weights, run.first
    assert first is not None
    weights_v = v.to(weights.dtype)
    bottom, stem_v = run.blocks[0], plan.filters[0].of(weights_v)
    cross = first_block.cross_moments(run.patches, stem_v, run.moments)
    signal, aq = first_block.gather(
        run.patches, stem_v, bottom.peak, bottom.code, first.gradients[0], run.moments, run.norms[0, 0], cross,
        first.means[0], plan.slope, plan.precision,
    )  # fmt: skip
    up = _Up(v, weights_v, [signal], [NOTHING], [cross.statistics], [aq], cross)
    for layer in range(1, len(run.blocks)):
        block, part = run.blocks[layer], plan.filters[layer]
        pairs = [(block.x, part.of(weights_v)), (signal, part.of(weights))]
        q, means_q = launch.convolve(
            pairs, part.columns, 9, plan.precision, sums=Sums("means", block.z, block.statistics)
        )
        signal, aq = launch.gather(
            q, block.peak, block.code, first.gradients[layer], block.statistics, run.norms[layer, 0], means_q,
            first.means[layer], plan.slope,
        )  # fmt: skip
        up.v.append(signal)
        up.q.append(q)
        up.means_q.append(means_q)
        up.means_aq.append(aq)
    run.up = up
    pairs = [(run.features, plan.head.of(v)), (signal.view_as(run.features), plan.head.of(run.flat))]
    return linear.scores(pairs, plan.head_bias.of(v))


def _second(run: _Run, c: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The outer gradient by all weights, through the network and through its first derivative; and the means."""
    plan, first, up, sums, c = run.plan, run.first, run.up, _Sums(run), c.contiguous()
    assert first is not None and up is not None
    gradient, means = _through_head(run, [(c, run.flat), (first.g, up.flat)])
    sums.head([(run.features, c), (up.v[-1].view_as(run.features), first.g)])
    all_means = [means]
    for layer in reversed(range(1, len(run.blocks))):
        block, part = run.blocks[layer], plan.filters[layer]
        cz = launch.spread(
            block.z, block.statistics, run.norms[layer, 0], block.code, first.gradients[layer], first.means[layer],
            plan.slope, Second(up.q[layer], up.means_q[layer], up.means_aq[layer], gradient, means),
        )  # fmt: skip
        sums.block(layer, [(block.x, cz), (up.v[layer - 1], first.dz[layer])])
        gradient, means = _to_images(run, layer, [(cz, part.of(run.weights)), (first.dz[layer], part.of(up.weights))])
        all_means.append(means)
    sums.stem(run, gradient)
    total = sums.finish()
    more = first_block.Second(first.sparse_a, up.cross, up.means_aq[0], means)
    first_block.finish(plan.filters[0].of(total), run.patches, run.moments, run.norms[0, 0], first.means[0], more)
    return total, all_means[::-1]


def _to_images(run: _Run, layer: int, pairs: list[launch.Pair]) -> tuple[Tensor, Tensor]:
    """The gradient by the images of a block, which are the output of the block below, and that one's means."""
    below, plan = run.blocks[layer - 1], run.plan
    sums = Sums("pooled", below.peak, code=below.code, over=below.positions, slope=plan.slope)
    return launch.convolve(pairs, below.peak.shape[-1], 9, plan.precision, adjoint=True, sums=sums)


def _through_head(run: _Run, pairs: list[launch.Pair]) -> tuple[Tensor, Tensor]:
    """Gradients by logits and the weights they go through -> the gradient by the last block's output, and its means."""
    top = run.blocks[-1]
    through = [(g, run.plan.head.of(weights)) for g, weights in pairs]
    gradient = linear.towards_features(through, run.features.dtype).view_as(top.peak)
    return gradient, launch.pooled_means(gradient, top.peak, top.code, top.positions, run.plan.slope)


def _to_norms(run: _Run, means: list[Tensor]) -> Tensor:  # [blocks, 2, C]
    """Gradients by gain, sum(a y), and bias, sum(a), over all tasks."""
    more = None if run.up is None else run.up.means_aq
    return launch.to_norms(means, more, [block.positions for block in run.blocks])
