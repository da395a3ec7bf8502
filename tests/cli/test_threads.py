"""Threads: OMP_NUM_THREADS counts, and a run keeps those it began with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.commands import SMALL, call, mistake, train_here

SIZES = [*SMALL[: SMALL.index("--threads")], "--iterations", "1"]


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def threads_of(run: Path) -> int:
    return json.loads((run / "config.json").read_text())["threads"]


def test_a_run_keeps_the_threads_it_began_with(blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "3 threads" in call("train", "--dataset", blobs, *SIZES, "--epochs", 1, "--out", tmp_path / "run").out
    assert threads_of(tmp_path / "run") == 3 == torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "3 threads" in call("train", "--resume", tmp_path / "run", "--epochs", 2).out
    assert threads_of(tmp_path / "run") == 3 == torch.get_num_threads()
    given = call("train", "--dataset", blobs, *SIZES, "--epochs", 1, "--threads", 1, "--out", tmp_path / "given").out
    assert "1 thread," in given and threads_of(tmp_path / "given") == 1


def test_so_do_the_arms_of_a_comparison(blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_here(monkeypatch)
    words = ["compare", "--dataset", blobs, *SIZES, "--arms", "original", "--out", tmp_path]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "3 threads" in call(*words, "--epochs", 1).out
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "3 threads" in call(*words, "--epochs", 2).out and threads_of(tmp_path / "original") == 3


def test_an_omp_num_threads_that_is_no_number(blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    for command in ("train", "compare"):
        assert "OMP_NUM_THREADS is 'many'" in mistake(command, "--dataset", blobs, *SIZES, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()
