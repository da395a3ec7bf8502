"""The whole of Conv4 as one function of all weights, with its own first and second derivative.

A block is convolution, batch norm, max pooling and leaky ReLU. Let z = conv(x, w), let y be z normalised, and let P be
the derivative of y with respect to z (see `engine/operations.py`). Let g be a gradient with respect to the block's
output, and a the same gradient taken back through activation and pooling: one element of each window, zero elsewhere.

    first order   dz = gain P(a)            dx = conv'(dz, w)         dw = patches(x)^T dz

The inner loop needs dw. The outer gradient comes back to dw as V, and to dx, from the block below, as v:

    q  = conv(v, w) + conv(x, V)            comes back to dz
    with respect to g:  gain P(q) at the pooled element: the v of the block above
    cz = gain P(c) + (a term because dz depends on z)      c: the outer gradient with respect to the block's output
    with respect to x:  conv'(cz, w) + conv'(dz, V)
    with respect to w:  patches(x)^T cz + patches(v)^T dz

q is computed from the first block to the last, cz from the last to the first. The two terms of a line are one GPU
program. The first block has programs of its own (`first_block.py`). A bias before batch norm has no effect, so it is
not added, and its gradient is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradshare.engine.backends import Precision
from gradshare.engine.conv4.triton import convolution, first_block, head, pooled_norm
from gradshare.engine.conv4.triton.convolution import Sums, convolve
from gradshare.engine.conv4.triton.device import ROUNDED, Pair, SideStream, factors
from gradshare.engine.conv4.triton.first_block import Moments, Patches
from gradshare.errors import UserError

NOTHING = torch.empty(0)


class Part(NamedTuple):
    """Where a weight matrix [rows, columns] is in the vector of all weights."""

    offset: int
    rows: int
    columns: int

    def of(self, flat: Tensor) -> Tensor:  # [tasks, P] -> [tasks, rows, columns]
        return flat[:, self.offset : self.offset + self.rows * self.columns].unflatten(1, (self.rows, self.columns))


@dataclass(frozen=True)
class Plan:
    """Static plan of the network: offsets, eps, slope, precision; no tensors."""

    filters: tuple[Part, ...]  # of each block
    head: Part
    head_bias: Part
    size: int  # length of the vector of all weights
    eps: tuple[float, ...]  # of each block's batch norm
    slope: float  # of leaky ReLU
    precision: Precision


def network(flat: Tensor, norms: Tensor, patches: Patches, plan: Plan, inner: bool) -> Tensor:  # [tasks, n, ways]
    """Compute the logits.

    Args:
        flat: all adapted weights, [tasks, P], float32.
        norms: gain and bias of batch norm, [blocks, 2, C].
        patches: the images.
        plan: where the weights are in `flat`, and the constants.
        inner: whether the inner loop differentiates the result, so that the outer loop needs a second derivative.
    """
    return _Network.apply(flat, norms, patches, plan, inner)[0]


def features(flat: Tensor, norms: Tensor, patches: Patches, plan: Plan) -> Tensor:  # [tasks, n, H*W*C], float32
    """What comes into the head; differentiable once. The weights of the head are not used."""
    return _Features.apply(flat, norms, patches, plan)


class _Block(NamedTuple):
    """What a block keeps for its derivatives. The first block keeps no `x` and `z`: `_Run.patches` replaces them."""

    x: Tensor
    z: Tensor
    statistics: Tensor  # [tasks, 2, C]: mean, 1 / standard deviation
    peak: Tensor
    code: Tensor
    positions: int


@dataclass
class _Run:
    """One run of the network: what is kept for its derivatives, and what they pass to each other."""

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
    tangent: _Tangent | None = None


class _First(NamedTuple):
    """Results of the first derivative; a list has an entry for each block."""

    g: Tensor  # gradient with respect to the logits
    gradients: list[Tensor]  # with respect to each block's output
    means: list[Tensor]  # of a and a y
    dz: list[Tensor]  # empty for the first block
    xa: Tensor  # the first block's X^T a


class _Tangent(NamedTuple):
    """Results of the derivative of the first derivative, computed from the first block to the last."""

    flat: Tensor  # what comes back to the inner loop's gradient
    weights: Tensor  # the same in the type of the activations
    v: list[Tensor]  # what comes back to the gradient with respect to each block's output
    q: list[Tensor]  # empty for the first block
    means_q: list[Tensor]
    means_aq: list[Tensor]
    cross: Moments  # of the first block


class _Network(torch.autograd.Function):
    """The second output is empty. The first derivative depends on it, so the outer backward pass visits that first."""

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
            raise UserError("the GPU kernels allow one backward pass over a graph; use precision='float32' for more")
        if torch.is_grad_enabled():  # the inner loop's gradient, which is differentiated again
            if not run.inner or run.first is not None:
                raise UserError("the GPU kernels have two derivatives; use precision='float32' for a third")
            return _FirstDerivative.apply(g, *ctx.saved_tensors, run), None, None, None, None
        ctx.run = None
        if g is None:  # the loss is linear in the logits, so the outer gradient comes only through the inner gradient
            g = torch.zeros_like(run.first.g)
        to_flat, means = _first(run, g) if run.tangent is None else _second(run, g)
        to_norms = _to_norms(run, means) if ctx.needs_input_grad[1] else None
        return to_flat, to_norms, None, None, None


class _Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, norms: Tensor, patches: Patches, plan: Plan) -> Tensor:
        ctx.run = _forward(flat, norms, patches, plan, inner=False)[0]
        return ctx.run.features.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        collected, top = _WeightsGradient(run), run.blocks[-1]
        collected.head([(run.features, g.new_zeros(*g.shape[:2], run.plan.head.rows))])
        to_flat, means = _first_of_body(run, collected, g.to(run.features.dtype).contiguous().view_as(top.peak))
        return to_flat, _to_norms(run, means) if ctx.needs_input_grad[1] else None, None, None


class _FirstDerivative(torch.autograd.Function):
    """The gradient with respect to all weights. Its backward pass returns only the part for g; `_Network` does the
    rest."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, flat: Tensor, norms: Tensor, order: Tensor, run: _Run) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(order)
        return _first(run, g)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return _tangent(ctx.run, v.contiguous()), None, None, order.detach(), None


