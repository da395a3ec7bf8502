"""Replacements for PyTorch functions that are wrong, slow or not twice differentiable under vmap.

A replacement takes the same arguments, by the same names, as the original. Convolution, normalisation and pooling leave
vmap and run once for all tasks, with the tasks folded into the channels: [tasks, n, C, ...] -> [n, tasks*C, ...].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gradshare.engine import operations
from gradshare.engine.operations import Geometry, conv, plain_strides
from gradshare.errors import UserError

REPLACED: dict[Any, Callable[..., Tensor]] = {}  # {original: replacement}, filled in below


class _AllTasks(torch.autograd.Function):
    """Leaves vmap: `apply(function, *args)` calls `function(tasks, dims, *args)` once for all tasks.

    `dims` holds the task dimension of each argument; it is None where all tasks share the argument.
    """

    @staticmethod
    def forward(function: Callable[..., Tensor], *args: Any) -> Tensor:
        raise AssertionError("this function only runs under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise AssertionError("this function only runs under vmap")

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Callable[..., Tensor], *args: Any) -> tuple[Tensor, int]:
        return function(info.batch_size, in_dims[1:], *args), 0


def _differs_between_tasks(*values: Tensor | None) -> bool:
    return any(value is not None and torch._C._functorch.is_batchedtensor(value) for value in values)


def _tasks_first(tasks: int, dim: int | None, value: Tensor) -> Tensor:
    return value.expand(tasks, *value.shape) if dim is None else value.movedim(dim, 0)


def _fold(tasks: int, dim: int | None, x: Tensor) -> Tensor:
    """[tasks, n, C, ...] -> [n, tasks*C, ...]."""
    return _tasks_first(tasks, dim, x).transpose(0, 1).flatten(1, 2)


def _unfold(tasks: int, x: Tensor) -> Tensor:
    """The reverse of `_fold`. The result is a view, so the next `_fold` copies nothing."""
    return x.unflatten(1, (tasks, -1)).transpose(0, 1)


def promoted(function: Any, arguments: Any) -> Any:
    """Arguments of a function that has no form, all in the widest of their types, as element-wise functions do.

    What writes into its first argument keeps it.
    """
    name = getattr(function, "__name__", "")
    if name.startswith(("__i", "__set")) or (name.endswith("_") and not name.endswith("__")):
        return arguments
    kinds = {x.dtype for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.is_floating_point()}
    if len(kinds) < 2:
        return arguments
    return cast(arguments, max(kinds, key=lambda kind: kind.itemsize))


def cast(arguments: Any, kind: torch.dtype) -> Any:
    return tree_map(
        lambda x: x.to(kind) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != kind else x, arguments
    )


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.batch_norm with the statistics of the batch; `training` and the running statistics are ignored.

    Under vmap the original has a wrong second derivative, without any error, when gain and bias differ between tasks.
    """

    def all_tasks(tasks: int, dims: Any, x: Tensor, *affine: Tensor) -> Tensor:
        gain, shift = (_tasks_first(tasks, dim, row).flatten() for dim, row in zip(dims[1:], affine, strict=True))
        return _unfold(tasks, operations.batch_norm(_fold(tasks, dims[0], x), gain, shift, eps))

    if not _differs_between_tasks(input, weight, bias):
        return F.batch_norm(input, None, None, weight, bias, training=True, eps=eps)
    gain = input.new_ones(input.shape[1]) if weight is None else weight
    shift = input.new_zeros(input.shape[1]) if bias is None else bias
    return _AllTasks.apply(all_tasks, input, gain, shift)


