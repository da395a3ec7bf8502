"""What the tests of the kernels share. Importing it skips a test module where Triton is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

import gradshare as gs
from gradshare.engine.conv4.triton import convolution, device, first_block
from gradshare.engine.conv4.triton.device import Tile
from gradshare.engine.conv4.triton.packed import TritonConv4
from gradshare.method.state import flatten

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TOLERANCES = {"float32": 1e-5, "tf32": 2e-3, "bf16": 2e-2}
EPS, SLOPE = 1e-5, 0.01

needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
needs_interpreter = pytest.mark.skipif(
    not (GPU or device.INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1 before Triton is imported"
)


def without_checks(patch: pytest.MonkeyPatch) -> None:
    """The interpreter without its check of every integer operation for overflow, which takes a third of its time."""
    if device.INTERPRETED:
        from triton.runtime.interpreter import interpreter_builder

        patch.setattr(interpreter_builder, "options", replace(interpreter_builder.options, sanitize_overflow=False))


def in_few_programs(patch: pytest.MonkeyPatch) -> None:
    """Large tiles and few programs: the interpreter's time goes with their number, not with their size."""
    without_checks(patch)
    if device.INTERPRETED:
        patch.setattr(device, "processors", lambda place: 1)
        patch.setattr(convolution, "_tile", lambda x, positions: Tile(256, 64, 4, 1))
        patch.setattr(convolution, "CORRELATION", dict.fromkeys(convolution.CORRELATION, Tile(64, 256, 4, 1)))
        patch.setattr(first_block, "TILE", Tile(512, 0, 4, 0))
        patch.setattr(first_block, "PATCHES", Tile(2048, 0, 4, 0))


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory holds NaN, so that what a kernel forgets to write, or should not read, is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def draw(seed: int, *shape: int, kind: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers on the device, the same everywhere."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(kind).to(DEVICE)


def as_weights(values: Tensor) -> Tensor:  # [tasks, rows, columns]
    """The same as a part of a longer vector for each task, as the kernels get weights; the rest is NaN."""
    tasks, size = len(values), values[0].numel()
    flat = values.new_full((tasks, -(-size // 16) * 16 + 32), torch.nan)
    flat[:, 16 : 16 + size] = values.flatten(1)
    return flat[:, 16 : 16 + size].view_as(values)


def assert_near(found: Tensor, expected: Tensor, tolerance: float, scale: Any = None, what: str = "") -> None:
    """As a whole and element by element, relative to the size of what is expected, or to `scale` if that is larger."""
    assert found.shape == expected.shape, f"{what}: {list(found.shape)}, not {list(expected.shape)}"
    assert found.isfinite().all(), f"{what}: not finite"
    exact, least = expected.detach().double(), 0.0 if scale is None else float(scale)
    away = found.detach().to(exact) - exact
    for size, off in (
        (exact.norm() / exact.numel() ** 0.5, away.norm() / away.numel() ** 0.5),
        (exact.abs().max(), away.abs().max()),
    ):
        allowed = tolerance * max(size.item(), least)
        assert off.item() <= allowed, f"{what}: off by {off.item():.2e}, more than {allowed:.2e}"


class Batch(NamedTuple):
    """Results of one batch of tasks, flat."""

    loss: Tensor
    losses: Tensor
    gradients: dict[str, Tensor]
    memory: dict[str, Tensor]


def batch_of(learner: gs.Learner, state: gs.MetaState, episodes: gs.Episodes) -> tuple[Batch, gs.Outcome]:
    leaves = state.trainable()
    out = learner.outer_loss(state, episodes)
    values = torch.autograd.grad(out.loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    gradients = dict(zip(leaves, values, strict=True))
    memory = {name: value for name, value in flatten(out.memory, "memory").items() if value.is_floating_point()}
    return Batch(out.loss.detach(), out.losses, gradients, memory), out


def error(found: Batch, expected: Batch) -> float:
    """The largest error of any tensor, relative to its own size and a little to that of all."""
    losses = expected.losses.double()
    worst = [((found.losses.to(losses) - losses).abs().max() / losses.abs().max()).item()]
    for all_found, all_expected in ((found.gradients, expected.gradients), (found.memory, expected.memory)):
        assert all_found.keys() == all_expected.keys()
        exact = {name: value.double() for name, value in all_expected.items()}
        everything = sum(value.square().sum().item() for value in exact.values()) ** 0.5
        for name, value in exact.items():
            away = (all_found[name].to(value) - value).norm().item()
            worst.append(away / (value.norm().item() + 0.01 * everything + 1e-30))
    assert all(math.isfinite(part) for part in worst)
    return max(worst)


def tasks_of(
    ways: int, shots: int, queries: int, tasks: int, image: tuple[int, int, int], seed: int = 0
) -> gs.Episodes:
    """Noise about a pattern for each class, in float32."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(tasks, ways, *image, generator=generator)

    def part(each: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(tasks, ways * each, *image, generator=generator)
        return (patterns.repeat(1, each, 1, 1, 1) + noise) / 2, torch.arange(ways).repeat(each).expand(tasks, -1)

    return gs.Episodes(*part(shots), *part(queries)).to(DEVICE)


def varied(state: gs.MetaState, seed: int = 0) -> gs.MetaState:
    """Weights, gains, m, lambda and rates away from their starts, where nothing is equal to anything else."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in state.trainable().items():
            size = 0.02 if "rates" in name else 0.2
            tensor += size * torch.randn(tensor.shape, generator=generator).to(tensor)
    return state


def cast(state: gs.MetaState, kind: torch.dtype) -> gs.MetaState:
    return gs.MetaState.of(
        {name: t.detach().to(kind) if t.is_floating_point() else t for name, t in state.tensors().items()}
    )


def on_kernels(learner: gs.Learner, precision: Any = "float32") -> gs.Learner:
    """The learner on the kernels; in true float32, which no user can ask for, unless said otherwise."""
    if precision != "float32":
        return learner.to(DEVICE, precision)
    if device.INTERPRETED:  # where TF32 is float32
        return learner.to(DEVICE, "tf32")
    learner = learner.to(DEVICE)
    network = TritonConv4(learner.module, learner.adapted, learner.rule.any_layout, "float32")  # type: ignore[arg-type]
    learner.__dict__["network"] = network
    return learner
