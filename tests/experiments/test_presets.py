"""The paper's 96 experiments, against a table written from the paper's text and FACTS.md, not from the code."""

from __future__ import annotations

import itertools
import json
from dataclasses import fields
from pathlib import Path

import pytest
from tests.cli.test_cli import SMALL, gradshare

import gradshare as gs
from gradshare.cli.options import Given
from gradshare.experiments.presets import CONTROLS, EVERY_ARM, PRESETS, TABLE, described, experiment, preset, select
from gradshare.learners.algorithms import multi_step_weights
from gradshare.runs.build import build_learner
from gradshare.runs.config import RunConfig

# Not an experiment's: the machine's, or the seed. None in the presets: the recipe decides.
FREE = {"seed", "eval_batch", "device", "engine", "threads", "precision", "deterministic"}
RECIPES_OWN = {"multi_step_epochs", "first_order_epochs", "final_outer_rate"}

EPOCHS = {("cub", 5): 150, ("mini", 5): 250, ("cub", 1): 750, ("mini", 1): 1250}
ALL_NAMES = [
    f"{data}-{shots}shot-{tasks}task-{method}{sharing}{rate}"
    for data, shots, tasks, method, sharing, rate in itertools.product(
        ("cub", "mini"), (1, 5), (1, 5), ("maml", "metasgd", "mamlpp"), ("", "+gs"), ("", "-10x")
    )
]


def test_there_are_96_names_and_no_others() -> None:
    assert len(ALL_NAMES) == 96 and set(PRESETS) == set(ALL_NAMES)
    assert set(EVERY_ARM) - set(PRESETS) == {
        f"{name}~{arm}" for name in ALL_NAMES if "+gs" not in name for arm in (*CONTROLS, "conditioned")
    }


@pytest.mark.parametrize("name", ALL_NAMES)
def test_every_preset_is_what_the_paper_says(name: str) -> None:
    data, shots, tasks, rest = name.split("-", 3)
    plus = "mamlpp" in rest
    expected = {
        "ways": 5,
        "queries": 15,
        "shots": int(shots[0]),
        "tasks": int(tasks[0]),
        "steps": 5,
        "filters": 48,
        "inner_lr": 1.0 if rest.endswith("-10x") else 0.1,
        "outer_lr": 0.001,
        "epochs": EPOCHS[data, int(tasks[0])],
        "iterations": 1000,
        "val_tasks": 600,
        "test_tasks": 600,
        "method": rest.removesuffix("-10x").removesuffix("+gs"),
        "arm": "shared" if "+gs" in rest else "original",
        "norm": "global",
        "adapt_norm": False,
        "dataset": {"cub": "cub-resize" if plus else "cub", "mini": "mini"}[data],
        "pixels": "imagenet" if plus else "unit",
        "gradient_clamp": 10.0 if plus and data == "mini" else 0.0,
        "recipe": "reference",
        **dict.fromkeys(RECIPES_OWN),
    }
    config = preset(name)
    assert {option: getattr(config, option) for option in expected} == expected
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


def test_controls_are_arms_of_the_same_experiment() -> None:
    for arm in (*CONTROLS, "conditioned"):
        config, original = preset(f"cub-1shot-5task-metasgd-10x~{arm}"), preset("cub-1shot-5task-metasgd-10x")
        different = {f.name for f in fields(RunConfig) if getattr(config, f.name) != getattr(original, f.name)}
        assert different == ({"arm", "inner_lr"} if arm == "half-rate" else {"arm"})
    assert preset("cub-1shot-5task-maml~half-rate").inner_lr == 0.05
    assert preset("cub-1shot-5task-maml~half-rate", inner_lr=0.4).inner_lr == 0.2


def test_what_is_given_wins_even_where_it_equals_the_default() -> None:
    default = RunConfig()
    config = Given(epochs=default.epochs, dataset=default.dataset).over("mini-5shot-1task-mamlpp+gs")
    assert (config.epochs, config.dataset) == (20, "glyphs") and config.iterations == 1000
    assert Given().over(None) == default and Given(shots=5).over(None).shots == 5
    assert type(Given().over(None)) is RunConfig
    assert preset("cub-5shot-5task-maml", arm="shared").arm == "shared"


