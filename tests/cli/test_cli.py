"""The real command line, with tiny numbers."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.runs import same_run

import gradshare as gs
from gradshare.cli.app import main
from gradshare.experiments import estimate
from gradshare.runs import checkpoints, training
from gradshare.runs.interruption import Interrupted, stop_requests
from gradshare.runs.workers import STOPPED, Processes

SMALL = [
    "--ways",
    "3",
    "--queries",
    "3",
    "--tasks",
    "2",
    "--steps",
    "2",
    "--filters",
    "3",
    "--val-tasks",
    "6",
    "--test-tasks",
    "6",
    "--threads",
    "1",
]


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "gradshare", *map(str, words)]


def gradshare(*words: object, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command(*words), capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment}
    )
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result


def seconds_of_children() -> float:
    """What the processes that a test started and that have ended took of a core, however busy the machine is."""
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize("words", [[], ["train"], ["compare"], ["test"], ["report"], ["data"], ["data", "list"]])
def test_help_answers_in_under_a_second_without_torch(words: list[str]) -> None:
    code = f"import sys; sys.argv = {['gradshare', *words, '--help']}; from gradshare.cli.app import main\n"
    code += "try: main()\nexcept SystemExit as e: assert not e.code\nassert 'torch' not in sys.modules"
    before = seconds_of_children()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout
    assert seconds_of_children() - before < 1.0


@pytest.mark.parametrize(
    ("words", "pattern"),
    [(["grid", "list"], "cub-*-5task-*"), (["grid", "run"], "'cub-*-5task-*'"), (["data", "import"], "CLASS/*")],
)
def test_help_keeps_the_stars_of_a_pattern(words: list[str], pattern: str) -> None:
    assert pattern in gradshare(*words, "--help").stdout


def test_ctrl_c_while_the_command_is_still_loading() -> None:
    code = "import builtins, os, signal, time\nfrom gradshare.__main__ import main\nload = builtins.__import__\n"
    code += "def slow(name, *rest):\n    if name == 'gradshare.cli.app':\n"
    code += "        os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\n"
    code += "    return load(name, *rest)\nbuiltins.__import__ = slow\nmain()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert (result.returncode, result.stderr) == (3, "gradshare: stopped; nothing was begun\n")


def test_ctrl_c_while_grid_list_times_the_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked_to_stop(*_: object) -> None:
        raise Interrupted(Path("a temporary folder"), "between iterations")

    monkeypatch.setattr(estimate, "run", asked_to_stop)
    monkeypatch.setattr(sys, "argv", ["gradshare", "grid", "list", "cub-1shot-1task-maml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    assert capsys.readouterr().err.endswith("gradshare: stopped; to go on: gradshare grid list cub-1shot-1task-maml\n")


def test_the_arms_of_a_comparison(blobs: Path, tmp_path: Path) -> None:
    options = ["--dataset", blobs, *SMALL, "--epochs", 1, "--iterations", 1, "--out", tmp_path / "arms"]
    assert "say --arms in place of --arm" in gradshare("compare", *options, "--arm", "original", code=2).stderr
    assert "at least one to --arms" in gradshare("compare", *options, "--arms", code=2).stderr
    said = gradshare("compare", *options, "--arms", "original", "gate-only", "--jobs", 2).stdout
    assert said.startswith("2 arms at a time, each on the CPU, ")
    assert sorted(path.parent.name for path in (tmp_path / "arms").glob("*/config.json")) == ["gate-only", "original"]


def test_train_kill_resume_test(blobs: Path, tmp_path: Path) -> None:
    options = ["--dataset", blobs, *SMALL, "--epochs", 4, "--iterations", 20, "--inner-lr", "0.3"]
    gradshare("train", *options, "--out", tmp_path / "whole")
    killed = tmp_path / "killed"
    with subprocess.Popen(command("train", *options, "--out", killed), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("on the CPU, ")
        assert "epoch 1/4" in process.stdout.readline()
        time.sleep(0.05)  # somewhere in the second epoch
        process.send_signal(signal.SIGKILL)
    assert not (killed / "DONE").exists()
    result = gradshare("train", "--resume", killed)
    assert "epoch 4/4" in result.stdout and "epoch 1/4" not in result.stdout and "test, ensemble" in result.stdout
    same_run(tmp_path / "whole", killed)
    tested = gradshare("test", killed, "--tasks", 6)
    summary = json.loads((killed / "summary.json").read_text())["test"]
    assert f"{summary['best']['accuracy']:.2%} ± {summary['best']['interval']:.2%} over 6 test tasks" in tested.stdout
    longer = gradshare("train", "--resume", killed, "--epochs", 5)
    assert "epoch 5/5" in longer.stdout and "epoch 4/5" not in longer.stdout and (killed / "DONE").exists()
    refused = gradshare("train", "--resume", killed, "--epochs", 5, "--shots", 2, code=2)
    assert "has its own options: give --resume alone, or with more --epochs" in refused.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_says_how_to_go_on(blobs: Path, tmp_path: Path, number: int) -> None:
    words = command("train", "--dataset", blobs, *SMALL, "--epochs", 50, "--iterations", 20, "--out", tmp_path / "run")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        _ = process.stdout.readline(), process.stdout.readline()  # where it computes; its first epoch
        process.send_signal(number)
        message = process.stderr.read()
    assert process.returncode == 3
    assert "to go on: gradshare train --resume" in message and "Traceback" not in message
    assert checkpoints.listing(tmp_path / "run" / "checkpoints")


def test_compare_with_controls_writes_everything(blobs: Path, tmp_path: Path) -> None:
    words = ["compare", "--dataset", blobs, *SMALL, "--epochs", 2, "--iterations", 3, "--controls", "--out", tmp_path]
    result = gradshare(*words, "--jobs", 2)
    arms = {"original", "shared", "half-rate", "gate-only", "batch-only", "memory-only"}
    assert {path.parent.name for path in tmp_path.glob("*/DONE")} == arms
    rates = {arm: json.loads((tmp_path / arm / "config.json").read_text())["inner_lr"] for arm in arms}
    assert rates == dict.fromkeys(arms, 0.1) | {"half-rate": 0.05}
    for name in (
        "summary.json",
        "report.html",
        "curves.png",
        "curves.svg",
        "gates.png",
        "gates.svg",
        "table.md",
        "table.csv",
    ):
        assert (tmp_path / name).stat().st_size > 0, name
    assert all(arm in result.stdout for arm in arms)
    assert set(json.loads((tmp_path / "summary.json").read_text())["arms"]) == arms
    again = gradshare(*words, "--jobs", 1)
    assert "epoch 1/2" not in again.stdout  # finished arms are kept
    (tmp_path / "report.html").unlink()
    gradshare("report", tmp_path)
    assert (tmp_path / "report.html").exists()


def test_arms_at_a_time_or_one_by_one_are_the_same_runs(blobs: Path, tmp_path: Path) -> None:
    words = ["compare", "--dataset", blobs, *SMALL, "--epochs", 2, "--iterations", 3]
    gradshare(*words, "--jobs", 1, "--out", tmp_path / "one")
    gradshare(*words, "--jobs", 2, "--out", tmp_path / "two")
    for arm in ("original", "shared"):
        same_run(tmp_path / "one" / arm, tmp_path / "two" / arm)


@pytest.mark.parametrize("stop", ["SIGTERM to the parent", "SIGTERM to all", "Ctrl-C to all"])
def test_a_stopped_comparison_goes_on(blobs: Path, tmp_path: Path, stop: str) -> None:
    words = ["compare", "--dataset", blobs, *SMALL, "--epochs", 3, "--iterations", 70, "--jobs", 2, "--out", tmp_path]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(*words), start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None and process.stderr is not None
        _ = process.stdout.readline(), process.stdout.readline()  # where it computes; its first epoch
        if stop.endswith("to all"):
            os.killpg(process.pid, signal.SIGINT if stop.startswith("Ctrl-C") else signal.SIGTERM)
        else:
            process.send_signal(signal.SIGTERM)
        message = process.stderr.read()
    assert process.returncode == 3 and "to go on: gradshare compare" in message and "Traceback" not in message
    assert not list(tmp_path.glob("*/DONE"))
    result = gradshare(*words)
    assert len(list(tmp_path.glob("*/DONE"))) == 2 and "report:" in result.stdout


def save_slowly(ready: Any) -> None:
    with stop_requests() as stop:
        ready.set()
        while not stop():
            time.sleep(0.01)
        time.sleep(1)  # the second request comes here
    raise SystemExit(STOPPED)


def test_a_worker_that_saves_is_not_hurried() -> None:
    """A scheduler sends SIGTERM to all processes, and then the parent asks its workers to stop."""
    with Processes() as workers:
        ready = workers.context.Event()
        workers.start("slow", save_slowly, ready)
        assert ready.wait(60)
        process = workers.running["slow"]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.3)
        workers.ask_to_stop()
        process.join(60)
        assert workers.ended() == {"slow": STOPPED}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """16 GiB for each process that a test starts, whatever the machine has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**34, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("words", ["train", "compare --jobs 2", "compare --jobs 1"])
