"""The command line: its options, its exit codes, and a small run of every command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import gradshare as gs
from gradshare.cli import waiting
from gradshare.cli.app import app
from gradshare.cli.options import Given
from gradshare.experiments import estimate
from gradshare.reports.model import METHODS
from gradshare.runs.config import Method, RunConfig
from tests.support.commands import (
    SMALL,
    call,
    epochs_done,
    gradshare,
    mistake,
    seconds_of_children,
    started,
    train_here,
    wait_for,
)

RUN = """
adapt adapt-norm arm backbone checkpoint dataset deterministic device engine epochs eval-batch filters final-outer-rate
first-order-epochs gates gradient-clamp head-start inner inner-lr iterations method micro-batch multi-step-epochs norm
norm-statistics outer-lr patience pixels precision queries recipe seed shots start steps tasks test-tasks threads
val-tasks ways
"""
GRID = RUN.replace("engine", "run-engine")
BENCH = """
arms backbone device engines eval-tasks filters iterations json methods precisions queries rivals shape shots size
steps sweep tasks threads values
"""
OPTIONS = {
    "compare": f"{RUN} arms controls jobs log out preset",
    "train": f"{RUN} log out preset resume timeout",
    "test": "arm backbone dataset folder norm-statistics queries seed shots split steps tasks ways",
    "report": "folder",
    "export": "epoch folder half-memory license run",
    "bench": BENCH,
    "grid list": f"{GRID} arms controls hours",
    "grid show": f"{GRID} name",
    "grid run": f"{GRID} address arms controls cpus engine gpus jobs out retries seeds",
    "grid status": "folder watch",
    "data list": "",
    "data import": "kind name replace seed size split-file transform",
    "data download": "folder kind",
    "data verify": "",
    "data show": "classes name out queries seed shots split tasks ways",
}


def options_of(words: str) -> set[str]:
    named = app
    for word in words.split():
        named = named[word]
    names = {name for argument in named.assemble_argument_collection() for name in argument.names}
    return {name.removeprefix("--") for name in names if name.startswith("--") and not name.startswith("--no-")}


@pytest.mark.parametrize("words", OPTIONS)
def test_the_options_of_a_command(words: str) -> None:
    assert options_of(words) == set(OPTIONS[words].split())


def test_help_is_quick_and_needs_no_torch() -> None:
    code = "import sys, io, contextlib\nfrom gradshare.cli.app import main\n"
    code += f"for words in {['', 'grid', 'data', *OPTIONS]}:\n    sys.argv = ['gradshare', *words.split(), '--help']\n"
    code += "    text = io.StringIO()\n    with contextlib.redirect_stdout(text):\n"
    code += "        try: main()\n        except SystemExit as end: assert not end.code\n"
    code += "    assert 'Usage' in text.getvalue()\n    if words in ('grid list', 'grid run'): print(text.getvalue())\n"
    code += "sys.argv = ['gradshare', 'data', 'verify']\ntry: main()\nexcept SystemExit as end: assert end.code == 2\n"
    code += "assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "cub-*-5task-*" in result.stdout and "memory-only" in result.stdout  # stars are not taken for markup
    before = seconds_of_children()
    subprocess.run([sys.executable, "-c", "import gradshare.cli.app"], check=True)
    assert seconds_of_children() - before < 0.6


def test_ctrl_c_while_the_command_is_still_loading() -> None:
    code = "import builtins, os, signal, time\nfrom gradshare.__main__ import main\nload = builtins.__import__\n"
    code += "def slow(name, *rest):\n    if name == 'gradshare.cli.app':\n"
    code += "        os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\n"
    code += "    return load(name, *rest)\nbuiltins.__import__ = slow\nmain()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert result.returncode == 3 and result.stderr.startswith("gradshare: stopped") and result.stdout == ""


def test_ctrl_c_while_grid_list_times_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(estimate, "estimates", stop)
    said = call("grid", "list", "cub-1shot-1task-maml", code=3).err
    assert said.endswith("to go on: gradshare grid list cub-1shot-1task-maml\n")


# Options


def test_what_is_given_wins_even_if_it_equals_the_default() -> None:
    default = RunConfig()
    config = Given(epochs=default.epochs, dataset=default.dataset).over("mini-5shot-1task-mamlpp+gs")
    assert (config.epochs, config.dataset) == (20, "glyphs") and config.iterations == 1000
    assert Given().over(None) == default and Given(shots=5).over(None).shots == 5
    assert type(Given().over(None)) is RunConfig


def options_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_train_takes_presets(blobs: Path, tmp_path: Path) -> None:
    tiny = ["--dataset", blobs, "--pixels", "unit", *SMALL, "--epochs", 1, "--iterations", 2]
    call("train", "--preset", "mini-5shot-5task-mamlpp-10x", *tiny, "--seed", 0, "--out", tmp_path / "run")
    chosen = {"method": "mamlpp", "arm": "original", "inner_lr": 1.0, "shots": 5, "gradient_clamp": 10.0}
    given = {"epochs": 1, "tasks": 2, "filters": 3, "pixels": "unit", "dataset": str(blobs)}
    assert chosen | given == {key: options_in(tmp_path / "run")[key] for key in chosen | given}


@pytest.mark.parametrize("method", get_args(Method))
def test_every_method_trains(blobs: Path, tmp_path: Path, method: str) -> None:
    arm = "original" if method == "reptile" else "shared"
    words = [*SMALL, "--epochs", 1, "--iterations", 2, "--method", method, "--arm", arm, "--out", tmp_path / "run"]
    call("train", "--dataset", blobs, *words)
    assert options_in(tmp_path / "run")["method"] == method
    call("report", tmp_path)
    assert METHODS[method] in (tmp_path / "report.html").read_text()


def test_reptile_is_compared_at_other_rates(blobs: Path, tmp_path: Path) -> None:
    arms = ["--arms", "original", "half-rate"]
    call("compare", "--dataset", blobs, *SMALL, "--epochs", 1, "--method", "reptile", *arms, "--out", tmp_path)
    assert [options_in(tmp_path / arm)["inner_lr"] for arm in ("original", "half-rate")] == [0.1, 0.05]


def test_what_is_adapted_and_where_the_head_starts_are_recorded(blobs: Path, tmp_path: Path) -> None:
    words = ["--dataset", blobs, *SMALL, "--epochs", 1, "--iterations", 2, "--method", "metasgd"]
    call("train", *words, "--adapt", "convs.0,head", "--head-start", "zero", "--out", tmp_path / "run")
    assert options_in(tmp_path / "run")["adapt"] == "convs.0,head"
    learner = gs.load_run(tmp_path / "run").learner()
    assert learner.adapted == ("convs.0.weight", "convs.0.bias", "head.weight", "head.bias")
    assert learner.head_start == "zero" and not gs.load_run(tmp_path / "run").last.params["head.weight"].any()
    call("train", *words, "--out", tmp_path / "plain")
    assert not {"adapt", "head_start"} & options_in(tmp_path / "plain").keys()


def test_a_prototypical_network_is_tested_on_tasks_of_other_ways(blobs: Path, tmp_path: Path) -> None:
    sizes = ["--ways", 3, "--queries", 3, "--tasks", 2, "--filters", 3, "--val-tasks", 6, "--test-tasks", 6]
    words = [*sizes, "--epochs", 1, "--iterations", 2, "--method", "protomaml", "--arm", "original"]
    call("train", "--dataset", blobs, *words, "--steps", 0, "--out", tmp_path / "run")
    call("test", tmp_path / "run", "--ways", 4, "--tasks", 3)
    call("train", "--dataset", blobs, *words, "--steps", 1, "--out", tmp_path / "other")
    assert "inner steps: 0" in call("test", tmp_path / "other", "--steps", 0, "--tasks", 3).out
    call("export", tmp_path / "run", tmp_path / "model")
    assert gs.from_pretrained(tmp_path / "model")[0].steps == 0


@pytest.mark.parametrize("inner", ["momentum:0.5", "adam"])
def test_inner_optimisers_train_and_are_recorded(blobs: Path, tmp_path: Path, inner: str) -> None:
    words = [*SMALL, "--iterations", 2, "--method", "sparsemaml", "--out", tmp_path / "run"]
    call("train", "--dataset", blobs, *words, "--epochs", 1, "--inner", inner)
    assert options_in(tmp_path / "run")["inner"] == inner
    call("train", "--resume", tmp_path / "run", "--epochs", 2)
    call("report", tmp_path / "run")
    assert f"--inner {inner}" in (tmp_path / "run" / "report.html").read_text()
    assert "an inner optimiser" in mistake("train", "--inner", "sgd", "--out", tmp_path / "other")


# Comparisons and grids, trained in this process

MAML, SHARED = "cub-5shot-5task-maml", "cub-5shot-5task-maml+gs"


def test_compare_with_controls(blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_here(monkeypatch)
    words = ["--dataset", blobs, *SMALL, "--epochs", 2, "--iterations", 3, "--controls", "--out", tmp_path]
    said = call("compare", *words, "--preset", f"{MAML}~half-rate").out
    arms = {"original", "shared", "half-rate", "gate-only", "batch-only", "memory-only", "tensor-gates"}
    assert {path.parent.name for path in tmp_path.glob("*/DONE")} == arms
    assert {arm: options_in(tmp_path / arm)["inner_lr"] for arm in arms} == dict.fromkeys(arms, 0.1) | {
        "half-rate": 0.05
    }
    line = r"shared +epoch 1/2  val \d+\.\d% ±\d+\.\d% σ\(m\) 0\.\d\d σ\(λ\) 0\.\d\d  \d+\.\d s"
    assert re.search(line, said) and all(arm in said for arm in arms)
    again = call("compare", *words, "--preset", f"{MAML}~half-rate").out
    assert "epoch 1/2" not in again  # finished arms are kept
    (tmp_path / "report.html").unlink()
    call("report", tmp_path)
    assert (tmp_path / "report.html").exists()
    changed = [*words, "--preset", f"{MAML}-10x"]
    assert "inner_lr" in mistake("compare", *changed)


def test_an_arm_that_diverges_stops_no_other(blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_here(monkeypatch)
    wild = ["--inner-lr", 1e9, "--adapt-norm"]  # with its gains adapted, batch norm keeps nothing finite
    sizes = ["--dataset", blobs, *SMALL, "--epochs", 1, "--iterations", 22, "--out", tmp_path]
    call("compare", *sizes, "--arms", "gate-only", "--adapt-norm")
    for _ in range(2):  # the second time nothing is trained again
        said = call("compare", *sizes, "--arms", "original", "shared", *wild).out
        assert sum("diverged" in line and "epoch 1, iteration 1" in line for line in said.splitlines()) >= 2
    assert "2 done" not in (status := call("grid", "status", tmp_path).out)
    assert "2 diverged" in status and "1 done" in status


def test_seeds_arms_and_options_are_in_the_run_folders(
    blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_here(monkeypatch)
    tiny = ["--dataset", blobs, *SMALL, "--shots", 1, "--iterations", 2, "--run-engine", "eager"]
    words = ["grid", "run", SHARED, *tiny, "--seeds", 3, 1, "--arms", "half-rate", "--out", tmp_path]
    call(*words, "--epochs", 1, "--inner-lr", 0.4)
    configs = {path.parent.relative_to(tmp_path).as_posix(): path for path in tmp_path.glob("*/*/config.json")}
    found = {label: options_in(path.parent) for label, path in configs.items()}
    assert {label: (one["arm"], one["seed"], one["inner_lr"]) for label, one in found.items()} == {
        f"{MAML}~half-rate/seed-1": ("half-rate", 1, 0.2),
        f"{MAML}~half-rate/seed-3": ("half-rate", 3, 0.2),
    }
    assert all(one["epochs"] == 1 and one["dataset"] == str(blobs) for one in found.values())
    assert "inner_lr" in mistake(*words, "--epochs", 1, "--inner-lr", 7)
    assert "0 of 2" in call(*words, "--epochs", 1, "--inner-lr", 0.4).out
    assert "2 of 2" in call(*words, "--epochs", 2, "--inner-lr", 0.4).out  # they go on for more epochs
    assert "2 done" in call("grid", "status", tmp_path, f"{MAML}~*").out
    for more in ([], ["--epochs", 1]):  # 150, which the preset has; fewer
        assert "epochs" in mistake(*words, "--inner-lr", 0.4, *more)


def test_a_failing_cell_stops_nobody(blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_here(monkeypatch)
    thesis = tmp_path / "cub-5shot-5task-metasgd" / "seed-0" / "thesis.tex"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("years of work")
    tiny = ["--dataset", blobs, *SMALL, "--shots", 1, "--epochs", 1, "--iterations", 1]
    said = mistake("grid", "run", "cub-5shot-5task-metasgd", MAML, *tiny, "--out", tmp_path)
    assert "1 of 2" in said and "metasgd" in said and thesis.read_text() == "years of work"
    table = call("grid", "status", tmp_path).out
    assert "1 done, 1 failed" in table and "not empty" in table


def test_list_and_show() -> None:
    lines = call("grid", "list", "--no-hours").out.splitlines()
    assert lines[1].split() == ["cub-1shot-1task-maml", "cub", "750", "750,000"] and len(lines) == 98
    assert lines[-1].split() == ["all", "96", "57,600,000"]  # 24 x (750 + 150 + 1250 + 250) thousand
    few = call("grid", "list", "mini-5shot-5task-maml", "--controls", "--epochs", 2, "--no-hours").out
    assert len(few.splitlines()) == 9 and "mini-5shot-5task-maml~memory-only" in few and " 2,000" in few
    shown = call("grid", "show", "cub-1shot-1task-mamlpp", "--epochs", 7).out
    assert "epochs          7           the command line" in shown and "dataset         cub-resize  paper" in shown


def test_list_estimates_hours(blobs: Path) -> None:
    tiny = ["--dataset", blobs, "--ways", 3, "--queries", 3, "--steps", 2, "--filters", 3]
    header, one, five, total = call("grid", "list", "cub-1shot-*-maml", *tiny).out.splitlines()
    assert header.split()[-1] == "hours" and "at a time" in total
    assert float(one.split()[-1]) > 0 and float(five.split()[-1]) > 0


# The real commands, as processes


def test_train_stopped_and_resumed_then_tested_exported_and_reported(blobs: Path, tmp_path: Path) -> None:
    sizes = ["--dataset", blobs, *SMALL, "--epochs", 3, "--iterations", 20, "--inner-lr", "0.3"]
    call("train", *sizes, "--out", tmp_path / "whole")
    run = tmp_path / "stopped"
    with started("train", *sizes, "--out", run) as process:
        wait_for(lambda: epochs_done(run), process)
        process.terminate()
        message = process.communicate(timeout=60)[1]
    assert process.returncode == 3 and "Traceback" not in message
    assert f"to go on: gradshare train --resume {run}" in message
    assert any(not path.name.endswith("-0000") for path in (run / "checkpoints").iterdir())
    said = call("train", "--resume", run).out
    assert "epoch 3/3" in said and "epoch 1/3" not in said and "test, ensemble" in said
    for name in ("metrics.jsonl", "summary.json"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    best = json.loads((run / "summary.json").read_text())["test"]["best"]
    said = gradshare("test", run, "--tasks", 6).stdout
    assert f"{best['accuracy']:.2%} ± {best['interval']:.2%}" in said
    gradshare("report", run)
    assert (run / "report.html").exists()
    call("export", run, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()
    longer = call("train", "--resume", run, "--epochs", 4).out
    assert "epoch 4/4" in longer and "epoch 3/4" not in longer and (run / "DONE").exists()
    assert mistake("train", "--resume", run, "--epochs", 4, "--shots", 2)


def test_a_comparison_and_a_grid_with_workers(blobs: Path, tmp_path: Path) -> None:
    """Workers do what one process does, to the last bit."""
    tiny = ["--dataset", blobs, *SMALL, "--shots", 1, "--epochs", 1, "--iterations", 2, "--jobs", 2]
    compare = ["compare", *tiny, "--preset", MAML, "--arms", "shared", "--out", tmp_path / "compare"]
    assert "report:" in gradshare(*compare).stdout
    assert "1 done" in call("grid", "run", SHARED, *tiny, "--out", tmp_path / "grid").out
    assert f"{SHARED}/seed-0" in gradshare("grid", "status", tmp_path / "grid", COLUMNS="120").stdout
    call("train", *tiny[:-2], "--preset", SHARED, "--out", tmp_path / "here")
    for run in (tmp_path / "grid" / SHARED / "seed-0", tmp_path / "compare" / "shared"):
        for name in ("config.json", "metrics.jsonl", "summary.json"):
            assert (run / name).read_bytes() == (tmp_path / "here" / name).read_bytes()


# Mistakes


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ("train --frobnicate", "frobnicate"),
        ("train --shots many --out x", "--shots"),
        ("train --shots 0 --out x", "shots is 0"),
        ("train --inner-lr nan --out x", "inner_lr"),
        ("train --method mamlplus --out x", "--method"),
        ("train --arm frobnicate --out x", "frobnicate"),
        ("train --arm half-rate --out x", "half-rate"),
        ("train", "--out"),
        ("train --out x --resume y", "--out"),
        ("train --resume nowhere", "nowhere"),
        ("train --resume nowhere --shots 5", "nowhere"),
        ("train --dataset nothing --out x", "nothing"),
        ("train --dataset BLOBS --method anil --adapt-norm --out x", "anil has no choice of adapt_norm: leave"),
        ("train --dataset BLOBS --method boil --adapt head --out x", "boil has no choice of adapt: leave"),
        ("train --dataset BLOBS --method protomaml --head-start zero --out x", "protomaml has no choice of head_start"),
        ("train --dataset BLOBS --adapt heads --out x", "chooses no weight to adapt"),
        ("train --dataset BLOBS --method reptile --out x", "its arm is original"),
        ("train --dataset BLOBS --steps 0 --out x", "steps is 0"),
        ("train --dataset BLOBS --ways 7 --out x", "7"),
        ("train --dataset BLOBS --shots 9 --out x", "24"),
        ("train --preset cub-5shot --out x", "cub-5shot"),
        ("train --preset cub-5shot-5task-maml --resume x", "--resume"),
        ("train --preset cub-5shot-5task-mamlpp --out x", "data import cub"),
        ("compare --preset mini-5shot-5task-maml --out x", "data import mini"),
        ("compare --arm original --out x", "--arms"),
        ("compare --arms --out x", "--arms"),
        ("compare --arms frobnicate --out x", "frobnicate"),
        ("compare --jobs -1 --out x", "jobs"),
        ("compare --dataset BLOBS --method reptile --out x", "its arm is original"),
        ("compare --dataset BLOBS --adapt heads --out x", "chooses no weight to adapt"),
        ("test nowhere", "nowhere"),
        ("test nowhere --tasks 1", "2"),
        ("export nowhere x --epoch 0", "epoch"),
        ("report nowhere", "nowhere"),
        ("report .", "no run"),
        ("frobnicate", "frobnicate"),
        ("bench --values 3", "--sweep"),
        ("bench --sweep filters", "--sweep"),
        ("bench --shape huge", "--shape"),
        ("bench --threads 5000", "threads"),
        ("bench --device cpu --engines graph", "GPU"),
        ("bench --device cpu --precisions tf32", "GPU"),
        ("bench --device cpu --size 8", "at least 16"),
        ("bench --device cpu --steps 0", "steps is 0"),
        ("train --out x --iterations 1.5", 'unable to convert "1.5" into int'),
        ("data import folder . --size 28.5", 'unable to convert "28.5" into int'),
        ("bench --iterations 0", "iterations is 0"),
        ("data import cub", "data import cub PATH"),
        ("data import cub x --seed 1", "cub has its standard split"),
        ("data import mini x --split-file y", "mini has its standard split"),
        ("data import omniglot x --transform crop", "omniglot has only one transform"),
        ("data import folder . --name a/b", "'a/b'"),
        ("data import folder . --name .x", "'.x'"),
        ("data import folder . --name glyphs", "reserved"),
        ("data import folder . --name downloads", "reserved"),
        ("data import folder nowhere", "nowhere"),
        ("data import birds x", "birds"),
        ("data import glyphs x", "glyphs"),
        ("data download folder", "folder"),
        ("data verify", "data verify NAME"),
        ("data verify nothing", "'nothing'"),
        ("data verify .", "no index.json"),
        ("grid run", "grid list"),
        ("grid run zebra-*", "zebra"),
        ("grid run cub-5shot-5task-maml --out x", "data import cub"),
        ("grid run cub-5shot-5task-maml --arm shared", "--arms"),
        ("grid run cub-5shot-5task-maml --seed 1", "--seeds"),
        ("grid run cub-5shot-5task-maml --seeds", "--seeds"),
        ("grid run cub-5shot-5task-maml --seeds 0 1.5", 'unable to convert "1.5" into int'),
        ("grid run cub-5shot-5task-maml --shots 0", "shots"),
        ("grid run cub-5shot-5task-maml --jobs -1", "jobs"),
        ("grid run cub-5shot-5task-maml --cpus nan", "cpus"),
        ("grid run cub-5shot-5task-maml --dataset nothing", "nothing"),
        ("grid status nowhere", "nowhere"),
        ("grid show zebra", "zebra"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(
    blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADSHARE_DATA", str(tmp_path / "data"))
    assert word in mistake(*words.replace("BLOBS", str(blobs)).split())
    assert not any(tmp_path.iterdir())


def test_without_ray_the_extra_is_named(blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    tiny = ["--dataset", blobs, *SMALL, "--shots", 1, "--engine", "ray", "--out", tmp_path]
    assert "gradshare[ray]" in mistake("grid", "run", MAML, *tiny)


def test_damaged_files_are_named(blobs: Path, tmp_path: Path) -> None:
    sizes = [*SMALL, "--epochs", 1, "--iterations", 2]
    call("train", "--dataset", blobs, *sizes, "--out", tmp_path / "run")
    for text, word in (
        ('{"version": 1, "ways"', "config.json"),
        ('{"version": 1, "colour": 1, "method": "maml"}', "colour"),
    ):
        (tmp_path / "run" / "config.json").write_text(text)
        assert word in mistake("test", tmp_path / "run")


def test_a_stop_just_after_a_run_names_the_command_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LEFT", [])
    with pytest.raises(SystemExit) as stopped, waiting.stoppable(waiting.what_is_left):
        waiting.names_what_goes_on(tmp_path, "gradshare train --out x", "gradshare train --resume x")
        (tmp_path / "config.json").write_text("{}")
        raise KeyboardInterrupt
    assert stopped.value.code == 3 and "to go on: gradshare train --resume x" in capsys.readouterr().err
