"""The paper's 96 experiments, against a table written from the paper's text and FACTS.md, not from the code."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from fnmatch import fnmatchcase

import pytest

import gradshare as gs
from gradshare.experiments.presets import (
    EVERY_ARM,
    LITERATURE,
    OTHERS,
    PRESETS,
    TABLE,
    described,
    experiment,
    preset,
    select,
)
from gradshare.learners.algorithms import multi_step_weights
from gradshare.method.variants import CONTROLS, VARIANTS
from gradshare.runs.build import build_learner
from gradshare.runs.config import RunConfig

# Not an experiment's: the machine's, or the seed. None in the presets: the recipe decides.
FREE = {"seed", "eval_batch", "micro_batch", "checkpoint", "device", "engine", "threads", "precision", "deterministic"}
RECIPES_OWN = {"multi_step_epochs", "first_order_epochs", "final_outer_rate"}

EPOCHS = {("cub", 5): 150, ("mini", 5): 250, ("cub", 1): 750, ("mini", 1): 1250}
OTHER_ARMS = [arm for arm in VARIANTS if arm not in ("original", "shared")]
ALL_NAMES = [
    f"{data}-{shots}shot-{tasks}task-{method}{sharing}{rate}"
    for data, shots, tasks, method, sharing, rate in itertools.product(
        ("cub", "mini"), (1, 5), (1, 5), ("maml", "metasgd", "mamlpp"), ("", "+gs"), ("", "-10x")
    )
]


def test_there_are_96_names_and_no_others() -> None:
    assert len(ALL_NAMES) == 96 and set(PRESETS) == set(ALL_NAMES)
    assert set(EVERY_ARM) - set(PRESETS) == {
        f"{name}~{arm}" for name in ALL_NAMES if "+gs" not in name for arm in OTHER_ARMS
    }


def test_every_preset_is_what_the_paper_says() -> None:
    for name in ALL_NAMES:
        check_preset(name)


def check_preset(name: str) -> None:
    data, shots, tasks, rest = name.split("-", 3)
    plus = "mamlpp" in rest
    expected = {
        "ways": 5,
        "queries": 15,
        "shots": int(shots[0]),
        "tasks": int(tasks[0]),
        "steps": 5,
        "backbone": "conv4",
        "filters": 48,
        "start": None,
        "adapt": None,
        "head_start": "learned",
        "inner": None,
        "inner_lr": 1.0 if rest.endswith("-10x") else 0.1,
        "outer_lr": 0.001,
        "gates": 1.0,
        "epochs": EPOCHS[data, int(tasks[0])],
        "iterations": 1000,
        "val_tasks": 600,
        "test_tasks": 600,
        "method": rest.removesuffix("-10x").removesuffix("+gs"),
        "arm": "shared" if "+gs" in rest else "original",
        "norm": "global",
        "norm_statistics": "batch",
        "patience": 0,
        "adapt_norm": False,
        "dataset": {"cub": "cub-resize" if plus else "cub", "mini": "mini"}[data],
        "pixels": "imagenet" if plus else "unit",
        "gradient_clamp": 10.0 if plus and data == "mini" else 0.0,
        "recipe": "reference",
        **dict.fromkeys(RECIPES_OWN),
    }
    config = preset(name)
    assert {option: getattr(config, option) for option in expected} == expected, name
    assert {field.name for field in fields(RunConfig)} - set(expected) <= FREE
    assert experiment(name).name == name


def test_the_table_sets_every_option_itself_and_says_why() -> None:
    """So that a new default of RunConfig cannot change an experiment unnoticed."""
    for name in EVERY_ARM:
        options = described(name)
        assert set(options) == {field.name for field in fields(RunConfig)} - FREE - RECIPES_OWN
        assert all(source for _, source in options.values())
    assert all(any(select([row.names])) for row in TABLE)


def test_maml_plus_plus_changes_over_the_epochs_as_its_code_does() -> None:
    config = preset("mini-5shot-5task-mamlpp+gs")
    learner = build_learner(config, (3, 84, 84))
    weights = {epoch: [round(weight, 4) for weight in learner.at(epoch).step_weights] for epoch in (0, 7, 14, 15)}
    assert weights[0] == [0.2] * 5 and weights[7] == [0.1067] * 4 + [0.5733]
    assert weights[14] == [0.0133] * 4 + [0.9467] and weights[15] == [0, 0, 0, 0, 1]
    assert learner.final_outer_rate == 1.0
    assert learner.at(0).rule == learner.at(249).rule  # second order from the start
    assert multi_step_weights(15, 5, 15) == tuple(weights[15])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conv32-mini-1shot-maml", dict(filters=32, tasks=4, shots=1, queries=15, epochs=60, gradient_clamp=10.0)),
        ("conv32-mini-5shot-maml", dict(filters=32, tasks=2, shots=5, dataset="mini", method="maml", pixels="unit")),
        ("conv64-cub-1shot-fomaml", dict(filters=64, tasks=4, shots=1, queries=16, epochs=60, dataset="cub")),
        ("conv64-mini-5shot-fomaml", dict(filters=64, shots=5, epochs=40, method="fomaml", adapt_norm=True)),
    ],
)
def test_presets_of_other_papers(name: str, expected: dict[str, object]) -> None:
    config = preset(name)
    expected |= {"inner_lr": 0.01, "steps": 5, "arm": "original", "iterations": 1000, "backbone": "conv4"}
    assert {option: getattr(config, option) for option in expected} == expected
    assert preset(name, arm="shared", steps=1) == replace(config, arm="shared", steps=1)


def test_every_row_of_other_papers_is_used() -> None:
    assert all(any(fnmatchcase(name, row.names) for name in LITERATURE) for row in OTHERS)
    assert not set(LITERATURE) & set(EVERY_ARM)
    with pytest.raises(gs.UserError, match="did you mean conv32-mini-1shot-maml"):
        preset("conv32-mini-1shot-mamml")


def test_controls_are_arms_of_the_same_experiment() -> None:
    for arm in OTHER_ARMS:
        config, original = preset(f"cub-1shot-5task-metasgd-10x~{arm}"), preset("cub-1shot-5task-metasgd-10x")
        different = {f.name for f in fields(RunConfig) if getattr(config, f.name) != getattr(original, f.name)}
        assert different == ({"arm", "inner_lr"} if arm in ("half-rate", "quarter-rate") else {"arm"})
    assert preset("cub-1shot-5task-maml~half-rate").inner_lr == 0.05
    assert preset("cub-1shot-5task-maml~half-rate", inner_lr=0.4).inner_lr == 0.2


@pytest.mark.parametrize(
    ("patterns", "arms", "count"),
    [
        (["*"], [], 96),
        (["cub-*-5task-*"], [], 24),
        (["*+gs*"], [], 48),
        (["cub-5shot-5task-maml", "cub-5shot-5task-m*"], [], 12),
        (["*~half-rate"], [], 48),
        (["cub-5shot-5task-maml+gs"], ["original", "shared", *CONTROLS], 7),
        (["mini-1shot-*-mamlpp*"], ["memory-only"], 4),
        (["cub-1shot-*task-maml"], ["original", "shared", "conditioned"], 6),
        (["cub-1shot-*task-maml*"], ["original", "my_rules:Additive"], 16),
        (["cub-1shot-*task-maml*~my_rules:Additive"], [], 8),
    ],
)
def test_patterns_select(patterns: list[str], arms: list[str], count: int) -> None:
    chosen = select(patterns, arms)
    assert len(chosen) == len({one.name for one in chosen}) == count
    known = [one.name for one in chosen if one.name in EVERY_ARM]
    assert known == [name for name in EVERY_ARM if name in known]


def test_an_arm_of_ones_own_is_an_arm_of_every_experiment() -> None:
    one = experiment("cub-1shot-5task-mamlpp-10x~my_rules:Additive")
    assert one.name == "cub-1shot-5task-mamlpp-10x~my_rules.Additive"  # a folder's name too
    config, original = preset(one), preset("cub-1shot-5task-mamlpp-10x")
    different = {f.name for f in fields(RunConfig) if getattr(config, f.name) != getattr(original, f.name)}
    assert different == {"arm"} and config.arm == "my_rules:Additive"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("cub-5shot-5task-mamml+gs", "cub-5shot-5task-maml"),  # the nearest
        ("cub-5shot-5task-maml+gs~half-rate", "preset"),
        ("cub-5shot-5task-maml+gs~my_rules:Additive", "preset"),
        ("zebra-*", "zebra"),
        ("zebra-*~my_rules:Additive", "zebra"),
    ],
)
def test_unknown_names_are_errors(name: str, word: str) -> None:
    with pytest.raises(gs.UserError, match=word):
        select([name]) if "*" in name else experiment(name)