def test_a_run_that_memory_is_too_small_for_leaves_no_folder(blobs: Path, tmp_path: Path, words: str) -> None:
    (tmp_path / "mine").mkdir()
    out = tmp_path / "mine" / "new" / "run"
    sizes = ["--dataset", blobs, "--ways", 2, "--queries", 1, "--filters", 2]
    ended = gradshare(*words.split(), *sizes, "--tasks", 10**9, "--out", out, code=2)
    said = "there is not enough memory for this: take fewer tasks, filters, steps, or a smaller eval_batch\n"
    assert ended.stderr.startswith("gradshare: ") and ended.stderr.endswith(said) and ended.stderr.count("\n") == 1
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_a_run_that_has_trained_keeps_its_folder_when_memory_runs_out(
    blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(self: training._Run) -> None:
        raise MemoryError

    learner = gs.maml(gs.Conv4(filters=4, image=(1, 28, 28)), steps=1)
    options = {"epochs": 2, "iterations": 2, "ways": 2, "queries": 1, "val_tasks": 2, "test_tasks": 2}
    monkeypatch.setattr(training._Run, "_test", forget)
    for resume in (False, True):  # the second time, it is also a run that was there before
        with pytest.raises(MemoryError):
            gs.train(learner, gs.load_dataset(blobs), tmp_path / "run", resume=resume, **options)
        assert len(gs.load_run(tmp_path / "run").metrics) == 2


@pytest.mark.parametrize("method", ["maml", "metasgd", "mamlpp", "fomaml", "anil"])
def test_every_method_trains_from_the_command_line(blobs: Path, tmp_path: Path, method: str) -> None:
    words = [
        "--dataset",
        blobs,
        *SMALL,
        "--epochs",
        1,
        "--iterations",
        2,
        "--method",
        method,
        "--out",
        tmp_path / "run",
    ]
    gradshare("train", *words)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["method"] == method


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--frobnicate"], "Unknown option"),
        (["train", "--shots", "many", "--out", "x"], "--shots"),
        (["train", "--shots", "0", "--out", "x"], "shots is 0; it must be at least 1"),
        (["train", "--inner-lr", "nan", "--out", "x"], "inner_lr is nan; it must be above 0"),
        (["train", "--method", "mamlplus", "--out", "x"], "--method"),
        (["train"], "say where the run goes with --out FOLDER"),
        (["train", "--resume", "nowhere"], "nowhere is not a run: it has no config.json"),
        (["train", "--resume", "nowhere", "--shots", "5"], "the run in nowhere has its own options"),
        (["train", "--dataset", "nothing", "--out", "x"], "there is no data set 'nothing'"),
        (["train", "--device", "cuda", "--out", "x"], "PyTorch sees no GPU"),
        (["train", "--method", "anil", "--adapt-norm", "--out", "x"], "anil adapts the head alone"),
        (["test", "nowhere"], "nowhere is not a run"),
        (["report", "nowhere"], "nowhere is not a folder"),
        (["report", "."], "no run in"),
        (["frobnicate"], "frobnicate"),
        (["train", "--ways", "7", "--out", "x"], "7-way tasks need 7 classes; the val split of blobs has 6"),
        (["train", "--shots", "9", "--out", "x"], "has 20 images; 9-shot with 15 queries needs 24"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(blobs: Path, tmp_path: Path, words: list[str], message: str) -> None:
    if "--out" in words and "--dataset" not in words and "anil" not in words:
        words = [*words, "--dataset", str(blobs)]
    result = subprocess.run(command(*words), capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    if "cuda" in words and result.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert result.returncode == 2, result.stdout + result.stderr
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_data_list_shows_stores_and_built_in_sets(blobs: Path) -> None:
    result = gradshare("data", "list", GRADSHARE_DATA=str(blobs.parent))
    assert "blobs            480 images of 16x16x1; classes: train 12 val 6 test 6" in result.stdout
    assert "glyphs           built in; made on first use" in result.stdout


def test_damaged_files_are_named(blobs: Path, tmp_path: Path) -> None:
    gradshare("train", "--dataset", blobs, *SMALL, "--epochs", 1, "--iterations", 2, "--out", tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text('{"version": 1, "ways"')
    assert "config.json is damaged" in gradshare("test", tmp_path / "run", code=2).stderr
    (tmp_path / "run" / "config.json").write_text('{"version": 1, "colour": "red", "method": "maml"}')
    assert "does not know: colour" in gradshare("test", tmp_path / "run", code=2).stderr
