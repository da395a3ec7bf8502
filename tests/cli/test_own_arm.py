"""A rule of a user's own, in a module outside the package: trained, stopped, resumed, tested, compared, reported.

Its name is recorded. It is imported only if it is given on the command line, never because a run folder names it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gradshare as gs
from gradshare.experiments.grid import planned
from tests.support.commands import SMALL, call, epochs_done, mistake, train_here, wait_for

OWN = "my_rules:Mine"
MODULE = """
import gradshare as gs

class Mine:  # name, init and update are all that a rule needs
    name = "sharing"

    def __init__(self, norm="global"):
        self.same = gs.GradientSharing(norm)

    def init(self, weights, steps):
        return self.same.init(weights, steps)

    def update(self, at: gs.InnerStep) -> gs.Moved:
        return self.same.update(at)
"""
SIZES = [*SMALL, "--epochs", "3", "--iterations", "20"]
MAML = "cub-5shot-5task-maml"


def forget() -> None:
    sys.modules.pop("my_rules", None)


def imported() -> bool:
    return "my_rules" in sys.modules


def test_a_rule_of_ones_own_from_training_to_report(blobs: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train", "--dataset", str(blobs), *SIZES, "--norm", "tensor"]  # which needs weights by name, as Mine gets
    call(*words, "--out", "known")  # the same rule, by the name that we know
    console = [sys.executable, "-P", "-c", "from gradshare.__main__ import main; main()"]  # as the console script
    with subprocess.Popen(
        [*console, *words, "--arm", OWN, "--out", "run"], stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: epochs_done(place / "run"))
        process.terminate()
        message = process.communicate(timeout=60)[1]
    assert process.returncode == 3 and f"to go on: gradshare train --resume run --arm {OWN}" in message
    assert json.loads(Path("run/config.json").read_text())["arm"] == OWN

    for more in ([], ["--arm", "shared"], ["--arm", "my_rules:Other"]):
        assert OWN in mistake("train", "--resume", "run", *more)
    assert OWN in mistake("test", "run")
    with pytest.raises(gs.UserError, match=OWN):
        gs.load_run("run").learner()
    assert not imported() and not Path("run/DONE").exists()

    call("train", "--resume", "run", "--arm", OWN)
    for name in ("metrics.jsonl", "summary.json"):
        assert Path("run", name).read_bytes() == Path("known", name).read_bytes()
    assert "over 6 test tasks" in call("test", "run", "--tasks", 6, "--arm", OWN).out

    forget()
    Path("my_rules.py").unlink()
    call("report", "run")
    assert len(gs.load_run("run").metrics) == 3 and not imported()


def test_comparisons_and_grids_of_ones_own_arm(blobs: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ["--dataset", str(blobs), *SMALL, "--epochs", "1", "--iterations", "2"]
    call("compare", *tiny, "--arms", OWN, "--out", "compare")  # by a worker, which gets the name from its parent
    train_here(monkeypatch)
    call("compare", *tiny, "--arms", "original", OWN, "--out", "compare")
    assert OWN in call("report", "compare").out and OWN in Path("compare/report.html").read_text()
    assert "2 done" in call("grid", "status", "compare").out

    words = ["grid", "run", *tiny, "--shots", "1", "--out", "grid"]
    call(*words, MAML, "--arms", "original", OWN)
    call(*words, f"{MAML}-10x~{OWN}")
    names = ["cub-5shot-5task-maml", "cub-5shot-5task-maml-10x~my_rules.Mine", "cub-5shot-5task-maml~my_rules.Mine"]
    cells = planned(Path("grid"))
    assert [cell.name for cell in cells] == names and {cell.config.arm for cell in cells[1:]} == {OWN}
    assert cells[2].run.options()["arm"] == OWN
    forget()
    Path("my_rules.py").unlink()
    assert "2 done" in call("grid", "status", "grid", "*~my_rules*").out
    call("report", "grid")
    assert not imported() and OWN in Path("grid/report.html").read_text()


@pytest.mark.parametrize("words", ["train --out x", "compare --out x", f"grid run {MAML} --out x"])
@pytest.mark.parametrize("arm", ["my_rules:Missing", "no_such_module:Mine"])
def test_what_cannot_be_imported_is_a_mistake(blobs: Path, place: Path, words: str, arm: str) -> None:
    option = "--arm" if words.startswith("train") else "--arms"
    assert arm in mistake(*words.split(), option, arm, "--dataset", blobs, *SMALL, "--shots", 1)
    assert not Path("x").exists()
