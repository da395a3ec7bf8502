"""Conv4 on the kernels: the weights of a task in one vector, the images as patches, channels last."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradshare.engine.backends import Precision
from gradshare.engine.conv4.triton.first_block import Patches, patches
from gradshare.engine.conv4.triton.network import Part, Plan, features, network
from gradshare.engine.conv4.triton.programs import with_programs
from gradshare.engine.networks import CONV4_HEAD, Conv4
from gradshare.engine.vmapped import ALL, Kept, packed_tree, unpacked_tree
from gradshare.errors import UserError
from gradshare.method.episodes import Inputs
from gradshare.method.rules import InnerStep, Moved, Rule, Tree, Weights

NORMS, FIXED = "norms", "fixed"  # what all tasks have in common


class TritonConv4:
    """Conv4 with all filters and the head of a task in one vector.

    Weights that the inner loop does not adapt are zero there. They are in a vector of their own, which all tasks have
    in common. If the head alone is adapted, what comes into it is computed once for a batch.

    A filter [O, C, 3, 3] is kept as [3 * 3 * C, O], its rows padded with zeros to a multiple of 16 in the first layer;
    the head [ways, C * H * W] as [ways, H * W * C]; and each weight is padded to a multiple of 16 elements. The padding
    sees zeros only, so its gradient is zero too.
    """

    def __init__(self, module: Conv4, adapted: tuple[str, ...], any_layout: bool, precision: Precision) -> None:
        self.module, self.adapted, self.any_layout, self.precision = module, adapted, any_layout, precision
        self.layers = len(module.convs)
        self.shapes = {name: p.shape for name, p in module.named_parameters() if not name.startswith("norms")}
        self.fixed = [name for name in self.shapes if name not in adapted]

    @cached_property
    def _orders(self) -> dict[str, Tensor]:
        """For each weight: which of its elements (-1: none) is at each place of its part of the vector."""
        orders = {}
        for name, shape in self.shapes.items():
            numbers = torch.arange(shape.numel()).view(shape)
            if name.endswith("bias"):
                order = numbers
            elif name == "head.weight":
                filters = self.shapes[f"convs.{self.layers - 1}.weight"][0]
                side = (size // 16 for size in self.module.image[1:])
                order = numbers.view(shape[0], filters, *side).permute(0, 2, 3, 1)
            else:
                order = numbers.permute(2, 3, 1, 0)
                if name == "convs.0.weight":
                    rows = order.flatten(0, 2)
                    order = F.pad(rows, (0, 0, 0, -len(rows) % 16), value=-1)
            order = order.flatten()
            orders[name] = F.pad(order, (0, -len(order) % 16), value=-1)
        return orders

    @cached_property
    def _sizes(self) -> list[int]:
        return [len(order) for order in self._orders.values()]

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Packed from named, and named from packed, as indices into all elements and one zero after them."""
        count = sum(shape.numel() for shape in self.shapes.values())
        packed, offset = [], 0
        for name, order in self._orders.items():
            packed.append(torch.where(order < 0, count, order + offset))
            offset += self.shapes[name].numel()
        index = torch.cat(packed)
        named = torch.zeros(count + 1, dtype=torch.long)
        named[index] = torch.arange(len(index))
        device = self.module.head.weight.device
        return index.to(device), named.to(device)

    def _pack(self, weights: Mapping[str, Tensor]) -> Tensor:  # {name: [..., *shape]} -> [..., P]
        some, of = next((weights[name], self.shapes[name]) for name in self.shapes if name in weights)
        zero = some.new_zeros(()).expand(*some.shape[: some.dim() - len(of)], 1)
        flat = [
            weights[name].flatten(-len(shape)) if name in weights else zero.expand(*zero.shape[:-1], shape.numel())
            for name, shape in self.shapes.items()
        ]
        return _Reorder.apply(torch.cat([*flat, zero], -1), *self._places)

    def _unpack(self, packed: Tensor) -> dict[str, Tensor]:
        index, named = self._places
        flat = _Reorder.apply(packed, named, index)
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = torch.split(flat, [*sizes, 1], -1)
        return {
            name: part.view(*part.shape[:-1], *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=False)
            if name in self.adapted
        }

    def start(self, params: Mapping[str, Tensor]) -> Weights:
        return {ALL: self._pack({name: params[name] for name in self.adapted})}

    def by_name(self, fast: Weights) -> Weights:
        return self._unpack(fast[ALL])

    def pack(self, tree: Tree) -> Tree:
        """A rule's learned values or memory, those that belong to weights packed."""
        adapted = {name: self.shapes[name] for name in self.adapted}
        return packed_tree(tree, adapted, self._pack) if self.any_layout else tree

    def unpack(self, tree: Tree) -> Tree:
        """The reverse of `pack`, for a memory."""
        return unpacked_tree(tree, self._unpack) if self.any_layout else tree

    def rule(self, rule: Rule, one_process: bool) -> Rule:
        """The rule, by fused programs where there are some; one that must see the weights by name gets them so."""
        if not self.any_layout:
            return ByName(rule, self)
        return with_programs(rule) if one_process else rule

    def inputs(self, x: Inputs, mask: Tensor | None = None) -> Patches:  # [tasks, n, C, H, W]
        """The images as 3x3 patches, in the type of the activations. The same for all steps."""
        if mask is not None or not isinstance(x, Tensor):
            what = "masks" if mask is not None else "inputs of several tensors"
            raise UserError(f"the fast kernels have no {what}; use precision='float32'")
        if x.requires_grad:
            raise UserError("the fast kernels give no gradient by the images; use precision='float32'")
        if x.shape[2:] != self.module.image:
            raise UserError(f"the model takes images of {list(self.module.image)}, not {list(x.shape[2:])}")
        kept = Kept() if CONV4_HEAD.issuperset(self.adapted) else None
        return patches(x, self.precision)._replace(kept=kept)

    def shared(self, shared: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Gain and bias of batch norm, [blocks, 2, C], and the other weights that are not adapted, as one vector."""
        names = [f"norms.{layer}.{part}" for layer in range(self.layers) for part in ("weight", "bias")]
        frozen = self.module.get_parameter  # what is not trained is in no state
        found = {n: shared[n] if n in shared else frozen(n).detach() for n in [*names, *self.fixed]}
        norms = torch.stack([found.pop(name) for name in names]).unflatten(0, (self.layers, 2))
        return {NORMS: norms, FIXED: self._pack(found)} if found else {NORMS: norms}

    @cached_property
    def _moves(self) -> Tensor:  # [P]
        """One for each element of an adapted weight, zero for all others."""
        return self._pack({name: torch.ones_like(self.module.get_parameter(name)) for name in self.adapted}).detach()

    @cached_property
    def _plan(self) -> Plan:
        offsets = dict(zip(self.shapes, itertools.accumulate(self._sizes, initial=0), strict=False))
        convs = [f"convs.{layer}.weight" for layer in range(self.layers)]
        ways, features = self.shapes["head.weight"]
        filters = [
            Part(offsets[name], len(self._orders[name]) // self.shapes[name][0], self.shapes[name][0]) for name in convs
        ]
        return Plan(
            tuple(filters),
            Part(offsets["head.weight"], ways, features),
            Part(offsets["head.bias"], 1, ways),
            sum(self._sizes),
            tuple(cast(float, norm.eps) for norm in self.module.norms),
            self.module.SLOPE,
            self.precision,
        )

    def forward(self, fast: Weights, shared: Mapping[str, Tensor], x: Patches, inner: bool) -> Tensor:
        """Logits, [tasks, n, ways]."""
        flat = torch.addcmul(shared[FIXED], fast[ALL], self._moves) if FIXED in shared else fast[ALL]
        if x.kept is None:
            return network(flat, shared[NORMS], x, self._plan, inner)
        into = x.kept.by(shared)
        if into is None:
            into = features(shared[FIXED].expand_as(flat), shared[NORMS], x, self._plan)
            x.kept.into, x.kept.shared = into, shared
        return torch.baddbmm(self._plan.head_bias.of(flat), into, self._plan.head.of(flat).mT)


@dataclass(frozen=True)
class ByName(Rule):
    """A rule that needs the weights by name, on a network that has them in one vector."""

    inner: Rule
    network: TritonConv4
    name: str = field(default="by_name", init=False)

    @property
    def second_order(self) -> bool:  # type: ignore[override]
        return getattr(self.inner, "second_order", True)

    def update(self, at: InnerStep) -> Moved:
        gradients, weights = (self.network.by_name(part) for part in (at.gradients, at.weights))
        moved = self.inner.update(at._replace(gradients=gradients, weights=weights))
        return moved._replace(direction={ALL: self.network._pack(moved.direction)})


class _Reorder(torch.autograd.Function):
    """x[..., index]; `back` is the index that undoes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(-1, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return g.index_select(-1, back), None, None
