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

from tests.support import formulas

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

import gradshare as gs
from gradshare.engine.conv4.triton import convolution, device, first_block
from gradshare.engine.conv4.triton.convolution import Sums
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
    """Run the interpreter without its check of every integer operation for overflow, a third of its time."""
    if device.INTERPRETED:
        from triton.runtime.interpreter import interpreter_builder

        patch.setattr(interpreter_builder, "options", replace(interpreter_builder.options, sanitize_overflow=False))


def in_few_programs(patch: pytest.MonkeyPatch) -> None:
    """Use large tiles and few programs: the interpreter's time depends on their number, not on their size."""
    without_checks(patch)
    if device.INTERPRETED:
        patch.setattr(device, "processors", lambda place: 1)
        patch.setattr(convolution, "_tile", lambda x, positions: Tile(256, 64, 4, 1))
        patch.setattr(convolution, "CORRELATION", dict.fromkeys(convolution.CORRELATION, Tile(64, 256, 4, 1)))
        patch.setattr(first_block, "TILE", Tile(512, 0, 4, 0))
        patch.setattr(first_block, "PATCHES", Tile(2048, 0, 4, 0))


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN, so that a test sees what a kernel does not write, or reads by mistake."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def draw(seed: int, *shape: int, kind: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers on the device, the same on every machine."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(kind).to(DEVICE)


