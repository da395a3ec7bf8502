"""Apply one module to many tasks at once, each task with its own weights.

`torch.func.vmap` does most of it. A few of PyTorch's functions are wrong, slow or not twice differentiable that way;
while a module runs they are replaced here, so that a user's module works unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from gradshare import normalisation
from gradshare.convolution import Geometry, conv, fold_tasks, unfold_tasks
from gradshare.errors import UserError

BATCH_NORMS = nn.modules.batchnorm._BatchNorm
DROPOUTS = nn.modules.dropout._DropoutNd


def prepare(model: nn.Module) -> nn.Module:
    """Copy a module for use with many tasks; refuse what could not be right.

    Batch norm in the copy always normalises with the statistics of the batch at hand (transductive).
    """
    model = copy.deepcopy(model)
    for name, layer in model.named_modules():
        where = f"'{name}' ({type(layer).__name__})"
        if isinstance(layer, DROPOUTS) and layer.training and layer.p > 0:
            raise UserError(_dropout_message(where, layer.p))
        dropout = getattr(layer, "dropout", 0.0)
        if isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)) and layer.training and dropout > 0:
            raise UserError(_dropout_message(where, dropout))
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
            raise UserError(f"layer {where} has no shape yet: run the model once on an example batch first")
        if isinstance(layer, BATCH_NORMS):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return model


def forward(
    module: nn.Module,
    fast: Mapping[str, Tensor],  # {name: [tasks, *shape]}: one value per task
    shared: Mapping[str, Tensor],  # {name: [*shape]}: the same value for all tasks
    x: Tensor,  # [tasks, n, ...]
) -> Tensor:  # [tasks, n, ...]
    """Run `module` on each task's inputs with that task's weights."""

    def one_task(fast: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, {**shared, **fast}, (x,))

    try:
        with _TaskedFunctions():
            return vmap(one_task)(dict(fast), x)
    except RuntimeError as error:
        if "randomness" in str(error):
            raise UserError(
                "the model draws random numbers in its forward pass, which would make the inner loop's gradients"
                " irreproducible: remove the random operation, or call model.eval() first if that switches it off"
            ) from error
        raise


def _dropout_message(where: str, p: float) -> str:
    return (
        f"layer {where} drops activations at random with p={p}; an inner loop needs a deterministic model:"
        " set p to 0, remove the layer, or call model.eval() before handing the model over"
    )


class _AllTasks(torch.autograd.Function):
    """The way out of vmap: `apply(function, *args)` calls `function(tasks, dims, *args)` once for all tasks.

    `dims` says which dimension of each argument counts the tasks; None where all tasks share it.
    """

    @staticmethod
    def forward(function: Callable[..., Tensor], *args: Any) -> Tensor:
        raise AssertionError("called outside vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise AssertionError("called outside vmap")

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Callable[..., Tensor], *args: Any) -> tuple[Tensor, int]:
        return function(info.batch_size, in_dims[1:], *args), 0


def _tasks_first(tasks: int, dim: int | None, value: Tensor) -> Tensor:
    return value.expand(tasks, *value.shape) if dim is None else value.movedim(dim, 0)


def batch_norm(
    x: Tensor,  # [n, C, ...]
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """F.batch_norm on the batch's own statistics, whatever `training` and the running statistics are."""

    def all_tasks(tasks: int, dims: Any, *rows: Tensor) -> Tensor:
        x, gain, bias = (_tasks_first(tasks, dim, row) for dim, row in zip(dims, rows, strict=True))
        return normalisation.batch_norm(x, gain, bias, eps)

    gain = x.new_ones(x.shape[1]) if weight is None else weight
    shift = x.new_zeros(x.shape[1]) if bias is None else bias
    return _AllTasks.apply(all_tasks, x, gain, shift)


