"""Options that ask for more than there is: an error before anything of that size is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest

import gradshare as gs
from gradshare.bench.cases import Case
from gradshare.bench.measure import Timing
from gradshare.engine import choose
from gradshare.runs.build import check_memory_for
from tests.support.commands import SMALL, mistake

GB = 10**9
IMAGE = (3, 84, 84)


@pytest.fixture(autouse=True)
def a_machine_with_16_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "own_memory", lambda: 16 * GB)


@pytest.mark.parametrize(
    "asked",
    [
        {"filters": 20_000},
        {"filters": 300, "steps": 1_000},
        {"steps": 1_000_000},
        {"tasks": 10_000},
        {"val_tasks": 10_000, "eval_batch": 10_000},
        {"test_tasks": 10_000, "eval_batch": 10_000},
    ],
)
def test_more_than_the_memory_of_the_machine(asked: dict[str, int]) -> None:
    with pytest.raises(gs.UserError, match=r"at least [\d,]+ GB of memory, and there are 16 GB: take fewer tasks"):
        check_memory_for(gs.RunConfig(**asked), IMAGE, "cpu")


@pytest.mark.parametrize(
    "asked",
    [
        {"filters": 256, "tasks": 16},
        {"steps": 100},
        {"val_tasks": 100_000},  # 25 at a time
        {"eval_batch": 100_000},  # no more than there are tasks
        {"method": "anil", "filters": 300, "steps": 1_000},  # adapts the head alone
    ],
)
def test_what_is_large_and_fits(asked: dict[str, int]) -> None:
    check_memory_for(gs.RunConfig(**asked), IMAGE, "cpu")


def test_the_bound_is_what_a_run_keeps() -> None:
    """The weights of each task and step, and the images: counted by hand."""
    weights = (9 * 3 + 1) * 4 + 3 * (9 * 4 + 1) * 4 + (4 * 5 * 5 + 1) * 5
    images = 8 * 5 * 16 * 3 * 84 * 84
    config = gs.RunConfig(filters=4, tasks=8, steps=7, val_tasks=2, test_tasks=2)
    least = images + 8 * 7 * weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "own_memory", lambda: 4 * least)
        check_memory_for(config, IMAGE, "cpu")
        patch.setattr(choose, "own_memory", lambda: 4 * least - 1)
        with pytest.raises(gs.UserError):
            check_memory_for(config, IMAGE, "cpu")


@pytest.mark.parametrize(("option", "value"), [("filters", "50000"), ("steps", "1000000000"), ("tasks", "1000000000")])
def test_commands_end_at_once(blobs: Path, tmp_path: Path, option: str, value: str) -> None:
    sizes = dict(zip(SMALL[::2], SMALL[1::2], strict=True)) | {f"--{option}": value, "--iterations": "1"}
    words = [word for pair in sizes.items() for word in pair]
    assert "GB of memory" in mistake("train", "--dataset", blobs, *words, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_benchmark_that_is_too_large() -> None:
    with pytest.raises(gs.UserError, match="GB of memory"):
        Timing(Case(tasks=100_000), each=1)


def test_a_contact_sheet_that_is_too_large(blobs: Path, tmp_path: Path) -> None:
    words = ["data", "show", blobs, "--ways", 10_000_000, "--out", tmp_path / "sheet.png"]
    assert "10000000-way tasks need 10000000 classes" in mistake(*words)
