"""Run folders and models that an earlier version wrote, in `kept/`, still open, resume and predict as then.

They were written by the code of commit 6d122cb: `run` by the command line's `run(config)`, `stopped` and `own_model` by
`gs.train` with a learner of a user's own. `expected/` is what that code made of them when it resumed them.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gradshare as gs
from gradshare.runs.build import run
from gradshare.runs.display import Silent
from gradshare.runs.folder import RunFolder
from tests.conftest import write_blobs

KEPT = Path(__file__).parent / "kept"


@pytest.fixture(autouse=True)
def beside_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_blobs(tmp_path / "blobs", {"train": 12, "val": 6, "test": 6})  # config.json names the data set `blobs`
    for name in ("run", "stopped"):
        shutil.copytree(KEPT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)


def own_learner() -> gs.Learner:
    return gs.meta_sgd(gs.Conv4(3, 4, (1, 16, 16)), steps=2, sharing=gs.GradientSharing(conditioned=True))


def same_values(found: Any, expected: Any) -> None:
    """The same JSON, with numbers that may differ by rounding: another CPU may sum in another order."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            same_values(found[name], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            same_values(one, other)
    else:
        assert found == (pytest.approx(expected, rel=1e-3) if isinstance(expected, float) else expected)


def compare(folder: str, expected: str) -> None:
    for name in ("metrics.jsonl", "summary.json"):
        texts = [path.joinpath(name).read_text() for path in (Path(folder), KEPT / "expected" / expected)]
        same_values(*([json.loads(t) for t in (text.splitlines() if name[0] == "m" else [text])] for text in texts))


def test_a_finished_run_is_resumed_for_more_epochs() -> None:
    config = RunFolder(Path("run")).config()
    assert config is not None
    run(replace(config, epochs=4), Path("run"), True, Silent())
    compare("run", "longer")


def test_a_run_stopped_in_the_middle_of_an_epoch_is_resumed() -> None:
    options = RunFolder(Path("stopped")).options()
    about = {"model": options.pop("model")}
    gs.train(own_learner(), gs.load_dataset("blobs"), "stopped", resume=True, about=about, **options)
    compare("stopped", "resumed")


def test_a_finished_run_is_tested_as_then() -> None:
    saved = gs.load_run("run")
    test = json.loads(Path("run/summary.json").read_text())["test"]
    result = gs.evaluate(saved, tasks=test["tasks"])
    assert result.norm_statistics == "batch" and result.loss == pytest.approx(test["best"]["loss"], rel=1e-3)


def test_models_predict_as_then() -> None:
    expected = json.loads((KEPT / "predictions.json").read_text())
    episodes = gs.load_dataset("blobs").sample("test", gs.Shape(3, 1, 3), 2, (1, 2, 3))
    for name, own in (("model", None), ("own_model", own_learner())):
        learner, state = gs.from_pretrained(KEPT / name, own)
        torch.testing.assert_close(learner.logits(state, episodes), torch.tensor(expected[name]), rtol=1e-3, atol=1e-4)
