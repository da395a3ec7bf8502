"""Several real processes are the same as one: losses, meta-gradients, memory, weights, runs; and they end well."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.cli.test_cli import SMALL, gradshare
from tests.support import several
from tests.support.several import RUN, SHARING
from torch import Tensor

import gradshare as gs
from gradshare.runs import checkpoints
from gradshare.runs.workers import Interrupted

ROOT = Path(__file__).parents[2]


def together(size: int, words: list[str], **pipes: Any) -> list[subprocess.Popen[str]]:
    """Processes that know of each other as torchrun's do, without torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    common = {
        "PYTHONPATH": paths,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def ended(processes: list[subprocess.Popen[str]], timeout: float = 120) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    try:
        texts = [process.communicate(timeout=timeout) for process in processes]
        return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Both(NamedTuple):
    """What one process found, and each of several."""

    one: dict[str, Any]
    each: list[dict[str, Any]]
    folder: Path
    size: int


@pytest.fixture(scope="module")
def one(blobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """One process's results; a whole run; and a run that it stopped in, twice."""
    folder = tmp_path_factory.mktemp("several")
    shutil.copytree(blobs, folder / "blobs")
    torch.set_default_dtype(torch.float64)
    try:
        data = gs.load_dataset(folder / "blobs")
        found = {"core": several.core(gs.Group()), "evaluation": several.evaluation(data, gs.Group())}
        found["few"] = several.evaluation(data, gs.Group(), tasks=3)
        gs.train(several.run_learner(), data, folder / "whole-1", **RUN)
        with pytest.raises(Interrupted):
            gs.train(several.run_learner(), data, folder / "hopping-2", display=several.StopAt((0, 3)), **RUN)
        shutil.copytree(folder / "hopping-2", folder / "hopping-3")
    finally:
        torch.set_default_dtype(torch.float32)
    yield folder, found
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=[2, 3])
def both(one: tuple[Path, dict[str, Any]], request: pytest.FixtureRequest) -> Both:
    folder, found = one
    for code, _, errors in ended(together(request.param, ["-m", "tests.support.several", str(folder)])):
        assert code == 0, errors
    each = [torch.load(folder / f"found-{request.param}-{rank}.pt") for rank in range(request.param)]
    return Both(found, each, folder, request.param)


def differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """What differs by more than 1e-12 of its largest element, or of 1e-6 of the largest of all if that is larger."""
    assert ours.keys() == theirs.keys()
    largest = max(tensor.double().abs().max().item() for tensor in theirs.values())
    found = []
    for name, tensor in theirs.items():
        apart = (ours[name].double() - tensor.double()).abs().max().item()
        if not apart <= 1e-12 * max(tensor.double().abs().max().item(), 1e-6 * largest):
            found.append(f"{name}: {apart:.1e} apart, largest {tensor.double().abs().max():.1e}")
    return found


def test_sums_have_derivatives_of_every_order(both: Both) -> None:
    for found in both.each:
        assert differences(found["core"]["derivatives"], both.one["core"]["derivatives"]) == []


def test_loss_meta_gradients_and_memory_are_those_of_one_process(both: Both) -> None:
    names = [name for name in both.one["core"] if name.startswith("step: ")]
    assert len(names) == len(several.ALGORITHMS) * len(SHARING)
    for found in both.each:
        assert {n: d for n in names if (d := differences(found["core"][n], both.one["core"][n]))} == {}


def test_after_20_iterations_all_is_as_in_one_process(both: Both) -> None:
    names = [name for name in both.one["core"] if name.startswith("20 steps")]
    assert len(names) == 5 + len(several.FOR_LONG) + 1
    for found in both.each:
        assert {n: d for n in names if (d := differences(found["core"][n], both.one["core"][n]))} == {}


def test_all_processes_leave_out_the_same_step(both: Both) -> None:
    expected = both.one["core"]["a diverging task"]
    assert expected["faults"].tolist() == [0, 1, 0]
    for found in both.each:
        assert differences(found["core"]["a diverging task"], expected) == []


def test_all_processes_hold_the_same_bits(both: Both) -> None:
    for name, tensors in both.each[0]["core"].items():
        for other in both.each[1:]:
            assert all(torch.equal(other["core"][name][key], tensor) for key, tensor in tensors.items()), name


