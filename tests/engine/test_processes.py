"""Two real processes compute what one does: losses, meta-gradients, memory, weights, evaluation, runs.

tests/stress/test_processes.py does the same with three processes and all combinations, and starts torchrun.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradshare as gs
from gradshare.errors import RendezvousFailed
from tests.support import several
from tests.support.several import Found


@pytest.fixture(scope="module")
def both(blobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    folder = tmp_path_factory.mktemp("several")
    shutil.copytree(blobs, folder / "blobs")
    one = several.in_one_process(folder, every=False)
    yield several.in_several(one, folder, 2, every=False)
    shutil.rmtree(folder)


def test_sums_have_derivatives_of_every_order(both: Found) -> None:
    for found in both.each:
        assert several.differences(found["core"]["derivatives"], both.one["core"]["derivatives"]) == []


def test_every_algorithm_and_way_of_sharing_is_as_in_one_process(both: Found) -> None:
    steps = [name for name in both.one["core"] if name.startswith("step: ")]
    assert len(steps) == len(several.ALGORITHMS) + len(several.SHARING) - 1
    several.check_core(both)


def test_evaluation_is_the_same_to_the_bit(both: Found) -> None:
    several.check_evaluation(both)


def test_a_run_of_two_processes_is_the_run_of_one(both: Found) -> None:
    several.check_runs(both)


def test_shares_are_even_and_whole() -> None:
    for tasks in range(1, 9):
        for size in range(1, tasks + 1):
            shares = [range(tasks)[gs.Group(rank, size).share(tasks)] for rank in range(size)]
            assert [task for share in shares for task in share] == list(range(tasks))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
    with pytest.raises(gs.UserError, match="3 processes for 2 tasks"):
        gs.Group(0, 3).share(2)


@pytest.mark.parametrize("environment", [{"RANK": "1"}, {"RANK": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}])
def test_processes_that_do_not_meet_raise_an_error(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousFailed), gs.processes(timeout=1):
        raise AssertionError("there is no other process")
