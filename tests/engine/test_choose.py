"""What `auto` means: device, engine, precision and threads are chosen in one place, and applied in another."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

import gradshare as gs
from gradshare.engine import backends
from gradshare.engine import choose as choosing
from gradshare.engine.choose import apply, choose, side_by_side


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(backends, "not_installed", lambda: None)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "own_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = choose()
    assert (found.device, found.engine, found.precision, found.threads) == ("cpu", "eager", "float32", 4)
    assert str(found) == "on the CPU, 4 threads, float32"
    assert "as always on a CPU" in str(choose(deterministic=True, threads=1))
    assert str(choose(precision="bf16", threads=2)) == "on the CPU, 2 threads, bf16"
    with pytest.raises(gs.UserError, match="tf32 is arithmetic of NVIDIA GPUs"):
        choose(precision="tf32")


def test_on_a_gpu(gpu: None) -> None:
    found = choose()
    assert (found.device, found.engine, found.precision) == ("cuda", "graph", "tf32")
    assert "one CUDA graph" in str(found) and "tf32" in str(found)
    assert choose("cpu").device == "cpu" and choose(engine="eager").engine == "eager"
    assert choose(precision="float32").precision == "float32"
    unsupported = choose(no_kernels="they do not adapt batch norm")
    assert unsupported.precision == "float32" and "they do not adapt batch norm" in str(unsupported)


def test_other_networks_are_compiled(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = choose(precision="bf16", no_kernels="they know gs.Conv4, not Net")
    assert (found.precision, found.engine) == ("bf16", "graph")
    assert "compiled programs in bf16" in str(found) and "not Net" in str(found)
    assert "(97 %)" in str(dataclasses.replace(found, share="97 %"))
    assert str(choose("cpu", engine="compiled", threads=1)) == "on the CPU, 1 thread, float32, compiled programs"
    with pytest.raises(gs.UserError, match="compiled is for a CPU"):
        choose(engine="compiled")
    monkeypatch.setattr(backends, "not_installed", lambda: "Triton does not import")
    with pytest.raises(gs.UserError, match="bf16 needs programs for a GPU, and Triton does not import"):
        choose(precision="bf16", no_kernels="they know gs.Conv4, not Net")


def test_several_processes_share_the_cores_and_have_a_gpu_each(gpu: None) -> None:
    assert choose("cpu", processes=2, local_processes=2).threads == 2
    assert choose("cpu", threads=9, processes=2, local_processes=2).threads == 2
    assert choose("cpu", threads=9).threads == 9
    assert choose(processes=2, local_processes=2).engine == "eager"
    assert choose(processes=4, local_processes=2).device == "cuda"
    with pytest.raises(gs.UserError, match="3 processes on 2 GPUs"):
        choose(processes=3, local_processes=3)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"device": "cuda"}, "sees no GPU"),
        ({"device": "meta"}, "cpu or cuda"),
        ({"device": "mps"}, "cpu or cuda"),
        ({"device": "nonsense"}, "cpu or cuda"),
        ({"device": None}, "cpu or cuda, not None"),
        ({"device": "cpu:3"}, "only one CPU"),
        ({"engine": "graph"}, "needs a GPU"),
        ({"engine": "fast"}, "auto, eager, graph"),
        ({"precision": "tf32"}, "arithmetic of NVIDIA GPUs"),
        ({"precision": "float64"}, "float32, tf32, bf16"),
    ],
)
def test_what_cannot_be(asked: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(gs.UserError, match=message):
        choose(**asked)


def test_which_gpus_there_are(gpu: None) -> None:
    assert choose("cuda:1", engine="eager").device == "cuda:1"
    with pytest.raises(gs.UserError, match="cuda:2 is not available: PyTorch sees 2 GPUs"):
        choose("cuda:2")


def test_a_graph_is_recorded_by_one_process(gpu: None) -> None:
    with pytest.raises(gs.UserError, match="one process, not 2"):
        choose(engine="graph", processes=2, local_processes=2)


def test_choosing_changes_nothing_and_applying_does(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    threads = torch.get_num_threads()
    try:
        choice = choose(deterministic=True, threads=threads + 1)
        assert torch.get_num_threads() == threads and not torch.are_deterministic_algorithms_enabled()
        apply(choice)
        assert torch.get_num_threads() == threads + 1 and torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and not torch.backends.cudnn.benchmark
        apply(choose(threads=threads))
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


def test_side_by_side() -> None:
    assert side_by_side(0, 2, "cpu") == (2, 2)
    assert side_by_side(0, 9, "cpu") == (4, 1)
    assert side_by_side(3, 9, "cuda") == (3, 1)
    assert side_by_side(0, 9, "cuda") == (1, 4)


def test_omp_num_threads_counts_where_no_option_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert choose("cpu").threads == 3 and choose("cpu", threads=2).threads == 2
    assert choose("cpu", processes=2, local_processes=2).threads == 2  # never more than there are cores for it
    assert side_by_side(0, 9, "cpu") == (1, 3) and side_by_side(2, 9, "cpu") == (2, 3)
    assert side_by_side(0, 9, "cuda") == (1, 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "2, 1")  # OpenMP's form for nested levels
    assert choose("cpu").threads == 2 and side_by_side(0, 9, "cpu") == (2, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert choose("cpu").threads == 4


@pytest.mark.parametrize("text", ["0", "-1", "many", "2.5", "100000"])
def test_an_omp_num_threads_that_is_no_number_of_threads(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert choose("cpu", threads=2).threads == 2  # not looked at
    with pytest.raises(gs.UserError, match=f"OMP_NUM_THREADS is '{text}'"):
        choose("cpu")
