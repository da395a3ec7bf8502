"""Runs with inner optimisers and learned preconditioning: stopped and resumed to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import gradshare as gs
from gradshare.runs.workers import Interrupted
from tests.support.runs import TINY, StopAt, same_run

MAKES: dict[str, Callable[..., gs.Learner]] = {
    "alfa, momentum": partial(gs.alfa, inner=gs.momentum(0.5)),
    "meta-curvature": gs.meta_curvature,
    "sparse-maml, adam": partial(gs.sparse_maml, inner=gs.adam(), inner_lr=0.01),
    "proto-maml": gs.proto_maml,
    "zero head": partial(gs.boil, head="convs.0", head_start="zero-init"),
    "reptile": lambda model, steps, sharing: gs.reptile(model, steps=steps),  # which learns no gate
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_stopped_run_is_resumed_to_the_same_bits(
    make: Callable[..., gs.Learner], dataset: gs.Dataset, tmp_path: Path
) -> None:
    def learner() -> gs.Learner:
        return make(gs.Conv4(ways=3, filters=3, image=(1, 16, 16)), steps=2, sharing=gs.GradientSharing())

    options = TINY | {"epochs": 2, "display": False}
    gs.train(learner(), dataset, tmp_path / "whole", **options)
    with pytest.raises(Interrupted):
        gs.train(learner(), dataset, tmp_path / "stopped", **options | {"display": StopAt(1, 3)})
    gs.train(learner(), dataset, tmp_path / "stopped", resume=True, **options)
    same_run(tmp_path / "whole", tmp_path / "stopped")