def instance_norm(
    x: Tensor,  # [n, C, ...]
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """F.instance_norm: batch norm over one image, with every image's channels as channels."""
    gain, shift = (None if value is None else value.repeat(len(x)) for value in (weight, bias))
    return batch_norm(x.flatten(0, 1)[None], weight=gain, bias=shift, eps=eps).view_as(x)


def _max_pool(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Max pooling in the layout of `conv`: vmap's own rule is right, but copies the images to another one."""

    def pool(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def all_tasks(tasks: int, dims: Any, x: Tensor) -> Tensor:
            return unfold_tasks(original(fold_tasks(x.movedim(dims[0], 0)), *args, **kwargs), tasks)

        if x.dim() != 4 or kwargs.get("return_indices"):
            return original(x, *args, **kwargs)
        return _AllTasks.apply(all_tasks, x)

    return pool


def _convolution(original: Callable[..., Tensor], dims: int, transposed: bool) -> Callable[..., Tensor]:
    def spread(value: int | list[int]) -> list[int]:
        values = [value] if isinstance(value, int) else list(value)
        return values * dims if len(values) == 1 else values

    def forward_convolution(x, w, bias=None, stride=1, padding=0, dilation=1, groups=1):  # type: ignore[no-untyped-def]
        if isinstance(padding, str) or x.dim() != dims + 2:
            return original(x, w, bias, stride, padding, dilation, groups)
        geometry = Geometry(spread(stride), spread(padding), spread(dilation), False, [0] * dims, groups)
        return _AllTasks.apply(_conv_all_tasks, x, w, bias, geometry)

    def transposed_convolution(x, w, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):  # type: ignore[no-untyped-def]
        if x.dim() != dims + 2:
            return original(x, w, bias, stride, padding, output_padding, groups, dilation)
        geometry = Geometry(spread(stride), spread(padding), spread(dilation), True, spread(output_padding), groups)
        return _AllTasks.apply(_conv_all_tasks, x, w, bias, geometry)

    return transposed_convolution if transposed else forward_convolution


def _conv_all_tasks(tasks: int, dims: Any, x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry) -> Tensor:
    x = _tasks_first(tasks, dims[0], x)
    if dims[1] is None and dims[2] is None:  # the same filters for all tasks: one large batch
        one = conv(x.flatten(0, 1)[None], w[None], None if b is None else b[None], geometry)
        return one[0].unflatten(0, (tasks, -1))
    bias = None if b is None else _tasks_first(tasks, dims[2], b)
    return conv(x, _tasks_first(tasks, dims[1], w), bias, geometry)


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """Attention by its formula: the fused kernels have no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def _dropout(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    default = 0.5

    def refused(x: Tensor, p: float = default, training: bool = True, *args: Any, **kwargs: Any) -> Tensor:
        if training and p > 0:
            raise UserError(_dropout_message(f"calling {function.__name__}", p))
        return function(x, p, training, *args, **kwargs)

    return refused


REPLACED: dict[Any, Callable[..., Tensor]] = {
    F.batch_norm: batch_norm,
    torch.batch_norm: lambda x, w, b, mean, var, train, momentum, eps, cudnn: batch_norm(x, mean, var, w, b, eps=eps),
    F.instance_norm: instance_norm,
    torch.instance_norm: lambda x, w, b, mean, var, use, momentum, eps, cudnn: instance_norm(
        x, mean, var, w, b, eps=eps
    ),
    F.scaled_dot_product_attention: _attention,
    torch.conv1d: _convolution(torch.conv1d, 1, False),
    torch.conv2d: _convolution(torch.conv2d, 2, False),
    torch.conv3d: _convolution(torch.conv3d, 3, False),
    torch.conv_transpose1d: _convolution(torch.conv_transpose1d, 1, True),
    torch.conv_transpose2d: _convolution(torch.conv_transpose2d, 2, True),
    torch.conv_transpose3d: _convolution(torch.conv_transpose3d, 3, True),
    F.max_pool2d: _max_pool(F.max_pool2d),
    torch.max_pool2d: _max_pool(torch.max_pool2d),
}
for _function in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout):
    REPLACED[_function] = _dropout(_function)


class _TaskedFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return REPLACED.get(func, func)(*args, **(kwargs or {}))
