"""All sizes, options and combinations of the kernels; tests/engine has one of each kind.

Without a GPU they run in Triton's interpreter. On a GPU: pytest tests/engine tests/stress/test_kernels.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradshare as gs
from gradshare.engine.conv4.triton import device
from gradshare.learners.parts import gradients_in_parts
from gradshare.method.state import flatten
from tests.support.kernel_learners import (
    EVERY,
    HARD,
    SMALL,
    SOME,
    check_batch,
    check_hard_inputs,
    check_meta_gradients_and_memory,
    pair_of,
    start_of,
)
from tests.support.kernel_tools import (
    CASES,
    GPU,
    SUMS,
    Batch,
    Case,
    batch_of,
    check_convolve,
    check_correlate,
    error,
    in_few_programs,
    name_of,
    needs_interpreter,
    tasks_of,
    without_checks,
)

every_case = pytest.mark.parametrize("case", CASES, ids=name_of)
one_or_two_pairs = pytest.mark.parametrize("pairs", [1, 2], ids=["one pair", "two pairs"])


@pytest.fixture
def many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch)
    if device.INTERPRETED:
        monkeypatch.setattr(device, "MOST_PARTS", 2)  # so that few programs need several rounds


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    in_few_programs(monkeypatch)


@pytest.mark.skipif(GPU, reason="the network has no other convolutions than tests/engine: not worth a compilation")
@every_case
@one_or_two_pairs
@pytest.mark.parametrize("adjoint", [False, True], ids=["convolution", "adjoint"])
@pytest.mark.parametrize("sums", SUMS)
def test_convolve(case: Case, pairs: int, adjoint: bool, sums: str, many_programs: None) -> None:
    check_convolve(case, pairs, adjoint, sums)


@every_case
@one_or_two_pairs
@pytest.mark.parametrize("taps", [9] if GPU else [1, 9])
@pytest.mark.parametrize("finest", [False, True], ids=["usual parts", "finest parts"])
def test_correlate(case: Case, pairs: int, taps: int, finest: bool, many_programs: None) -> None:
    check_correlate(case, pairs, taps, finest)


COMBINATIONS = SOME | EVERY if GPU else SOME


@needs_interpreter
@pytest.mark.parametrize("make, sharing, image", COMBINATIONS.values(), ids=COMBINATIONS)
def test_meta_gradients_and_memory(make: Any, sharing: Any, image: Any, few_programs: None) -> None:
    check_meta_gradients_and_memory(make, sharing, image)


@needs_interpreter
@pytest.mark.parametrize("images, weights", HARD, ids=[f"{x.__name__}-{w.__name__}" for x, w in HARD])
def test_hard_inputs_give_numbers_as_good_as_the_general_path(images: Any, weights: Any, few_programs: None) -> None:
    check_hard_inputs(images, weights)


@needs_interpreter
def test_one_task_alone(few_programs: None) -> None:
    check_batch(*pair_of(sharing=gs.GradientSharing()), tasks=1)


@needs_interpreter
def test_the_gradient_of_some_weights_is_that_part_of_the_whole(few_programs: None) -> None:
    """The outer backward pass visits the first derivative before the network, also if it needs only a part."""
    learner, _ = pair_of(sharing=gs.GradientSharing(), steps=2)
    state, episodes = start_of(learner), tasks_of(2, 1, 1, 1, SMALL)
    everything, _ = batch_of(learner, state, episodes)
    name = "params/norms.1.weight"
    (value,) = torch.autograd.grad(learner.outer_loss(state, episodes).loss, state.trainable()[name])
    assert torch.equal(value, everything.gradients[name])


@pytest.mark.skipif(GPU, reason="with a GPU, the other tests compile them")
def test_all_variants_of_every_program_compile_for_an_h200() -> None:
    from tests.support.compile_kernels import check_compiled

    check_compiled("tf32", "bf16")


@needs_interpreter
@pytest.mark.parametrize("sharing", [gs.GradientSharing(), gs.GradientSharing("tensor")], ids=["global", "tensor"])
def test_parts_of_a_batch(few_programs: None, sharing: Any) -> None:
    """One task and one inner step at a time: the packed weights, and the rule by fused programs for all tasks."""
    learner, _ = pair_of(gs.maml_plus_plus, sharing, steps=2)
    state, episodes = start_of(learner), tasks_of(2, 2, 2, 2, SMALL)
    expected, whole = batch_of(learner, state, episodes)
    outcome, values = gradients_in_parts(learner, state, episodes, 1)
    found = dict(zip(expected.gradients, values, strict=True))
    assert all(value is not None for value in values)
    memory = {name: value for name, value in flatten(outcome.memory, "memory").items() if value.is_floating_point()}
    assert error(Batch(outcome.loss, outcome.losses, found, memory), expected) < 1e-5  # type: ignore[arg-type]
    assert whole.accuracy is not None and torch.equal(whole.accuracy, outcome.accuracy)  # type: ignore[arg-type]
