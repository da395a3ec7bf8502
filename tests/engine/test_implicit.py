"""Convolutions of all tasks as one product each: in Triton's interpreter, or on a GPU through the operators."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the programs are written in Triton, which is not installed")

from gradshare.engine import convolution, implicit
from gradshare.engine.convolution import _like, _shape, laid_out, operators
from gradshare.engine.operations import Options
from tests.support.kernel_tools import DEVICE, draw, needs_gpu, needs_interpreter, without_checks

# Sources, targets, height and width of a filter, stride, padding, dilation, pixels of a side.
CASES = [
    (3, 8, (3, 3), 1, 1, 1, 9),
    (64, 40, (3, 3), 2, 1, 1, 8),
    (5, 6, (3, 2), 2, 0, 2, 11),
    (32, 64, (1, 1), 1, 0, 1, 6),
    (64, 32, (5, 5), 3, 2, 1, 10),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def of_case(case: tuple, kind: torch.dtype) -> tuple[Options, torch.Tensor, torch.Tensor, torch.Tensor]:  # type: ignore[type-arg]
    sources, targets, width, stride, padding, dilation, side = case
    how = Options([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], 1)
    x = laid_out(draw(0, 2, 3, sources, side, side - 1, kind=kind))
    w = laid_out(draw(1, 2, targets, sources, *width, kind=kind))
    return how, x, w, laid_out(draw(2, *_shape(x, w, how), kind=kind))


@needs_interpreter
@every_case
def test_products_are_the_convolution_and_its_gradients(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[type-arg]
    without_checks(monkeypatch)
    monkeypatch.setattr(convolution, "AT_ONCE", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    how, x, w, g = of_case(case, torch.float32)
    pairs = [
        (implicit.conv(x, w, how, torch.full_like(g, torch.nan)), operators.conv(x, w, *how)),
        (implicit.images_gradient(g, w, how, _like(x, x.shape)), operators.images_gradient(g, x, w, *how)),
        (implicit.filters_gradient(g, x, how, _like(w, w.shape)), operators.filters_gradient(g, x, w, *how)),
    ]
    for found, expected in pairs:
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@needs_gpu
@every_case
def test_operators_in_bfloat16_are_those_of_pytorch(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[type-arg]
    how, x, w, g = of_case(case, torch.bfloat16)

    def all_three() -> list[torch.Tensor]:
        return [
            operators.conv(x, w, *how), operators.images_gradient(g, x, w, *how),
            operators.filters_gradient(g, x, w, *how),
        ]  # fmt: skip

    found = all_three()
    monkeypatch.setattr(convolution, "AT_ONCE", False)
    for ours, expected in zip(found, all_three(), strict=True):
        assert ours.stride() == expected.stride()
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


def test_programs_that_run_are_those_for_the_gpu() -> None:
    """A convolution that the programs do not know is computed by task."""
    how, x = of_case(CASES[0], torch.bfloat16)[:2]
    assert convolution._at_once(x, how) == (DEVICE.type == "cuda")
    assert not convolution._at_once(x.float(), how)
    assert not convolution._at_once(x[:1], how)
    assert not convolution._at_once(x, how._replace(groups=3))
