"""The state: everything that meta-training changes, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradshare.errors import UserError
from gradshare.method.rules import Tree


@dataclass(repr=False)
class MetaState:
    """Everything that meta-training changes, as nested dicts of tensors.

    Attributes:
        params: initial weights by their names in the module.
        learned: what else the outer loop learns: `["sharing"]["m"]`, `["sharing"]["lam"]`, `["rates"]`, `["per_step"]`.
        memory: `["sharing"]["ghat"]` `{name: [steps, *shape]}` and `["sharing"]["seen"]`.
    """

    params: dict[str, Tensor]
    learned: Tree = field(default_factory=dict)
    memory: Tree = field(default_factory=dict)

    def __repr__(self) -> str:
        parts = {name: flatten(getattr(self, name), name) for name in ("params", "learned", "memory")}
        sizes = {name: sum(tensor.numel() for tensor in part.values()) for name, part in parts.items()}
        shown = (f"{name}: {len(part)} tensors of {sizes[name]:,} numbers" for name, part in parts.items() if part)
        return f"MetaState({'; '.join(shown)})"

    def trainable(self) -> dict[str, Tensor]:
        """What the outer optimiser moves, flat: `{"params/conv.weight": ..., "learned/sharing/m": ...}`."""
        return {**flatten(self.params, "params"), **flatten(self.learned, "learned")}

    def to(self, device: torch.device | str) -> MetaState:
        """The same state on another device, as new leaves."""
        moved = {name: tensor.detach().to(device) for name, tensor in self.tensors().items()}
        return MetaState.of(moved)

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> MetaState:
        """The reverse of `tensors()`."""
        tree = unflatten(tensors)
        state = cls(tree["params"], tree.get("learned", {}), tree.get("memory", {}))
        for tensor in state.trainable().values():
            tensor.requires_grad_()
        return state

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, flat, as a checkpoint holds them."""
        return {**self.trainable(), **flatten(self.memory, "memory")}


def flatten(tree: Tree, prefix: str) -> dict[str, Tensor]:
    """Nested dicts of tensors as one dict with names joined by '/'."""
    flat: dict[str, Tensor] = {}
    for name, value in tree.items():
        path = f"{prefix}/{name.replace('%', '%25').replace('/', '%2F')}"  # a name may have a slash in it
        flat.update(flatten(value, path) if isinstance(value, dict) else {path: value})
    return flat


def unflatten(flat: dict[str, Tensor]) -> Tree:
    """The reverse of `flatten`, with the prefix as the first key."""
    tree: Tree = {}
    for path, tensor in flat.items():
        *parents, name = (part.replace("%2F", "/").replace("%25", "%") for part in path.split("/"))
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[name] = tensor
    return tree


def check_fit(
    wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str = "the checkpoint", types: bool = True
) -> None:
    """Raise an error where tensors differ in names or shapes; with `types`, also in dtype."""
    for name in sorted(wanted.keys() | found.keys()):
        here, there = wanted.get(name), found.get(name)
        if here is None or there is None or here.shape != there.shape or (types and here.dtype != there.dtype):
            found_here = f"{name} is {_described(there)}, and the learner has {_described(here)}"
            raise UserError(f"{what} does not fit the learner: {found_here}")


def _described(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
