"""Runs by configuration: what a RunConfig describes, arms of a user's own, and what a resumed run keeps."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gradshare as gs
from gradshare.engine import backends, choose
from gradshare.method.variants import VARIANTS
from gradshare.runs.build import build_learner, choice_for, run
from gradshare.runs.config import RunConfig, original_rate, with_arm
from gradshare.runs.display import Silent
from gradshare.runs.folder import RunFolder, find_runs, merge_with_saved
from tests.support.runs import TINY

OPTIONS: dict[str, Any] = TINY | {"epochs": 1, "iterations": 1, "filters": 3, "steps": 1, "device": "cpu", "threads": 1}
OWN = "own_rules_of_a_test:Doubled"
RULES = """
from dataclasses import dataclass
from gradshare.method.sharing import GradientSharing

class Doubled(GradientSharing):
    pass
"""


@pytest.fixture
def own_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's that says when it is imported."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own_rules_of_a_test.py").write_text(RULES)
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.delitem(sys.modules, "own_rules_of_a_test", raising=False)
    return OWN


def imported() -> bool:
    return "own_rules_of_a_test" in sys.modules


@pytest.mark.parametrize("arm", VARIANTS)
def test_every_arm_builds(arm: str) -> None:
    config = with_arm(RunConfig(**OPTIONS), arm)
    assert build_learner(config, (1, 16, 16)).init(0).params


def test_the_inner_rate_of_an_arm_and_back() -> None:
    config = RunConfig(inner_lr=0.1, arm="shared")
    half = with_arm(config, "half-rate")
    assert half.inner_lr == 0.05 and half.arm == "half-rate"  # config.json has the rate that is used
    assert original_rate(half.arm, half.inner_lr) == 0.1 and with_arm(half, "shared") == config
    for saved in find_runs(Path(__file__).parents[2] / "results"):
        stored = saved.config()
        assert stored is not None
        if stored.arm == "half-rate":
            assert (stored.inner_lr, original_rate(stored.arm, stored.inner_lr)) == (0.05, 0.1)


def test_an_arm_of_a_users_own_is_imported_only_when_the_user_names_it(
    own_rule: str, blobs: Path, dataset: gs.Dataset, tmp_path: Path
) -> None:
    config = RunConfig(**OPTIONS, arm=own_rule, dataset=str(blobs))
    folder = tmp_path / "run"
    for act in (
        lambda: run(config, folder, False, Silent()),
        lambda: build_learner(config, (1, 16, 16)),
    ):
        with pytest.raises(gs.UserError, match="hand over the learner"):
            act()
    assert not imported() and not folder.exists()
    run(config, folder, False, Silent(), allowed={own_rule})
    assert imported()
    del sys.modules["own_rules_of_a_test"]

    found = RunFolder(folder).config()  # as a report does
    saved = gs.load_run(folder)
    assert found is not None and found.arm == saved.config["arm"] == own_rule
    assert RunFolder(folder).damage() == "" and RunFolder(folder).summary() is not None
    saved.save_pretrained(tmp_path / "model")
    for act in (
        saved.learner,
        lambda: gs.from_pretrained(tmp_path / "model"),
        lambda: run(replace(config, epochs=2), folder, True, Silent()),
    ):
        with pytest.raises(gs.UserError, match="hand over the learner"):
            act()
    assert not imported()

    run(replace(config, epochs=2), folder, True, Silent(), allowed={own_rule})
    assert imported() and len(gs.load_run(folder).metrics) == 2
    learner = gs.load_run(folder).learner(allowed={own_rule})
    given, state = gs.from_pretrained(tmp_path / "model", learner)
    assert given is learner and torch.equal(state.params["head.bias"], saved.state().params["head.bias"])


def test_a_resumed_run_keeps_what_was_chosen_for_its_machine(
    blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(**OPTIONS | {"threads": 0, "device": "auto"}, dataset=str(blobs))
    threads = torch.get_num_threads()
    try:
        for cores in (1, 2):
            monkeypatch.setattr(choose, "own_cores", lambda cores=cores: cores)
            run(config, tmp_path / "run", None, Silent())
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    stored = RunFolder(tmp_path / "run").config()
    assert stored is not None and (stored.threads, stored.device, stored.engine) == (1, "cpu", "eager")
    assert merge_with_saved(config, tmp_path / "run") == stored
    assert merge_with_saved(config, tmp_path / "nothing") == config
    assert merge_with_saved(replace(config, epochs=4), tmp_path / "run", longer=True).epochs == 4
    for changes, message in (({"inner_lr": 0.2}, "inner_lr = 0.1, not 0.2"), ({"epochs": 4}, "epochs = 1, not 4")):
        with pytest.raises(gs.UserError, match=message):
            merge_with_saved(replace(config, **changes), tmp_path / "run")


def test_the_option_deterministic(blobs: Path, tmp_path: Path) -> None:
    """Runs from before there was this option lack it, and are resumed."""
    config = RunConfig(**OPTIONS, dataset=str(blobs))
    run(config, tmp_path / "plain", False, Silent())
    run(replace(config, deterministic=True), tmp_path / "asked", False, Silent())
    plain, asked = RunFolder(tmp_path / "plain"), RunFolder(tmp_path / "asked")
    assert "deterministic" not in plain.options() and asked.options()["deterministic"] is True
    assert (plain.path / "metrics.jsonl").read_bytes() == (asked.path / "metrics.jsonl").read_bytes()
    run(config, plain.path, True, Silent())
    with pytest.raises(gs.UserError, match="deterministic"):
        run(replace(config, deterministic=True), plain.path, True, Silent())


def test_methods_that_the_kernels_do_not_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "not_installed", lambda: None)
    assert choice_for(RunConfig()).precision == "tf32"
    assert "PyTorch" not in choice_for(RunConfig(method="sparsemaml", inner="adam"))._arithmetic
    assert "network of ALFA by PyTorch's operations" in choice_for(RunConfig(method="alfa"))._arithmetic
    for arm, norm in (("equivariant", "global"), ("shared", "tensor")):
        assert f"the directions of {arm}" in choice_for(RunConfig(arm=arm, norm=norm))._arithmetic  # type: ignore[arg-type]
    for options in ({"method": "anil"}, {"method": "boil"}, {"adapt": "convs.3,head"}):
        assert choice_for(RunConfig(**options)).precision == "tf32"  # type: ignore[arg-type]
    by_operations: list[dict[str, Any]] = [{"method": "protomaml"}, {"method": "reptile", "arm": "original"}]
    by_operations += [{"adapt_norm": True}, {"adapt": "head, norms.0.weight"}]
    for options in by_operations:
        assert choice_for(RunConfig(**options)).precision == "float32"  # type: ignore[arg-type]
    compiled = choice_for(RunConfig(adapt_norm=True, precision="bf16"))
    assert (
        "compiled programs in bf16" in compiled._arithmetic and "they do not adapt batch norm" in compiled._arithmetic
    )
    with pytest.raises(gs.UserError, match="leave adapt_norm out"):
        build_learner(RunConfig(method="anil", adapt_norm=True), (1, 16, 16))


def test_options_that_cannot_be() -> None:
    for options, message in (
        ({"method": "sgd"}, "method is 'sgd', not one of maml"),
        ({"arm": "nobody"}, "one of original"),
        ({"inner_lr": 0.0}, "above 0"),
        ({"steps": 2.5}, "whole number"),
        ({"threads": 2000}, "at most 1024"),
        ({"deterministic": "yes"}, "true or false"),
    ):
        with pytest.raises(gs.UserError, match=message):
            RunConfig(**options)  # type: ignore[arg-type]


def test_a_run_of_reptile_records_that_it_adapts_batch_norm() -> None:
    config = RunConfig(method="reptile", arm="original", filters=2)
    assert config.adapt_norm and "norms.0.weight" in build_learner(config, (1, 16, 16)).adapted