def test_evaluation_is_the_same_to_the_bit(both: Both) -> None:
    for found in both.each:
        for name in ("evaluation", "few"):
            for key, tensor in both.one[name].items():
                assert torch.equal(found[name][key], tensor), (name, key)


def numbers(value: Any) -> list[float]:
    """All numbers of nested dicts and lists, in their order."""
    if isinstance(value, (dict, list)):
        return [x for part in (value.values() if isinstance(value, dict) else value) for x in numbers(part)]
    return [value]


def same_run(one: Path, other: Path) -> None:
    """Configuration, checkpoints and metrics, to 1e-12."""
    assert (one / "config.json").read_bytes() == (other / "config.json").read_bytes()
    names = {path.name for path in checkpoints.listing(one / "checkpoints")}
    for name in names:
        paths = [folder / "checkpoints" / name for folder in (one, other)]
        (progress, tensors), (other_progress, other_tensors) = (checkpoints.load(path) for path in paths)
        assert differences(other_tensors, tensors) == []
        lines = [numbers(one.as_json()["metrics"]) for one in (progress, other_progress)]
        assert lines[0] == pytest.approx(lines[1], rel=1e-12)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, other)]
    assert numbers(summaries[0]) == pytest.approx(numbers(summaries[1]), rel=1e-12)


def test_a_run_of_several_processes_is_the_run_of_one(both: Both) -> None:
    whole = both.folder / f"whole-{both.size}"
    assert {path.name for path in whole.iterdir()} == {path.name for path in (both.folder / "whole-1").iterdir()}
    same_run(both.folder / "whole-1", whole)


def test_one_process_began_several_went_on_and_one_finished(both: Both, float64: None) -> None:
    hopping = both.folder / f"hopping-{both.size}"
    places = [
        "stopped in epoch 2 after iteration 3",
        "stopped in epoch 2 after iteration 4",
    ]  # the second in validation
    for found in both.each:
        assert found["stops"] == [f"{place}; all is saved in {hopping}" for place in places]
    data = gs.load_dataset(both.folder / "blobs")
    gs.train(several.run_learner(), data, hopping, resume=True, **RUN)
    same_run(both.folder / "whole-1", hopping)


def test_shares_are_even_and_whole() -> None:
    for tasks in range(1, 9):
        for size in range(1, tasks + 1):
            shares = [range(tasks)[gs.Group(rank, size).share(tasks)] for rank in range(size)]
            assert [task for share in shares for task in share] == list(range(tasks))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
    with pytest.raises(gs.UserError, match="3 processes for 2 tasks a batch: each process needs a task"):
        gs.Group(0, 3).share(2)


def cli(blobs: Path, out: Path, *more: object) -> list[str]:
    options = [*SMALL, "--dataset", blobs, "--inner-lr", "0.3", "--out", out, *more]
    last = dict(zip(options[::2], options[1::2], strict=True))
    return ["train", *(str(word) for option in last.items() for word in option)]


