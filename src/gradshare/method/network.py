"""The protocol of a network: how a learner runs a module on many tasks, each with its own weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from torch import Tensor

from gradshare.method.episodes import Inputs
from gradshare.method.rules import Rule, Tree, Weights

# What batch norm normalises with at prediction: the statistics of the batch at hand (transductive), or those of the
# task's support set (inductive).
NormStatistics = Literal["batch", "support"]


class Network(Protocol):
    """A module that runs on many tasks. It chooses the layout of the weights: by name, or all in one vector."""

    def start(self, params: Mapping[str, Tensor]) -> Weights:
        """The adapted weights in this network's layout, without the task axis."""

    def by_name(self, fast: Weights) -> Weights:
        """Weights in this network's layout by their names, `{name: [tasks, *shape]}`."""

    def pack(self, tree: Tree) -> Tree:
        """A rule's learned values or memory in this network's layout."""

    def unpack(self, tree: Tree) -> Tree:
        """The reverse of `pack`, for a memory."""

    def rule(self, rule: Rule, one_process: bool) -> Rule:
        """The rule for weights in this network's layout, with fused programs where all tasks are in one process."""

    def inputs(self, x: Inputs, mask: Tensor | None = None) -> Any:
        """Inputs as `forward` takes them, made once for all inner steps. `mask` [tasks, n]: True for a real example."""

    def shared(self, shared: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Weights that are not adapted, `{name: [*shape]}`, in this network's layout."""

    def forward(self, fast: Weights, shared: Mapping[str, Tensor], x: Any, inner: bool) -> Tensor:
        """`inputs` -> [tasks, n, ...]; `inner`: the inner loop differentiates it, the outer one once more."""
