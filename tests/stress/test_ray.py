"""A grid on a real Ray, started on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from pathlib import Path

import pytest

from gradshare.experiments.supervise import train_cell
from tests.support.commands import SMALL, epochs_done, started, wait_for, worker
from tests.support.grids import MAML, SHARED, cell_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install gradshare[ray]"
)
RULES = """
import gradshare as gs

class Mine:
    def rule(self):
        return gs.GradientSharing().rule()
"""


def test_ray_starts_a_killed_worker_again(blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on from its checkpoint; and an arm of one's own is imported in Ray's workers too."""
    assert train_cell(cell_of(tmp_path / "whole", blobs, epochs=3, iterations=25)) == "done"
    (tmp_path / "my_rules.py").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    sizes = ["--dataset", blobs, *SMALL, "--shots", 1, "--epochs", 3, "--iterations", 25, "--device", "cpu"]
    ray = ["--engine", "ray", "--gpus", 0, "--out", tmp_path / "grid"]
    run = tmp_path / "grid" / MAML / "seed-0"
    with started("grid", "run", MAML, *sizes, *ray, "--arms", "original", "shared", "my_rules:Mine") as process:
        try:
            wait_for(lambda: epochs_done(run), process, seconds=120)
            killed = worker(run)
            assert killed
            os.kill(killed, signal.SIGKILL)
            wait_for(lambda: worker(run) not in (0, killed), process, seconds=120)
            output, errors = process.communicate(timeout=180)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert "3 done" in output and re.search(rf"{re.escape(SHARED)}/seed-0 +epoch 3/3", output)
    for name in ("metrics.jsonl", "summary.json"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / MAML / "seed-0" / name).read_bytes()
    own = tmp_path / "grid" / f"{MAML}~my_rules.Mine" / "seed-0" / "config.json"
    assert json.loads(own.read_text())["arm"] == "my_rules:Mine"
