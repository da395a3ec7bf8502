"""Apply one module to many tasks at once, each task with its own weights.

`torch.func.vmap` does most of it. A few of PyTorch's functions are wrong, slow or not twice differentiable that way;
while a module runs they are replaced by those of `replacements.py` and `recurrent.py`, so that a user's module works
unchanged.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from gradshare.engine.recurrent import RECURRENT, weights_kept
from gradshare.engine.replacements import REPLACED, dropout_message
from gradshare.errors import UserError
from gradshare.method.rules import Rule, Tree, Weights

BATCH_NORMS = nn.modules.batchnorm._BatchNorm
DROPOUTS = nn.modules.dropout._DropoutNd
FUNCTIONS = {**REPLACED, **RECURRENT}


def prepare(model: nn.Module) -> nn.Module:
    """Copy a module for use with many tasks; raise an error for layers whose results would be wrong.

    Batch norm in the copy always normalises with the statistics of the batch at hand (transductive).
    """
    model = copy.deepcopy(model)
    for name, layer in model.named_modules():
        where = f"'{name}' ({type(layer).__name__})"
        if isinstance(layer, DROPOUTS) and layer.training and layer.p > 0:
            raise UserError(dropout_message(f"layer {where}", layer.p))
        dropout = getattr(layer, "dropout", 0.0)
        drops = isinstance(layer, nn.MultiheadAttention) or (isinstance(layer, nn.RNNBase) and layer.num_layers > 1)
        if drops and layer.training and dropout > 0:
            raise UserError(dropout_message(f"layer {where}", dropout))
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
            raise UserError(f"layer {where} has no shape yet: run the model once on an example batch first")
        if isinstance(layer, BATCH_NORMS):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return model


def initialises(module: nn.Module) -> bool:
    """Whether a module has a method `initialise` that takes a generator."""
    try:
        inspect.signature(cast(Any, module).initialise).bind(None)
    except (AttributeError, TypeError):
        return False
    return True


def forward(
    module: nn.Module,
    fast: Mapping[str, Tensor],  # {name: [tasks, *shape]}: one value per task
    shared: Mapping[str, Tensor],  # {name: [*shape]}: the same value for all tasks
    x: Tensor,  # [tasks, n, ...]
) -> Tensor:  # [tasks, n, ...]
    """Run `module` on each task's inputs with that task's weights."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    versions = {name: buffer._version for name, buffer in buffers.items()}

    def one_task(fast: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, {**buffers, **shared, **fast}, (x,))

    try:
        # Attention by its formula: the fused kernels have no second derivative.
        with _Replacing(), sdpa_kernel(SDPBackend.MATH), weights_kept(module):
            outputs = vmap(one_task)(dict(fast), x)
    except RuntimeError as error:
        raise _of_other_types(error, x, fast) or explained(error, "model") from error
    if not isinstance(outputs, Tensor):
        raise UserError(f"the model returns a {type(outputs).__name__}; it must return one tensor, such as the logits")
    for name, buffer in buffers.items():
        if buffer._version != versions[name]:
            raise UserError(
                f"the model writes to its buffer '{name}' when it runs, so its results would depend on what ran before:"
                " call eval() on that layer, or replace it, before handing the model over"
            )
    return outputs


class VmapBackend:
    """Any module, by PyTorch's operations; weights by their names."""

    def __init__(self, module: nn.Module, adapted: tuple[str, ...]) -> None:
        self.module, self.adapted = module, adapted

    def start(self, params: Mapping[str, Tensor]) -> Weights:
        return {name: params[name] for name in self.adapted}

    def by_name(self, fast: Weights) -> Weights:
        return fast

    def pack(self, tree: Tree) -> Tree:
        return tree

    unpack = pack

    def rule(self, rule: Rule, one_process: bool) -> Rule:
        return rule

    def inputs(self, x: Tensor) -> Any:
        return x

    def shared(self, shared: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return shared

    def forward(self, fast: Weights, shared: Mapping[str, Tensor], x: Any, inner: bool) -> Tensor:
        return forward(self.module, fast, shared, x)


class _Replacing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FUNCTIONS.get(func, func)(*args, **(kwargs or {}))


def _of_other_types(error: Exception, x: Tensor, fast: Mapping[str, Tensor]) -> UserError | None:
    """What to say if it may be the types of inputs and weights that do not fit."""
    inputs, weights = (str(part.dtype).removeprefix("torch.") for part in (x, next(iter(fast.values()))))
    if inputs == weights or not any(sign in str(error) for sign in ("dtype", "scalar type", "data type")):
        return None
    return UserError(f"the model cannot take inputs of type {inputs} with weights of type {weights}: convert one")


def explained(error: Exception, who: str) -> Exception:
    """vmap's errors as advice for the user; any other error unchanged."""
    text = " ".join(str(error).split())
    if "randomness" in text:
        return UserError(
            f"the {who} draws random numbers when it runs, which would make the inner loop's gradients"
            " irreproducible: remove the random operation, or call model.eval() first if that switches it off"
        )
    if "must only return Tensors" in text:
        return UserError(f"the {who} must return one tensor for a task ({text})")
    signs = (
        "Batching rule not implemented",
        "data-dependent control flow",
        "vmap: we do not yet support",
        "vmap: inplace",
        "vmap: We do not support",
        "vmap: It looks like you're",
        "under vmap transform is not allowed",
    )
    if any(sign in text for sign in signs):
        return UserError(f"the {who} uses an operation that cannot run for many tasks at once; replace it ({text})")
    return error
