"""The linear head: tensors in, tensors out, by the programs of `head.py`."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from gradshare.engine.conv4.triton import head
from gradshare.engine.conv4.triton.device import INTERPRETED, OVERLAPPED
from gradshare.engine.conv4.triton.launch import Pair, _sixteens


def scores(pairs: list[Pair], bias: Tensor) -> Tensor:  # [tasks, n, ways]
    """The sum of the pairs' features [tasks, n, F] times weights [tasks, ways, F], plus bias [tasks, 1, ways]."""
    (a, weight_a), (b, weight_b) = pairs[0], pairs[-1]
    tasks, n, size = a.shape
    ways = weight_a.shape[1]
    target = weight_a.new_empty(tasks, n, ways)
    block = triton.next_power_of_2(ways)
    examples = 16 if INTERPRETED else 2
    depth = max(32, min(4096 // (examples * block), triton.next_power_of_2(size)))
    head.scores[(-(-n // examples), tasks)](
        a, weight_a, b, weight_b, bias, target, n, _sixteens(weight_a), _sixteens(weight_b), _sixteens(bias),
        SIZE=size, WAYS=ways, BW=block, BF=depth, BM=examples, PAIRS=len(pairs), num_warps=4, **OVERLAPPED,
    )  # fmt: skip
    return target


def towards_features(pairs: list[Pair], kind: torch.dtype) -> Tensor:  # [tasks, n, F]
    """The sum of the pairs' gradients by scores [tasks, n, ways] times weights [tasks, ways, F]."""
    (g_a, weight_a), (g_b, weight_b) = pairs[0], pairs[-1]
    tasks, n, ways = g_a.shape
    size = weight_a.shape[-1]
    target = g_a.new_empty(tasks, n, size, dtype=kind)
    head.towards_features[(-(-n // 8), -(-size // 256), tasks)](
        g_a, weight_a, g_b, weight_b, target, n, _sixteens(weight_a), _sixteens(weight_b),
        SIZE=size, WAYS=ways, BF=256, BM=8, PAIRS=len(pairs), num_warps=4, **OVERLAPPED,
    )  # fmt: skip
    return target


def towards_weights(pairs: list[Pair], room: Tensor, bias_room: Tensor) -> None:
    """Write gradients by weights [tasks, ways, F] and by bias [tasks, ways] from features and gradients by scores."""
    (a, g_a), (b, g_b) = pairs[0], pairs[-1]
    tasks, n, size = a.shape
    ways = g_a.shape[-1]
    block = triton.next_power_of_2(ways)
    width = 512 if INTERPRETED else 64
    examples = max(2, 64 // block)
    head.towards_weights[(-(-size // width), tasks)](
        a, g_a, b, g_b, room, bias_room, n,
        SIZE=size, WAYS=ways, BW=block, BF=width, BM=examples, PAIRS=len(pairs), num_warps=4, **OVERLAPPED,
    )  # fmt: skip
