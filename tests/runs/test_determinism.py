"""What is the same to the last bit and what is not, on a CPU; docs/reliability.md says so in words.

On a GPU: tests/engine/test_gpu.py. Several processes: tests/engine/test_processes.py. Stopped and resumed:
tests/runs/test_train.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradshare.runs.folder import RunFolder
from tests.support.runs import same_run

TRAIN = """
import sys
from pathlib import Path
from gradshare.runs.build import run
from gradshare.runs.config import RunConfig
from gradshare.runs.display import Silent

small = dict(ways=3, queries=3, tasks=2, steps=1, filters=8, val_tasks=4, test_tasks=0, epochs=1, iterations=2)
for name, threads, seed in (("one", 1, 0), ("two", 2, 0), ("again", 2, 0), ("seed", 1, 1)):
    if name in sys.argv[3:]:
        config = RunConfig(dataset=sys.argv[1], device="cpu", threads=threads, seed=seed, **small)
        run(config, Path(sys.argv[2]) / name, False, Silent())
"""


@pytest.fixture(scope="module")
def runs(blobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with one thread, with two, and with two again in another process; and one with another seed."""
    folder = tmp_path_factory.mktemp("threads")
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # other tests may want the cores
    for names in (["one", "two", "seed"], ["again"]):
        words = [sys.executable, "-c", TRAIN, str(blobs), str(folder), *names]
        subprocess.run(words, env=environment, check=True, timeout=120)
    return folder


def test_processes_with_the_same_threads_train_the_same_run(runs: Path) -> None:
    same_run(runs / "two", runs / "again")


def test_another_number_of_threads_is_the_same_but_for_rounding(runs: Path) -> None:
    (one,), (two,) = (RunFolder(runs / name).epochs() for name in ("one", "two"))
    assert one.train_loss == pytest.approx(two.train_loss, rel=1e-4)
    assert one.val_loss == pytest.approx(two.val_loss, rel=1e-3)


def test_another_seed_is_another_run(runs: Path) -> None:
    (one,), (other,) = (RunFolder(runs / name).epochs() for name in ("one", "seed"))
    assert one.train_loss != other.train_loss