def _forward(flat: Tensor, norms: Tensor, patches: Patches, plan: Plan, inner: bool) -> tuple[_Run, Tensor]:
    rounded = ROUNDED[plan.precision]
    weights = factors(flat, patches.x.dtype, rounded)
    filters = plan.filters[0].of(weights)
    moments = first_block.moments(patches, filters, plan.eps[0])
    out, peak, code = first_block.forward(
        patches, filters, moments, norms[0, 0], norms[0, 1], plan.slope, plan.precision
    )
    blocks = [_Block(NOTHING, NOTHING, moments.statistics, peak, code, patches.positions)]
    for layer, part in enumerate(plan.filters[1:], start=1):
        x = out
        sums = Sums.moments(plan.eps[layer])
        z, statistics = convolve([(x, part.of(weights))], part.columns, 9, plan.precision, sums=sums)
        exact = layer + 1 == len(plan.filters)  # the head computes in float32
        out, peak, code = pooled_norm.pool(
            z, statistics, norms[layer, 0], norms[layer, 1], plan.slope, rounded and not exact
        )
        blocks.append(_Block(x, z, statistics, peak, code, z[0].numel() // z.shape[-1]))
    features = out.flatten(2)
    logits = head.scores([(features, plan.head.of(flat))], plan.head_bias.of(flat))
    run = _Run(plan, inner, patches, flat.detach(), weights, norms.detach(), moments, blocks, features)
    return run, logits


class _WeightsGradient:
    """Collects the gradient with respect to all weights; its sums over positions are computed in parts."""

    def __init__(self, run: _Run) -> None:
        plan, place = run.plan, run.flat.device
        tasks = len(run.flat)
        self.plan = plan
        self.parts = [
            convolution.splits(tasks, block.positions, part.rows, plan.precision, place)
            for block, part in zip(run.blocks[1:], plan.filters[1:], strict=True)
        ]
        sums = [(plan.filters[0], first_block.parts(run.patches))]
        sums += [(part, parts) for part, (parts, _) in zip(plan.filters[1:], self.parts, strict=True)]
        sums += [(plan.head, 1), (plan.head_bias, 1)]
        wanted = tuple((part.offset, parts, part.rows * part.columns) for part, parts in sums)
        self.sums = convolution.partial_sums(wanted, tasks, plan.size, place)
        self.buffer = self.sums.buffer()
        self.aside = SideStream(place)

    def first_block(self, run: _Run, gradient: Tensor) -> None:
        target = self.buffer[self.sums.slices[0]]
        first_block.correlate(run.patches, gradient, run.blocks[0].code, self.plan.slope, self.plan.precision, target)

    def block(self, layer: int, pairs: list[Pair]) -> None:
        with self.aside(pairs):
            target = self.buffer[self.sums.slices[layer]]
            convolution.correlate(pairs, 9, self.plan.precision, target, self.parts[layer - 1])

    def head(self, pairs: list[Pair]) -> None:
        with self.aside(pairs):
            head.weights_gradient(pairs, *(self.buffer[self.sums.slices[place]] for place in (-2, -1)))

    def total(self) -> Tensor:  # [tasks, P]
        self.aside.join()
        return self.sums.add(self.buffer)


def _first(run: _Run, g: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the gradient with respect to all weights, and the means of a and a y of each block."""
    collected, g = _WeightsGradient(run), g.contiguous()
    gradient = _through_head(run, [(g, run.flat)])
    collected.head([(run.features, g)])
    return _first_of_body(run, collected, gradient, g)


def _first_of_body(
    run: _Run,
    collected: _WeightsGradient,
    gradient: Tensor,  # with respect to the last block's output
    g: Tensor | None = None,  # with respect to the logits, if the inner loop asks
) -> tuple[Tensor, list[Tensor]]:
    """The same from the last block on."""
    plan, means = run.plan, _top_means(run, gradient)
    all_gradients, all_means, all_dz = [gradient], [means], []
    for layer in reversed(range(1, len(run.blocks))):
        block = run.blocks[layer]
        dz = pooled_norm.scatter(
            block.z, block.statistics, run.norms[layer, 0], block.code, gradient, means, plan.slope,
            rounded=ROUNDED[plan.precision],
        )  # fmt: skip
        collected.block(layer, [(block.x, dz)])
        gradient, means = _to_images(run, layer, [(dz, plan.filters[layer].of(run.weights))])
        all_gradients.append(gradient)
        all_means.append(means)
        all_dz.append(dz)
    collected.first_block(run, gradient)
    total = collected.total()
    xa = first_block.finish(plan.filters[0].of(total), run.patches, run.moments, run.norms[0, 0], means)
    if run.inner and g is not None:
        run.first = _First(g, all_gradients[::-1], all_means[::-1], [NOTHING, *all_dz[::-1]], xa)
    return total, all_means[::-1]


def _tangent(run: _Run, v: Tensor) -> Tensor:
    """Return what comes back to g, from v [tasks, P], which comes back to the inner loop's gradient."""
    plan, weights, first = run.plan, run.weights, run.first
    assert first is not None
    rounded = ROUNDED[plan.precision]
    weights_v = factors(v, weights.dtype, rounded)
    bottom, filters_v = run.blocks[0], plan.filters[0].of(weights_v)
    cross = first_block.cross_moments(run.patches, filters_v, run.moments)
    signal, aq = first_block.gather(
        run.patches, filters_v, bottom.peak, bottom.code, first.gradients[0], run.moments, run.norms[0, 0], cross,
        first.means[0], plan.slope, plan.precision,
    )  # fmt: skip
    tangent = _Tangent(v, weights_v, [signal], [NOTHING], [cross.statistics], [aq], cross)
    for layer in range(1, len(run.blocks)):
        block, part = run.blocks[layer], plan.filters[layer]
        pairs = [(block.x, part.of(weights_v)), (signal, part.of(weights))]
        q, means_q = convolve(pairs, part.columns, 9, plan.precision, sums=Sums.means(block.z, block.statistics))
        signal, aq = pooled_norm.gather(
            q, block.peak, block.code, first.gradients[layer], block.statistics, run.norms[layer, 0], means_q,
            first.means[layer], plan.slope, rounded and layer + 1 < len(run.blocks),
        )  # fmt: skip
        tangent.v.append(signal)
        tangent.q.append(q)
        tangent.means_q.append(means_q)
        tangent.means_aq.append(aq)
    run.tangent = tangent
    pairs = [(run.features, plan.head.of(v)), (signal.view_as(run.features), plan.head.of(run.flat))]
    return head.scores(pairs, plan.head_bias.of(v))


def _second(run: _Run, c: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the outer gradient with respect to all weights, through the network and its first derivative, and the
    means."""
    plan, first, tangent, collected, c = run.plan, run.first, run.tangent, _WeightsGradient(run), c.contiguous()
    assert first is not None and tangent is not None
    gradient = _through_head(run, [(c, run.flat), (first.g, tangent.flat)])
    means = _top_means(run, gradient)
    collected.head([(run.features, c), (tangent.v[-1].view_as(run.features), first.g)])
    all_means = [means]
    for layer in reversed(range(1, len(run.blocks))):
        block, part = run.blocks[layer], plan.filters[layer]
        second = pooled_norm.SecondOrder(
            tangent.q[layer], tangent.means_q[layer], tangent.means_aq[layer], gradient, means
        )  # fmt: skip
        cz = pooled_norm.scatter(
            block.z, block.statistics, run.norms[layer, 0], block.code, first.gradients[layer], first.means[layer],
            plan.slope, second, ROUNDED[plan.precision],
        )  # fmt: skip
        collected.block(layer, [(block.x, cz), (tangent.v[layer - 1], first.dz[layer])])
        pairs = [(cz, part.of(run.weights)), (first.dz[layer], part.of(tangent.weights))]
        gradient, means = _to_images(run, layer, pairs)
        all_means.append(means)
    collected.first_block(run, gradient)
    total = collected.total()
    more = first_block.SecondOrder(first.xa, tangent.cross, tangent.means_aq[0], means)
    first_block.finish(plan.filters[0].of(total), run.patches, run.moments, run.norms[0, 0], first.means[0], more)
    return total, all_means[::-1]


def _to_images(run: _Run, layer: int, pairs: list[Pair]) -> tuple[Tensor, Tensor]:
    """Return the gradient with respect to a block's input, which is the output of the block below, and its means."""
    below, plan = run.blocks[layer - 1], run.plan
    sums = Sums.pooled(below.peak, below.code, below.positions, plan.slope)
    return convolve(pairs, below.peak.shape[-1], 9, plan.precision, adjoint=True, sums=sums)


def _through_head(run: _Run, pairs: list[Pair]) -> Tensor:
    """Return the gradient with respect to the last block's output, from pairs of a gradient with respect to the logits
    and the weights [tasks, P] of the head."""
    through = [(g, run.plan.head.of(weights)) for g, weights in pairs]
    return head.features_gradient(through, run.features.dtype).view_as(run.blocks[-1].peak)


def _top_means(run: _Run, gradient: Tensor) -> Tensor:
    """Return the means of a and a y of the last block, from the gradient with respect to its output."""
    top = run.blocks[-1]
    return pooled_norm.pooled_means(gradient, top.peak, top.code, top.positions, run.plan.slope)


def _to_norms(run: _Run, means: list[Tensor]) -> Tensor:  # [blocks, 2, C]
    """Return the gradients with respect to gain, sum(a y), and bias, sum(a), over all tasks."""
    more = None if run.tangent is None else run.tangent.means_aq
    return pooled_norm.norms_gradient(means, more, [block.positions for block in run.blocks])