def wide(x: Tensor) -> Tensor:
    """Values as statistics and sums are taken of them: bfloat16 as float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:  # [n, C, ...] -> [C], [C]
    """Mean and biased variance of each channel over the real examples."""
    x = wide(x)
    dims = [0, *range(2, x.dim())]
    if mask is None:
        return x.mean(dims), x.var(dims, correction=0)
    weight = _of_examples(mask, x) / (mask.sum() * x[0, 0].numel())
    mean = (x * weight).sum(dims)
    return mean, ((x - _of_channels(mean, x)).square() * weight).sum(dims)


def _of_examples(mask: Tensor, x: Tensor) -> Tensor:  # [n] -> [n, 1, 1...]
    return mask.to(x.dtype).view(-1, *(1 for _ in x.shape[1:]))


def _of_channels(values: Tensor, x: Tensor) -> Tensor:  # [C] -> [1, C, 1...]
    return values.view(1, -1, *(1 for _ in x.shape[2:]))


def _normalised(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    scale = torch.rsqrt(variance + eps) if weight is None else torch.rsqrt(variance + eps) * weight
    y = (wide(x) - _of_channels(mean, x)) * _of_channels(scale, x)
    return (y if bias is None else y + _of_channels(bias, x)).to(x.dtype)


def masked_norms(mask: Tensor, fewest: int | None) -> dict[Any, Callable[..., Tensor]]:
    """Batch norm with the statistics of the real examples, in plain operations.

    Args:
        mask: [n], True for a real example.
        fewest: the smallest number of real examples that a task has, where that is known.
    """

    def norm(
        input: Tensor, running_mean: Any = None, running_var: Any = None, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        if len(input) != len(mask):
            raise UserError(
                f"batch norm sees a tensor {list(input.shape)} where a task has {len(mask)} examples: masks need the"
                " examples as its first axis; take tasks of equal size, or another normalisation"
            )
        if fewest is not None and fewest * input[0, 0].numel() == 1:
            raise UserError(operations.one_value(list(input.shape[2:])))
        return _normalised(input, *moments(input, mask), weight, bias, eps)

    return _both_names(norm)


def _fixed_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """F.batch_norm with running statistics."""
    if training or running_mean is None or running_var is None:
        raise UserError(
            "the model calls F.batch_norm itself, without running statistics: norm_statistics='support' needs layers,"
            " such as nn.BatchNorm2d"
        )
    return _normalised(input, running_mean, running_var, weight, bias, eps)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.instance_norm, as batch norm over one image that has the channels of all images.

    As in PyTorch, a layer in eval mode that has running statistics normalises with those, which are constants.
    """
    if not use_input_stats and running_mean is not None and running_var is not None:
        return _normalised(input, running_mean, running_var, weight, bias, eps)
    gain, shift = (None if value is None else value.repeat(len(input)) for value in (weight, bias))
    return batch_norm(input.flatten(0, 1)[None], weight=gain, bias=shift, eps=eps).view_as(input)


def _both_names(norm: Callable[..., Tensor]) -> dict[Any, Callable[..., Tensor]]:
    """A batch norm under PyTorch's two names for it, which take their arguments in different orders."""
    return {
        F.batch_norm: norm,
        torch.batch_norm: (
            lambda input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled: norm(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        ),
    }


FIXED_NORMS = _both_names(_fixed_norm)
REPLACED.update(_both_names(batch_norm))
REPLACED[F.instance_norm] = instance_norm
REPLACED[torch.instance_norm] = (
    lambda input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled: instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, eps=eps
    )
)


def _conv_all_tasks(tasks: int, dims: Any, x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry) -> Tensor:
    if dims[1] is None and dims[2] is None:  # all tasks share the filters: one large batch
        return conv(x.movedim(dims[0], 0).flatten(0, 1), w, b, geometry).unflatten(0, (tasks, -1))
    filters = _tasks_first(tasks, dims[1], w).flatten(0, 1)
    bias = None if b is None else _tasks_first(tasks, dims[2], b).flatten()
    return _unfold(
        tasks, conv(_fold(tasks, dims[0], x), filters, bias, geometry._replace(groups=geometry.groups * tasks))
    )


