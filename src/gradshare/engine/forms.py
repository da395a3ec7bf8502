"""Fast forms of PyTorch's functions for the traced engine: plain operations that a compiler joins into few programs.

They replace the functions that a module calls while it runs under vmap, as `replacements.py` does, which has the rest.

| what a module calls | its form |
|---|---|
| convolution, also transposed | the operators of `convolution.py`, with the tasks as first axis |
| batch, layer, group and instance norm | `normalised`, with its own first and second derivative |
| 2x2 max pooling | comparisons of the four corners, and which of them was the largest |
| products: linear layers, matmul, attention | the same, of operands in the type of the precision |

**Precision.** With bfloat16, convolutions and products take operands and give results in it, and so do the activations
between them. Statistics, sums, the loss and the weights are float32, and a linear layer on single vectors, such as a
head, computes in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradshare.engine import operations, replacements
from gradshare.engine.convolution import TaskMaps
from gradshare.engine.recurrent import RECURRENT
from gradshare.engine.replacements import CONVOLUTIONS, REPLACED, TRANSPOSED, cast, promoted, wide
from gradshare.errors import UserError

Form = Callable[..., Any]
_AllTasks, _tasks_first, _differs = (
    replacements._AllTasks,
    replacements._tasks_first,
    replacements._differs_between_tasks,
)
_per_dimension = replacements._per_dimension


@cache
def forms(low: torch.dtype | None) -> dict[Any, Form]:
    """The functions to replace, and by what.

    Args:
        low: type of the operands of convolutions and products; None: that of the weights.
    """
    convolutions = {function: _convolution(function, dims, low) for dims, function in enumerate(CONVOLUTIONS, start=1)}
    transposed = {function: _transposed(function, dims, low) for dims, function in enumerate(TRANSPOSED, start=1)}
    products = {} if low is None else {function: _product(function, low) for function in PRODUCTS}
    linear = {} if low is None else {F.linear: _linear(low)}
    return {**REPLACED, **RECURRENT, **convolutions, **transposed, **NORMS, **POOLS, **VIEWS, **products, **linear}


def _convolve(tasks: int, dims: Any, x: Tensor, w: Tensor, b: Tensor | None, maps: TaskMaps, low: Any) -> Tensor:
    x, w = (value if low is None else value.to(low) for value in (x, w))
    in_common = dims[1] is None and dims[2] is None
    x, w = _tasks_first(tasks, dims[0], x), w if in_common else _tasks_first(tasks, dims[1], w)
    if x.is_cuda and maps.groups == 1 and not maps.transposed and len(maps.stride) == 2:
        x, w = _whole_eights(x), _whole_eights(w)
    if in_common:  # one large batch
        y = operations.conv(x.flatten(0, 1)[None], w[None], None, maps)[0].unflatten(0, (tasks, -1))
    else:
        y = operations.conv(x, w, None, maps)
    if b is None:
        return y
    shift = _tasks_first(tasks, dims[2], b)
    return y + shift.view(tasks, 1, -1, *(1 for _ in y.shape[3:])).to(y.dtype)


def _whole_eights(x: Tensor) -> Tensor:  # [..., C, H, W]
    """With channels of zeros up to a multiple of eight, which the kernels of a GPU's matrix units want."""
    missing = -x.shape[-3] % 8
    return F.pad(x.movedim(-3, -1), (0, missing)).movedim(-1, -3) if missing else x


def _convolution(original: Form, dims: int, low: torch.dtype | None) -> Form:
    def convolution(  # type: ignore[no-untyped-def]
        input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1
    ):
        strides, dilations = (_per_dimension(value, dims) for value in (stride, dilation))
        pads = _pads(padding, list(weight.shape[2:]), dilations)
        if pads is None or input.dim() != dims + 2 or not _differs(input, weight, bias):
            return original(*promoted(original, (input, weight, bias)), stride, padding, dilation, groups)
        maps = TaskMaps(strides, pads, dilations, False, [0] * dims, groups)
        return _AllTasks.apply(_convolve, input, weight, bias, maps, low)

    return convolution


