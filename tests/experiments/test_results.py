"""The pages of results say what the kept runs say, and figures of the paper are what the page says of them."""

from __future__ import annotations

import importlib
import json
import math
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from gradshare.reports.paper import TABLE

RESULTS = Path(__file__).parents[2] / "results"
CELL = "paper/cub-5shot-5task-maml/seed-0"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """results/over_seeds.py, which imports what is beside it."""
    monkeypatch.syspath_prepend(RESULTS)
    return importlib.import_module("over_seeds")


def test_the_tables_on_the_pages_are_up_to_date(script: ModuleType) -> None:
    kept = script.Kept()
    found = {page: page.read_text(encoding="utf-8") for page in script.PAGES}
    assert script.pages(kept) == found, "run: python results/over_seeds.py"
    text = "".join(found.values())
    assert {name for name in script.tables(kept) if f"<!-- table {name} -->" not in text} == set()
    assert [name for name in script.figures(kept) if f"]({name})" not in found[script.PAGES[0]]] == []


def test_another_result_makes_other_tables(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with another test and fewer epochs, which is then not finished."""
    kept = script.Kept()
    assert CELL.removeprefix("paper/") in kept.finished
    before = script.tables(kept)
    shutil.copytree(RESULTS / "paper", tmp_path / "paper")
    folder = tmp_path / CELL
    summary = json.loads((folder / "summary.json").read_text())
    summary["test"]["ensemble"]["accuracy"] = 0.832
    (folder / "summary.json").write_text(json.dumps(summary))
    for name in ("metrics.jsonl", "timings.jsonl"):
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:25]))
    (folder / "DONE").unlink()
    for module in (script, importlib.import_module("train_queue")):
        monkeypatch.setattr(module, "PAPER", tmp_path / "paper")
    monkeypatch.setitem(importlib.import_module("train_queue").PARTS, "first", tmp_path / "paper")
    without = script.Kept()
    after = script.tables(without)
    other = f"**83.2{script.UNBROKEN}0.6**"
    assert other not in before["paper"] and rf"{other} \*" in after["paper"]
    assert r"CUB 5-shot, MAML \*" in after["short"] and r"CUB 5-shot, MAML \*" not in before["short"]
    assert kept.finished - without.finished == {CELL.removeprefix("paper/")}
    assert after["state"].startswith(f"{kept.first_finished - 1} of the first")


def test_all_intervals_of_the_paper_are_a_spread_over_images() -> None:
    printed = [pair for row in TABLE.values() for pair in (row[:2], row[2:4])]
    assert len(printed) == 24
    for accuracy, interval in printed:
        p = accuracy / 100
        assert round(100 * 0.95 * math.sqrt(p * (1 - p) / 600), 1) == interval