def as_weights(values: Tensor) -> Tensor:  # [tasks, rows, columns]
    """The same values as a part of a longer vector for each task, as the kernels get weights; the rest is NaN."""
    tasks, size = len(values), values[0].numel()
    flat = values.new_full((tasks, -(-size // 16) * 16 + 32), torch.nan)
    flat[:, 16 : 16 + size] = values.flatten(1)
    return flat[:, 16 : 16 + size].view_as(values)


def assert_near(found: Tensor, expected: Tensor, tolerance: float, scale: Any = None, what: str = "") -> None:
    """Compare norms and elements, relative to the size of the expected values, or to `scale` if that is larger."""
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
    """Results of one batch of tasks, by flat names."""

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
    """The largest error of any tensor, relative to its own size plus a hundredth of the size of all."""
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
    """Noise around a pattern for each class, in float32."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(tasks, ways, *image, generator=generator)

    def part(each: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(tasks, ways * each, *image, generator=generator)
        return (patterns.repeat(1, each, 1, 1, 1) + noise) / 2, torch.arange(ways).repeat(each).expand(tasks, -1)

    return gs.Episodes(*part(shots), *part(queries)).to(DEVICE)


def varied(state: gs.MetaState, seed: int = 0) -> gs.MetaState:
    """Move weights, gains, m, lambda and rates away from their initial values, so that no two are equal."""
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
    """The learner on the kernels; by default in true float32, which is not available to users."""
    if precision != "float32":
        return learner.to(DEVICE, precision)
    if device.INTERPRETED:  # where TF32 is float32
        return learner.to(DEVICE, "tf32")
    learner = learner.to(DEVICE)
    network = TritonConv4(learner.module, learner.adapted, learner.rule.any_layout, "float32")  # type: ignore[arg-type]
    learner.__dict__["network"] = network
    return learner


class Case(NamedTuple):
    """A block: its activations, and its channels before and after the convolution."""

    precision: Any
    tasks: int
    n: int
    height: int
    width: int
    inputs: int
    outputs: int

    @property
    def kind(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.precision]

    def draw(self, seed: int, channels: int, shrink: int = 1) -> Tensor:
        """Random activations; with `shrink` 2, pooled ones."""
        size = (self.height // shrink, self.width // shrink)
        return draw(seed, self.tasks, self.n, *size, channels, kind=self.kind)

    def weights(self, seed: int, taps: int = 9) -> Tensor:
        rows = taps * self.inputs
        return as_weights(draw(seed, self.tasks, rows, self.outputs, kind=self.kind) / rows**0.5)


ON_CPU = [
    Case("float32", 2, 3, 7, 6, 5, 7),
    Case("float32", 1, 2, 5, 9, 18, 12),
    Case("float32", 8, 1, 3, 5, 2, 20),
    Case("float32", 2, 12, 9, 10, 4, 6),
]
ON_GPU = [
    Case("float32", 2, 3, 7, 6, 5, 7),
    Case("tf32", 3, 7, 21, 19, 48, 48),
    Case("bf16", 3, 7, 21, 19, 48, 48),
]
CASES = ON_GPU if GPU else ON_CPU


def name_of(case: Case) -> str:
    return f"{case.precision}-{case.tasks}x{case.n}x{case.height}x{case.width}-{case.inputs}to{case.outputs}"


SUMS = ("none", "moments", "means", "pooled")


def check_convolve(case: Case, pairs: int, adjoint: bool, sums: str) -> None:
    """Result and sums of the convolution of one pair or two, or of their gradients with respect to images."""
    source, channels = (case.outputs, case.inputs) if adjoint else (case.inputs, case.outputs)
    x = [case.draw(10 + pair, source) for pair in range(pairs)]
    w = [case.weights(20 + pair) for pair in range(pairs)]
    z, code = case.draw(30, channels), (4 * case.draw(31, channels)).abs().clamp(max=7).to(torch.uint8)
    statistics, count = formulas.statistics(z.double(), EPS).float(), 4 * case.n * case.height * case.width + 3
    wanted = {
        "none": None,
        "moments": Sums.moments(EPS),
        "means": Sums.means(z, statistics),
        "pooled": Sums.pooled(z, code, count, SLOPE),
    }
    with poisoned():
        found, summed = convolution.convolve(
            list(zip(x, w, strict=True)), channels, 9, case.precision, adjoint, wanted[sums]
        )
    exact = [(a.double(), b.double()) for a, b in zip(x, w, strict=True)]
    expected = sum(formulas.towards_images(a, b, 9) if adjoint else formulas.conv(a, b) for a, b in exact)
    assert isinstance(expected, Tensor) and found.dtype == case.kind
    assert_near(found, expected, case.tolerance)
    value, other = found.double(), z.double()  # sums are over the stored result, in float32
    if sums == "moments":
        assert_near(summed, formulas.statistics(value, EPS), 1e-5, what="moments")
    elif sums == "means":
        y = formulas.normalised(other, statistics.double())
        assert_near(summed, means_of(value, y), 1e-5, scale=value.abs().mean(), what="means")
    elif sums == "pooled":
        a = formulas.activated(value, code, SLOPE)
        scaled = means_of(a, other) * (case.n * case.height * case.width / count)
        assert_near(summed, scaled, 1e-5, scale=a.abs().mean() / 4, what="pooled means")


def means_of(a: Tensor, y: Tensor) -> Tensor:  # [T, 2, C]
    return torch.stack([formulas.over_positions(a), formulas.over_positions(a * y)], 1)


def check_correlate(case: Case, pairs: int, taps: int, finest: bool) -> None:
    """The gradient with respect to filters, summed in parts; `finest`: in as many parts as possible."""
    x = [case.draw(10 + pair, case.inputs) for pair in range(pairs)]
    g = [case.draw(20 + pair, case.outputs) for pair in range(pairs)]
    rows, positions = taps * case.inputs, case.n * case.height * case.width
    parts = convolution.splits(case.tasks, positions, rows, case.precision, DEVICE)
    if finest:
        depth = convolution.CORRELATION[case.precision].depth
        parts = (-(-positions // depth), depth)
    with_bias = taps == 1
    wanted = ((16, parts[0], rows * case.outputs), (16 + rows * case.outputs + 5, parts[0], case.outputs))
    sums = convolution.partial_sums(wanted, case.tasks, wanted[1][0] + case.outputs + 3, DEVICE)
    with poisoned():
        buffer = sums.buffer()
        weights, bias = (buffer[part] for part in sums.slices)
        both = list(zip(x, g, strict=True))
        convolution.correlate(both, taps, case.precision, weights, parts, bias if with_bias else None)
        if not with_bias:
            bias.fill_(0)
        found = sums.add(buffer)
    expected = sum(formulas.towards_filters(a.double(), b.double(), taps) for a, b in both)
    assert isinstance(expected, Tensor)
    exact = torch.zeros_like(found, dtype=torch.float64)
    exact[:, 16 : 16 + rows * case.outputs] = expected.flatten(1)
    if with_bias:
        exact[:, wanted[1][0] : wanted[1][0] + case.outputs] = g[0].double().sum((1, 2, 3))
    assert_near(found, exact, case.tolerance)
    assert torch.equal(found == 0, exact == 0)  # where nothing is summed