def _convolution(original: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    """Replace a convolution by one with fast derivatives of every order, where each task has its own filters."""

    def convolution(  # type: ignore[no-untyped-def]
        input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1
    ):
        if isinstance(padding, str) or input.dim() != dims + 2 or not _differs_between_tasks(input, weight, bias):
            return original(input, weight, bias, stride, padding, dilation, groups)
        strides, pads, dilations = (_per_dimension(value, dims) for value in (stride, padding, dilation))
        return _AllTasks.apply(
            _conv_all_tasks, input, weight, bias, Geometry(strides, pads, dilations, False, [0] * dims, groups)
        )

    return convolution


def _transposed_convolution(original: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    """The same for a transposed convolution, which takes its options in another order."""

    def convolution(  # type: ignore[no-untyped-def]
        input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
    ):
        if input.dim() != dims + 2 or not _differs_between_tasks(input, weight, bias):
            return original(input, weight, bias, stride, padding, output_padding, groups, dilation)
        strides, pads, dilations = (_per_dimension(value, dims) for value in (stride, padding, dilation))
        geometry = Geometry(strides, pads, dilations, True, _per_dimension(output_padding, dims), groups)
        return _AllTasks.apply(_conv_all_tasks, input, weight, bias, geometry)

    return convolution


def _per_dimension(value: int | list[int], dims: int) -> list[int]:
    """Repeat an option that is given once for all dimensions."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


CONVOLUTIONS: tuple[Any, ...] = (torch.conv1d, torch.conv2d, torch.conv3d)
TRANSPOSED: tuple[Any, ...] = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
REPLACED.update({function: _convolution(function, dims) for dims, function in enumerate(CONVOLUTIONS, start=1)})
REPLACED.update(
    {function: _transposed_convolution(function, dims) for dims, function in enumerate(TRANSPOSED, start=1)}
)


def _group_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Convert the images to the standard layout first: under vmap the original raises an error for other layouts."""

    def norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def all_tasks(tasks: int, dims: Any, x: Tensor) -> Tensor:
            return plain_strides(_tasks_first(tasks, dims[0], x).contiguous())

        standard = _AllTasks.apply(all_tasks, input) if _differs_between_tasks(input) else input
        return original(standard, *args, **kwargs)

    return norm


REPLACED[F.group_norm] = _group_norm(F.group_norm)
REPLACED[torch.group_norm] = _group_norm(torch.group_norm)


def _max_pool(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Pool in the layout of the convolutions: vmap's own rule is right, but copies the images to another layout."""

    def pool(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def all_tasks(tasks: int, dims: Any, x: Tensor) -> Tensor:
            images = _fold(tasks, dims[0], x)
            if (
                images.is_cpu
                and images.is_floating_point()
                and min(images.shape[2:]) >= 2
                and _is_two_by_two(*args, **kwargs)
            ):
                return _unfold(tasks, operations.max_pool(images))
            return _unfold(tasks, original(images, *args, **kwargs))

        if input.dim() != 4 or kwargs.get("return_indices") or not _differs_between_tasks(input):
            return original(input, *args, **kwargs)
        return _AllTasks.apply(all_tasks, input)

    return pool


def _is_two_by_two(
    kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False, **_: Any
) -> bool:
    """Whether the windows are 2x2 and do not overlap."""
    sizes = (kernel_size, stride or kernel_size, padding, dilation)
    return [_per_dimension(size, 2) for size in sizes] == [[2, 2], [2, 2], [0, 0], [1, 1]] and not ceil_mode


REPLACED[F.max_pool2d] = _max_pool(F.max_pool2d)
REPLACED[torch.max_pool2d] = _max_pool(torch.max_pool2d)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """F.embedding, where the padding row has no gradient: under vmap the original gives it one."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise UserError("an embedding with max_norm, scale_grad_by_freq or sparse cannot be differentiated twice")
    rows = F.embedding(input, weight)
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % weight.shape[0]).unsqueeze(-1), rows.detach(), rows)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """torch._weight_norm in plain operations: the original has a wrong second derivative, also without vmap."""
    others = [d for d in range(v.dim()) if d != dim % v.dim()] if dim != -1 else list(range(v.dim()))
    return v * (g / v.square().sum(others, keepdim=True).sqrt())


REPLACED[F.embedding] = embedding
REPLACED[torch._weight_norm] = weight_norm


def dropout_message(what: str, p: float) -> str:
    return (
        f"{what} drops activations at random with p={p}, but the inner loop needs a deterministic model:"
        " set p to 0, remove it, or call model.eval() before you create the learner"
    )


def _dropout(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Raise an error where dropout would drop something; else do nothing."""
    by_default: bool = inspect.signature(original).parameters["training"].default

    def dropout(input: Tensor, p: float = 0.5, training: bool = by_default, inplace: bool = False) -> Tensor:
        if training and p > 0:
            raise UserError(dropout_message(f"F.{original.__name__}", p))
        return input

    return dropout


DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
REPLACED.update({function: _dropout(function) for function in DROPOUTS})
