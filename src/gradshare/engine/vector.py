"""All adapted weights of a task as one vector: a rule of a few operations instead of a few for each weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Size, Tensor

from gradshare.method.rules import Tree, Weights

ALL = "weights"  # the one name under which an inner rule sees all weights


class Vector:
    """Weights one after the other, then zeros up to a multiple of 16, at which the vector of the next task begins.

    Filters have their channels last, as convolutions take them.

    Args:
        shapes: of the weights, without the task axis.
    """

    def __init__(self, shapes: Mapping[str, Size]) -> None:
        self.shapes = shapes
        self.sizes = [shape.numel() for shape in shapes.values()]
        self._zeros = -sum(self.sizes) % 16
        self.sizes[-1] += self._zeros

    def pack(self, weights: Weights) -> Tensor:  # {name: [..., *shape]} -> [..., P]
        parts = [(weights[name], len(shape)) for name, shape in self.shapes.items()]
        flat = [(w.movedim(-3, -1) if dims == 4 else w).flatten(w.dim() - dims) for w, dims in parts]
        return torch.cat([*flat, flat[0].new_zeros(*flat[0].shape[:-1], self._zeros)], -1)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        parts = zip(self.shapes.items(), packed.split(self.sizes, -1), strict=True)
        return {name: _in_shape(part, shape) for (name, shape), part in parts}


def _in_shape(part: Tensor, shape: Size) -> Tensor:
    part = part[..., : shape.numel()]
    if len(shape) != 4:
        return part.view(*part.shape[:-1], *shape)
    outputs, inputs, height, width = shape
    return part.view(*part.shape[:-1], outputs, height, width, inputs).movedim(-1, -3)


def packed_tree(tree: Tree, shapes: Mapping[str, Size], sizes: list[int], pack: Callable[[Weights], Tensor]) -> Tree:
    """A rule's learned values or memory, those that belong to weights in one vector.

    Args:
        sizes: how many elements of the vector each weight has.
    """
    if set(tree) != set(shapes):
        return {n: packed_tree(v, shapes, sizes, pack) if isinstance(v, dict) else v for n, v in tree.items()}
    if all(tree[name].shape[-len(shape) :] == shape for name, shape in shapes.items()):
        return {ALL: pack(tree)}
    # a value for each weight tensor, [...]: the same for all its elements
    spread = [tree[name].unsqueeze(-1) for name in shapes]
    return {ALL: torch.cat([v.expand(*v.shape[:-1], n) for v, n in zip(spread, sizes, strict=True)], -1)}


def unpacked_tree(tree: Tree, unpack: Callable[[Tensor], Tree]) -> Tree:
    """The reverse of `packed_tree`, for a memory."""
    if set(tree) == {ALL}:
        return unpack(tree[ALL])
    return {n: unpacked_tree(v, unpack) if isinstance(v, dict) else v for n, v in tree.items()}