@pytest.mark.parametrize(
    ("patterns", "arms", "count"),
    [
        (["*"], [], 96),
        (["cub-*-5task-*"], [], 24),
        (["*+gs*"], [], 48),
        (["cub-5shot-5task-maml", "cub-5shot-5task-m*"], [], 12),
        (["*~half-rate"], [], 48),
        (["cub-5shot-5task-maml+gs"], ["original", "shared", *CONTROLS], 6),
        (["mini-1shot-*-mamlpp*"], ["memory-only"], 4),
        (["cub-1shot-*task-maml"], ["original", "shared", "conditioned"], 6),
    ],
)
def test_patterns_select(patterns: list[str], arms: list[str], count: int) -> None:
    chosen = select(patterns, arms)  # type: ignore[arg-type]
    assert len(chosen) == len(set(chosen)) == count
    assert chosen == [name for name in EVERY_ARM if name in chosen]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cub-5shot-5task-mamml+gs", "did you mean cub-5shot-5task-maml"),
        ("cub-5shot-5task-maml+gs~half-rate", "there is no preset"),
        ("zebra-*", "no preset matches 'zebra-*'"),
    ],
)
def test_unknown_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(gs.UserError, match=message.replace("*", r"\*").replace("+", r"\+")):
        select([name])


def test_train_and_compare_take_presets(blobs: Path, tmp_path: Path) -> None:
    tiny = ["--dataset", blobs, "--pixels", "unit", *SMALL, "--epochs", 1, "--iterations", 2]
    gradshare("train", "--preset", "mini-5shot-5task-mamlpp-10x", *tiny, "--seed", 0, "--out", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    chosen = {"method": "mamlpp", "arm": "original", "inner_lr": 1.0, "shots": 5, "gradient_clamp": 10.0}
    given = {"epochs": 1, "tasks": 2, "filters": 3, "pixels": "unit", "dataset": str(blobs)}
    assert {key: config[key] for key in chosen | given} == chosen | given
    words = ["--preset", "cub-5shot-5task-maml~half-rate", *tiny, "--controls", "--arms", "original", "--jobs", 1]
    gradshare("compare", *words, "--out", tmp_path / "compare")
    rates = {
        path.parent.name: json.loads(path.read_text())["inner_lr"] for path in tmp_path.glob("compare/*/config.json")
    }
    assert rates == {"original": 0.1, "half-rate": 0.05, "gate-only": 0.1, "batch-only": 0.1, "memory-only": 0.1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--preset", "cub-5shot", "--out", "x"], "there is no preset 'cub-5shot'"),
        (["train", "--preset", "cub-5shot-5task-maml", "--resume", "x"], "has its own options: give --resume alone"),
        (["train", "--preset", "cub-5shot-5task-mamlpp", "--out", "x"], "data import cub PATH --transform resize"),
        (["compare", "--preset", "mini-5shot-5task-maml", "--out", "x"], "gradshare data import mini PATH"),
        (["grid", "run", "cub-5shot-5task-maml", "--out", "x"], "gradshare data import cub PATH"),
    ],
)
def test_mistakes_with_presets(words: list[str], message: str) -> None:
    assert message in gradshare(*words, code=2).stderr


def test_list_and_show() -> None:
    lines = gradshare("grid", "list", "--no-hours").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(PRESETS)
    assert lines[1].split() == ["cub-1shot-1task-maml", "cub", "750", "750,000"]
    assert lines[-1].split() == ["all", "96", "57,600,000"]  # 24 x (750 + 150 + 1250 + 250) thousand
    few = gradshare("grid", "list", "mini-5shot-5task-maml", "--controls", "--epochs", 2, "--no-hours").stdout
    assert len(few.splitlines()) == 8 and "mini-5shot-5task-maml~memory-only" in few and " 2,000" in few
    shown = gradshare("grid", "show", "cub-1shot-1task-mamlpp", "--epochs", 7).stdout
    assert "epochs          7           the command line" in shown
    assert "dataset         cub-resize  paper, appendix A.1" in shown


def test_list_estimates_hours(blobs: Path) -> None:
    tiny = ["--dataset", blobs, "--ways", 3, "--queries", 3, "--steps", 2, "--filters", 3]
    result = gradshare("grid", "list", "cub-1shot-*-maml", *tiny)
    header, one, five, total = result.stdout.splitlines()
    assert "timing meta-iterations" in result.stderr and header.split()[-1] == "hours"
    assert float(one.split()[-1]) > 0 and float(five.split()[-1]) > 0 and "at a time" in total