def torchrun(size: int, words: list[str]) -> subprocess.Popen[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "-m", "gradshare", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(run, env=environment, start_new_session=True, **pipes)


def workers_of(launcher: subprocess.Popen[str]) -> list[int]:
    """The processes that torchrun started, in the order of their ranks."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    ranks = {}
    for pid in map(int, children):
        environment = dict(
            entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in entry
        )
        if "LOCAL_RANK" in environment:
            ranks[int(environment["LOCAL_RANK"])] = pid
    return [ranks[rank] for rank in sorted(ranks)]


def wait_for_epoch(process: subprocess.Popen[str], size: int = 2) -> None:
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith(f"{size} processes, each on the CPU, 1 thread"), first
    assert "epoch 1/" in process.stdout.readline()


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (2, 0), (3, 1)])
def test_a_killed_process_ends_all_and_the_run_goes_on(blobs: Path, tmp_path: Path, size: int, victim: int) -> None:
    out = tmp_path / "run"
    with torchrun(size, cli(blobs, out, "--epochs", 200, "--iterations", 10, "--tasks", 3)) as process:
        wait_for_epoch(process, size)
        os.kill(workers_of(process)[victim], signal.SIGKILL)
        killed = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - killed < 30
    assert process.returncode == 1 and "exitcode  : -9" in errors
    said = [line for line in errors.splitlines() if line.startswith(("gradshare:", "to go on:"))]
    assert len(said) == 2, errors
    left = "".join(str(rank) for rank in range(size) if rank != victim)
    lost = rf"gradshare: process [{left}] of {size} lost another one, which ended or gave no sign of life \("
    assert re.match(lost, said[0]), said
    assert said[0].endswith("; all up to the last checkpoint is kept")
    assert said[1] == f"to go on: torchrun --nproc-per-node {size} -m gradshare train --resume {out}"
    assert not (out / "DONE").exists()
    config = json.loads((out / "config.json").read_text())
    del config["sha256"]  # changed by hand
    (out / "config.json").write_text(json.dumps({**config, "epochs": 1 + len(gs.load_run(out).metrics)}))
    assert "test, ensemble" in gradshare("train", "--resume", out).stdout  # by one process


@pytest.mark.parametrize("stop", ["SIGTERM to torchrun", "Ctrl-C to all"])
def test_a_polite_stop_of_torchrun_saves_and_says_how_to_go_on(blobs: Path, tmp_path: Path, stop: str) -> None:
    out = tmp_path / "run"
    with torchrun(2, cli(blobs, out, "--epochs", 200, "--iterations", 10)) as process:
        wait_for_epoch(process)
        if stop == "Ctrl-C to all":
            os.killpg(process.pid, signal.SIGINT)
            for worker in workers_of(process):  # an older torchrun's workers hear the terminal too, so twice
                os.kill(worker, signal.SIGINT)
        else:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert "all is saved" in errors and errors.count("to go on: torchrun --nproc-per-node 2 -m gradshare") == 1, errors
    assert "gradshare:" not in errors and "KeyboardInterrupt" not in errors
    newest = checkpoints.newest(out / "checkpoints")
    assert newest is not None and f"in epoch {newest[0].epoch + 1}" in errors


def test_a_process_that_hangs_is_given_up(blobs: Path, tmp_path: Path) -> None:
    words = cli(blobs, tmp_path / "run", "--epochs", 200, "--iterations", 10, "--timeout", 3)
    processes = together(2, ["-m", "gradshare", *words])
    wait_for_epoch(processes[0])
    processes[1].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    code, _, errors = ended(processes[:1], timeout=40)[0]
    processes[1].kill()
    processes[1].communicate()
    assert 2 < time.monotonic() - stopped < 20 and code == 1
    assert "lost another one, which ended or gave no sign of life" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("environment", "words", "message"),
    [
        ({"RANK": "3"}, ["--ways", "1"], "ways is 1; it must be at least 2"),  # one process, whatever its number
        ({"RANK": "1", "WORLD_SIZE": "2"}, [], "the processes did not meet: .*MASTER_ADDR"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, [], "did not meet: "),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, [], "did not meet: "),
    ],
)
def test_processes_that_do_not_meet_say_so(
    blobs: Path, tmp_path: Path, environment: dict[str, str], words: list[str], message: str
) -> None:
    run = [sys.executable, "-m", "gradshare", *cli(blobs, tmp_path / "run", "--timeout", 2, *words)]
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "check": False}
    result = subprocess.run(run, env={**os.environ, **environment}, **pipes)
    told = [line for line in result.stderr.splitlines() if line.startswith("gradshare: ")]  # PyTorch adds its own
    assert result.returncode == 2 and len(told) == 1 and re.search(message, told[0]), result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "run").exists()


def test_more_processes_than_tasks_are_refused_in_one_sentence(blobs: Path, tmp_path: Path) -> None:
    found = ended(together(3, ["-m", "gradshare", *cli(blobs, tmp_path / "run")]))
    assert [code for code, _, _ in found] == [2, 2, 2], found
    errors = "".join(errors for _, _, errors in found)
    message = "each process needs a task; start 2 or fewer, or raise the tasks of a batch"
    told = [line for line in errors.splitlines() if line.startswith("gradshare:")]  # PyTorch adds its own when busy
    assert told == [f"gradshare: 3 processes for 2 tasks a batch: {message}"] and "Traceback" not in errors
    assert not (tmp_path / "run").exists()