def _pads(padding: Any, sizes: list[int], dilations: list[int]) -> list[int] | None:
    """Padding on both sides of each dimension; None where the two sides differ."""
    if padding == "valid":
        return [0] * len(sizes)
    if padding == "same":
        whole = [dilation * (size - 1) for size, dilation in zip(sizes, dilations, strict=True)]
        return None if any(pad % 2 for pad in whole) else [pad // 2 for pad in whole]
    return _per_dimension(padding, len(sizes))


def _transposed(original: Form, dims: int, low: torch.dtype | None) -> Form:
    def convolution(  # type: ignore[no-untyped-def]
        input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
    ):
        if input.dim() != dims + 2 or not _differs(input, weight, bias):
            arguments = promoted(original, (input, weight, bias))
            return original(*arguments, stride, padding, output_padding, groups, dilation)
        strides, pads, dilations, more = (
            _per_dimension(value, dims) for value in (stride, padding, dilation, output_padding)
        )
        return _AllTasks.apply(
            _convolve, input, weight, bias, TaskMaps(strides, pads, dilations, True, more, groups), low
        )

    return convolution


def normalised(x: Tensor, scale: Tensor, shift: Tensor, dims: list[int], eps: float) -> Tensor:
    """scale (x - mean) / sqrt(var + eps) + shift over some dimensions, in float32 or wider; twice differentiable.

    The derivatives are those of `operations.py`. Each takes all its sums of one pass over the elements.

    Args:
        scale, shift: of the size of the mean, or without a derivative.
    """
    return _Normalised.apply(x, scale, shift, dims, eps)[0]


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, dims: list[int], eps: float) -> tuple[Tensor, ...]:
        variance, mean = torch.var_mean(wide(x), dims, correction=0, keepdim=True)
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, scale, mean, inverse)
        ctx.dims = dims
        ctx.mark_non_differentiable(mean, inverse)
        return (wide(x) - mean) * inverse * scale + shift, mean, inverse

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        to_x, to_scale, to_shift = _NormalisedGradient.apply(g, *ctx.saved_tensors, ctx.dims)
        wanted = ctx.needs_input_grad
        return to_x, to_scale if wanted[1] else None, to_shift if wanted[2] else None, None, None


class _NormalisedGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, scale: Tensor, mean: Tensor, inverse: Tensor, dims: list[int]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(g, x, scale, mean, inverse)
        ctx.dims, ctx.count = dims, x.numel() / mean.numel()
        y = (wide(x) - mean) * inverse
        mean_g, mean_gy = (value.mean(dims, keepdim=True) for value in (g, g * y))
        to_x = scale * inverse * (g - mean_g - y * mean_gy)
        return to_x.to(x.dtype), mean_gy * ctx.count, mean_g * ctx.count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor, v_scale: Tensor, v_shift: Tensor) -> tuple[Tensor | None, ...]:
        g, x, scale, mean, inverse = ctx.saved_tensors
        y, v = (wide(x) - mean) * inverse, wide(v)
        means = (value.mean(ctx.dims, keepdim=True) for value in (g, g * y, v, v * y, g * v))
        mean_g, mean_gy, mean_v, mean_vy, mean_gv = means
        p_v, p_g = ((z - at - y * along) * inverse for z, at, along in ((v, mean_v, mean_vy), (g, mean_g, mean_gy)))
        mean_gp = (mean_gv - mean_g * mean_v - mean_gy * mean_vy) * inverse  # of g P(v)
        to_g = scale * p_v + v_scale * y + v_shift
        to_x = (v_scale - scale * inverse * mean_vy) * p_g - scale * inverse * (y * mean_gp + p_v * mean_gy)
        return to_g, to_x.to(x.dtype), mean_gp * ctx.count, None, None, None


def _all_tasks(
    tasks: int, dims: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None, over: list[int], eps: float
) -> Tensor:
    x = _tasks_first(tasks, dims[0], x)

    def of_tasks(row: Tensor | None, dim: int | None, usual: float) -> Tensor:  # [C] -> [tasks, 1, C, 1...]
        if row is None:
            return wide(x.new_full((), usual))
        return _tasks_first(tasks, dim, row).view(tasks, 1, -1, *(1 for _ in x.shape[3:]))

    return normalised(x, of_tasks(scale, dims[1], 1.0), of_tasks(shift, dims[2], 0.0), [dim + 1 for dim in over], eps)


def _normalise(
    x: Tensor, over: list[int], eps: float, scale: Tensor | None = None, shift: Tensor | None = None
) -> Tensor:
    """Under vmap: `normalised` over dimensions of one task."""
    if not _differs(x, scale, shift):
        return _all_tasks(1, (None, None, None), x, scale, shift, over, eps)[0]
    return _AllTasks.apply(_all_tasks, x, scale, shift, over, eps)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, kind: torch.dtype) -> Tensor:
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(kind)


def _of_channels(values: Tensor | None, x: Tensor) -> Tensor | None:  # [C] -> [C, 1...]
    return None if values is None else values.view(-1, *(1 for _ in x.shape[2:]))


def batch_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """F.batch_norm with the statistics of the batch; `training` and the running statistics are ignored."""
    if input.numel() == input.shape[1]:
        raise UserError(operations.one_value(list(input.shape[2:])))
    return _normalise(input, [0, *range(2, input.dim())], eps, weight, bias).to(input.dtype)


def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """F.instance_norm; as in PyTorch, running statistics, where a layer in eval mode has them, are constants."""
    if not use_input_stats and running_mean is not None and running_var is not None:
        return replacements._normalised(input, running_mean, running_var, weight, bias, eps)
    if input[0, 0].numel() == 1:
        raise UserError(operations.one_value(list(input.shape[2:])))
    y = _normalise(input, list(range(2, input.dim())), eps)
    return _affine(y, _of_channels(weight, input), _of_channels(bias, input), input.dtype)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    groups = input.unflatten(1, (num_groups, -1))
    y = _normalise(groups, list(range(2, groups.dim())), eps).flatten(1, 2)
    return _affine(y, _of_channels(weight, input), _of_channels(bias, input), input.dtype)


def layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    y = _normalise(input, list(range(input.dim() - len(normalized_shape), input.dim())), eps)
    return _affine(y, weight, bias, input.dtype)


NORMS: dict[Any, Form] = {
    **replacements._both_names(batch_norm),
    F.instance_norm: instance_norm,
    torch.instance_norm: (
        lambda input, weight, bias, mean, var, use_input_stats, momentum, eps, cudnn_enabled: instance_norm(
            input, mean, var, weight, bias, use_input_stats, momentum, eps
        )
    ),
    F.group_norm: group_norm,
    torch.group_norm: lambda input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True: group_norm(
        input, num_groups, weight, bias, eps
    ),
    F.layer_norm: layer_norm,
    torch.layer_norm: lambda input, shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True: layer_norm(
        input, shape, weight, bias, eps
    ),
}


class _MaxPool(torch.autograd.Function):
    """2x2 windows; an odd last row or column belongs to none. Of equal elements the first counts, as in PyTorch.

    Channels are last, as convolutions leave them in memory: the compiler keeps to the order that it sees.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows, columns = (size // 2 * 2 for size in x.shape[-3:-1])
        corners = [x[..., row:rows:2, column:columns:2, :] for row in (0, 1) for column in (0, 1)]
        top = torch.maximum(torch.maximum(corners[0], corners[1]), torch.maximum(corners[2], corners[3]))
        one, two, three, zero = (  # of numbers of Python the compiler would keep integers of eight bytes
            torch.full((), number, dtype=torch.uint8, device=x.device) for number in (1, 2, 3, 0)
        )
        place = torch.where(corners[2] == top, two, three)
        place = torch.where(corners[0] == top, zero, torch.where(corners[1] == top, one, place))
        ctx.save_for_backward(place)
        ctx.size = x.shape[-3:-1]
        return top

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return _Scatter.apply(g, *ctx.saved_tensors, ctx.size)


def _largest(place: Tensor) -> Tensor:  # [..., h, w, C] -> [..., h, 2, w, 2, C]
    """Which elements of the windows are the largest."""
    corner = torch.arange(2, device=place.device, dtype=torch.uint8)
    return place[..., :, None, :, None, :] == 2 * corner[:, None, None, None] + corner[:, None]


class _Scatter(torch.autograd.Function):
    """Writes pooled values to the places of the largest elements; zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, place: Tensor, size: torch.Size) -> Tensor:
        ctx.save_for_backward(place)
        spread = torch.where(_largest(place), g[..., :, None, :, None, :], 0).flatten(-3, -2).flatten(-4, -3)
        return F.pad(spread, (0, 0, 0, size[1] % 2, 0, size[0] % 2)) if size[0] % 2 or size[1] % 2 else spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        rows, columns = place.shape[-3:-1]
        windows = v[..., : 2 * rows, : 2 * columns, :].unflatten(-2, (columns, 2)).unflatten(-4, (rows, 2))
        return torch.where(_largest(place), windows, 0).sum((-4, -2)), None, None


def _max_pool(original: Form) -> Form:
    def all_tasks(tasks: int, dims: Any, x: Tensor) -> Tensor:
        return _MaxPool.apply(_tasks_first(tasks, dims[0], x).movedim(-3, -1)).movedim(-1, -3)

    def pool(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        fits = input.dim() == 4 and input.is_floating_point() and min(input.shape[2:]) >= 2
        if not fits or not replacements._is_two_by_two(*args, **kwargs) or kwargs.get("return_indices"):
            return REPLACED[original](input, *args, **kwargs)
        return _AllTasks.apply(all_tasks, input) if _differs(input) else original(input, *args, **kwargs)

    return pool


POOLS: dict[Any, Form] = {function: _max_pool(function) for function in (F.max_pool2d, torch.max_pool2d)}


def _view(x: Tensor, *shape: Any) -> Tensor:
    """Tensor.view, also where the channels are last in memory."""
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        return x.view(shape[0])
    return x.reshape(*shape)


VIEWS: dict[Any, Form] = {torch.Tensor.view: _view}


def _product(original: Form, low: torch.dtype) -> Form:
    def product(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast((args, kwargs), low)
        return original(*args, **kwargs)

    return product


def _linear(low: torch.dtype) -> Form:
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if input.dim() < 3:
            return F.linear(*promoted(F.linear, (input, weight, bias)))
        return F.linear(*cast((input, weight, bias), low))

    return linear


PRODUCTS: tuple[Any, ...] = (
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.bmm, torch.Tensor.bmm,
    torch.baddbmm, torch.Tensor.baddbmm, torch.einsum, torch.functional.einsum, F.scaled_dot_product_attention,
    F.multi_head_attention_forward,
)  # fmt: skip
