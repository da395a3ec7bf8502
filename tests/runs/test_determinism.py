"""What is the same to the last bit and what is not, on a CPU; docs/reliability.md says so in words.

On a GPU: tests/test_gpu.py. Several processes: tests/test_distributed.py. Stopped and resumed: tests/test_training.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.test_cli import SMALL, gradshare
from tests.runs.test_training import same_run

import gradshare as gs
from gradshare.engine.conv4 import triton as kernels
from gradshare.runs.build import run, setting, settle
from gradshare.runs.config import RunConfig, config_text, read_config, run_config
from gradshare.runs.training import Silent

OPTIONS: dict[str, Any] = {
    **{"ways": 3, "queries": 3, "tasks": 2, "steps": 2, "filters": 8, "val_tasks": 6, "test_tasks": 6, "epochs": 2},
    **{"iterations": 3, "device": "cpu"},
}


def trained(dataset: gs.Dataset, folder: Path, **options: Any) -> list[dict[str, Any]]:
    return run(RunConfig(**OPTIONS | options), folder, False, Silent(), dataset).metrics


@pytest.fixture(scope="module")
def by_threads(blobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by three processes: with one thread, with two, and with two again."""
    folder = tmp_path_factory.mktemp("threads")
    options = [*SMALL[:-2], "--dataset", blobs, "--epochs", 2, "--iterations", 2]
    for name, count in {"one": 1, "two": 2, "again": 2}.items():
        words = [*options, "--threads", count, "--out", folder / name]
        asked = ["--deterministic"] if name == "one" else []
        told = gradshare("train", *words, *asked, OMP_WAIT_POLICY="passive").stdout  # other tests may want the cores
        assert ("the same bits in every run" in told) == (name == "one")
    return folder


def test_processes_with_the_same_threads_train_the_same_run(by_threads: Path) -> None:
    same_run(by_threads / "two", by_threads / "again")


def test_another_number_of_threads_is_the_same_but_for_rounding(by_threads: Path) -> None:
    one, two = (
        [json.loads(line) for line in (by_threads / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    for here, there in zip(one, two, strict=True):
        assert here["train_loss"] == pytest.approx(there["train_loss"], rel=1e-4)
        assert here["val_loss"] == pytest.approx(there["val_loss"], rel=1e-3)


def test_another_seed_is_another_run(dataset: gs.Dataset, tmp_path: Path) -> None:
    one, two = (trained(dataset, tmp_path / str(seed), seed=seed, threads=1) for seed in (0, 1))
    assert one[0]["train_loss"] != two[0]["train_loss"]


def test_asked_for_on_a_cpu_it_is_said_to_be_so_anyway(dataset: gs.Dataset, tmp_path: Path) -> None:
    trained(dataset, tmp_path / "plain", threads=1)
    trained(dataset, tmp_path / "asked", threads=1, deterministic=True)
    plain, asked = (tmp_path / name / "metrics.jsonl" for name in ("plain", "asked"))
    assert plain.read_bytes() == asked.read_bytes()
    settled = settle(RunConfig(device="cpu", threads=1, deterministic=True))
    assert setting(settled) == "on the CPU, 1 thread, float32; the same bits in every run, as always on a CPU"
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_run_from_before_the_option_goes_on(dataset: gs.Dataset, tmp_path: Path) -> None:
    trained(dataset, tmp_path / "run", threads=1)
    stored = read_config(tmp_path / "run")
    assert "deterministic" not in stored and not run_config(stored, tmp_path / "run").deterministic
    config = RunConfig(**OPTIONS | {"threads": 1})
    assert run(config, tmp_path / "run", True, Silent(), dataset).metrics
    with pytest.raises(gs.UserError, match="deterministic"):
        run(RunConfig(**OPTIONS | {"threads": 1, "deterministic": True}), tmp_path / "run", True, Silent(), dataset)


def test_a_run_with_the_option_keeps_it(dataset: gs.Dataset, tmp_path: Path) -> None:
    trained(dataset, tmp_path / "run", threads=1, deterministic=True)
    assert run_config(read_config(tmp_path / "run"), tmp_path / "run").deterministic
    (tmp_path / "run" / "config.json").write_text(config_text({**OPTIONS, "deterministic": "yes"}))
    with pytest.raises(gs.UserError, match="deterministic is 'yes'; it must be a true or false"):
        run_config(read_config(tmp_path / "run"), tmp_path / "run")


def test_on_a_gpu_pytorch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set there; whether the bits are the same is for tests/test_gpu.py."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "not_installed", lambda: None)
    try:
        settle(RunConfig(threads=1))
        assert not torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        settle(RunConfig(threads=1, deterministic=True))
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        settle(RunConfig(threads=1))
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
