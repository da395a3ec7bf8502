"""Factors of TF32 products are rounded to the nearest where they are written, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gradshare.engine.conv4.triton import device, first_block, pooled_norm
from gradshare.engine.conv4.triton.device import factors
from tests.support.kernel_learners import exactly, in_float64, pair_of, start_of
from tests.support.kernel_tools import DEVICE, batch_of, error, needs_interpreter, tasks_of

SMALL = (1, 16, 16)


def nearest(values: Tensor) -> Tensor:
    """The nearest numbers of 11 bits, ties away from zero, by arithmetic in float64."""
    exact = values.double().numpy()
    mantissa, exponent = np.frexp(np.abs(exact))  # mantissa in [1/2, 1)
    rounded = np.ldexp(np.floor(np.ldexp(mantissa, 11) + 0.5), exponent - 11)
    return torch.from_numpy(np.copysign(rounded, exact)).float()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(4 * torch.randn(shape, generator=generator))


def test_the_reference_knows_a_tie() -> None:
    one_step = 2.0**-10
    values = torch.tensor([1 + one_step / 2, -1 - one_step / 2, 1 + one_step * 0.499, 1 + one_step])
    assert nearest(values).tolist() == [1 + one_step, -1 - one_step, 1, 1 + one_step]


def test_rounding_is_to_the_nearest() -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ties = (torch.arange(-2000, 2000) * 0x1000).to(torch.int32) + 0x3F800000
    values = torch.cat([bits.view(torch.float32), ties.view(torch.float32), drawn(10_000)])
    values = values[values.isfinite() & (values.abs() > 1e-37) & (values.abs() < 3e38)]
    found = factors(values.to(DEVICE), torch.float32, rounded=True).cpu()
    assert torch.equal(found.view(torch.int32), nearest(values).view(torch.int32))
    assert not torch.equal(found, values)


def test_what_is_not_finite_stays_so() -> None:
    bits = torch.tensor([0x7F800000, -0x800000, 0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001, 0, -(2**31)], dtype=torch.int32)
    found = factors(bits.view(torch.float32).to(DEVICE), torch.float32, rounded=True).cpu()
    assert found[:2].tolist() == [float("inf"), -float("inf")] and found[2:6].isnan().all()
    assert torch.equal(found[6:].view(torch.int32), bits[6:])


@needs_interpreter
def test_every_program_rounds_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: peaks and codes are the same."""
    tasks, n, side, channels = 2, 3, 6, 5
    z, q = drawn(tasks, n, side, side, channels), drawn(tasks, n, side, side, channels, seed=1)
    gradient, later = (drawn(tasks, n, side // 2, side // 2, channels, seed=seed) for seed in (2, 3))
    gain, bias = drawn(channels, seed=4), drawn(channels, seed=5)
    statistics, means, more = (drawn(tasks, 2, channels, seed=seed) for seed in (6, 7, 8))
    pooled = [pooled_norm.pool(z, statistics, gain, bias, 0.01, rounded) for rounded in (False, True)]
    check(*(out for out, _, _ in pooled))
    assert all(torch.equal(one, other) for one, other in zip(pooled[0][1:], pooled[1][1:], strict=True))
    peak, code = pooled[0][1:]
    second = pooled_norm.SecondOrder(q, more, more[:, 0].contiguous(), later, means)
    for extra in (None, second):
        check(
            *(
                pooled_norm.scatter(z, statistics, gain, code, gradient, means, 0.01, extra, rounded)
                for rounded in (False, True)
            )
        )
    gathered = [
        pooled_norm.gather(q, peak, code, gradient, statistics, gain, more, means, 0.01, rounded)
        for rounded in (False, True)
    ]
    check(*(out for out, _ in gathered))
    assert torch.equal(gathered[0][1], gathered[1][1])
    images = torch.rand(tasks, n, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    plain = first_block.patches(images, "tf32").x
    monkeypatch.setitem(device.ROUNDED, "tf32", True)
    check(plain, first_block.patches(images, "tf32").x)


def check(plain: Tensor, rounded: Tensor) -> None:
    assert torch.equal(rounded, nearest(plain)) and not torch.equal(rounded, plain)


@needs_interpreter
def test_a_whole_step_with_rounded_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, whose products are in float32: rounding alone. Cutting off would be further away."""
    learner, exact = pair_of(steps=2)
    state, episodes = start_of(learner), tasks_of(2, 2, 2, 2, SMALL)
    expected, _ = batch_of(exact, exactly(state), in_float64(episodes))
    assert error(batch_of(learner, state, episodes)[0], expected) < 1e-5
    monkeypatch.setitem(device.ROUNDED, "tf32", True)
    assert 1e-5 < error(batch_of(learner, state, episodes)[0], expected) < 0.02


def test_no_rounding_of_other_precisions() -> None:
    values = drawn(100)
    assert factors(values, torch.float32, rounded=False) is values
    assert not device.ROUNDED["float32"] and not device.ROUNDED["bf16"]
