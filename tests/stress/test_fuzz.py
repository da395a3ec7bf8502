"""Bad input: configs, presets, run folders, metrics and command lines. Each command succeeds, or prints one line."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors import torch as safetensors

import gradshare as gs
import gradshare.reports.write
from gradshare.experiments.presets import EVERY_ARM
from gradshare.files import add_checksum, sha256
from gradshare.reports.figures import image_files
from gradshare.runs.build import run
from gradshare.runs.config import RunConfig
from gradshare.runs.display import Silent
from gradshare.runs.folder import RunFolder
from tests.support.fuzzing import CASES, REPORT, RESUMED, Play, without_long_work, write_data

OPTIONS: dict[str, Any] = dict(
    epochs=2, iterations=2, tasks=2, ways=2, queries=2, val_tasks=2, test_tasks=2, filters=2,
    steps=1, device="cpu", threads=1, engine="eager", precision="float32",
)  # fmt: skip
SHARES = {  # of all cases
    "command lines": 0.35,
    "configs": 0.2,
    "presets": 0.1,
    "run folders": 0.15,
    "checkpoints": 0.1,
    "metrics": 0.1,
}


def cases(family: str) -> settings:
    """The number of cases of a family; the same cases in each `make stress`, new ones in each `make fuzz`."""
    return settings(
        max_examples=int(CASES * SHARES[family]),
        deadline=None,
        database=None,
        derandomize="FUZZ_CASES" not in os.environ,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # cases are short already; shrinking them takes minutes
    )


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Play]:
    """Run cases in a folder with one of everything; print the counts at the end."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path_factory.getbasetemp()
    root = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory))  # a hundred thousand small files
    inside = root / "inside"
    inside.mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GRADSHARE_DATA", str(root / "data"))
        patched.setenv("HOME", str(root))
        patched.chdir(inside)
        write_data(root / "data")
        furnish(inside)
        with without_long_work():
            found = Play(root)
            yield found
    shutil.rmtree(root)
    counts = ", ".join(f"{name} {count:,}" for name, count in found.counts.items())
    plugins = request.config.pluginmanager
    report, capture = plugins.getplugin("terminalreporter"), plugins.getplugin("capturemanager")
    if report is not None:  # pytest-xdist's workers have none
        with capture.global_and_fixture_disabled():
            report.write_line(f"\nbad input: {found.counts.total():,} cases; {counts}")


def furnish(folder: Path) -> None:
    """Create what paths on a command line may lead to."""
    (folder / "file").write_text("not ours")
    (folder / "empty").mkdir()
    (folder / "folder").mkdir()
    (folder / "folder" / "thing.txt").write_text("not ours")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    bind(folder / "socket")
    config = RunConfig(**OPTIONS)
    run(config, folder / "run", False, Silent(), gs.load_dataset("glyphs"))
    shutil.copytree(folder / "run", folder / "unfinished")
    (folder / "unfinished" / "DONE").unlink()
    (folder / "unfinished" / "summary.json").unlink()
    cell = folder / "grid" / "cub-5shot-5task-maml+gs" / "seed-0"
    shutil.copytree(folder / "unfinished", cell)
    notes = folder / "grid" / ".grid" / "cub-5shot-5task-maml+gs"
    notes.mkdir(parents=True)
    (notes / "seed-0.plan.json").write_text(json.dumps(asdict(config)))


def bind(path: Path) -> None:
    """Create a socket."""
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket may have 107 bytes
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


# Words of command lines

PRESET = "cub-5shot-5task-maml+gs"
words_of = str.split
NUMBERS = words_of("0 1 2 5 -1 1.5 nan inf -inf 1e999 1e-300 1e9 1_0 0x10 ٣ ½ 100000")
NUMBERS += [*map(str, (2**31, 2**63, 2**64, 10**12)), "9" * 400, "-" + "9" * 30]
PATHS = words_of("new new/deep file file/below folder empty run unfinished grid fifo loop .. . socket missing ~")
PATHS += ["run/config.json", "run/checkpoints", "fifo/x", "loop/x", "", "a" * 300, "x/" * 2500]
ODD = words_of("- -- --- = --= -h --help --version [red]x[/] {} %s $(x) 😀 <script> * [ ' @file --no-controls")
ODD += ["", " ", "\udcff", "\u202e", "new\nline", "\x1b[31m", '"', "é" * 300]
NAMES = words_of("glyphs cub mini imagenet unit maml anil mamlpp shared half-rate cpu cuda cub-* [!a]* true false test")
NAMES += words_of("train graph tf32 ray local folder omniglot crop size tasks higher auto 127.0.0.1:99999 x:1")
NAMES += [PRESET, "mini-1shot-*~half-rate"]
WORD = st.one_of(*map(st.sampled_from, (NUMBERS, PATHS, ODD, NAMES)), st.text(max_size=20), st.integers().map(str))
RUN = [f"--{field.name.replace('_', '-')}" for field in fields(RunConfig)]
COMMANDS = {
    "train": [*RUN, "--preset", "--out", "--resume", "--timeout"],
    "compare": [*RUN, "--preset", "--out", "--controls", "--arms", "--jobs"],
    "test": ["--tasks", "--seed", "--split"],
    "report": [],
    "grid list": [*RUN, "--arms", "--controls", "--no-hours", "--hours", "--run-engine"],
    "grid show": [*RUN, "--run-engine"],
    "grid run": [*RUN, "--out", "--seeds", "--arms", "--controls", "--jobs", "--retries", "--engine", "--address"],
    "grid status": [],
    "export": ["--epoch", "--license"],
    "data list": [],
    "data import": ["--transform", "--name", "--split-file", "--seed", "--replace"],
    "data download": ["--folder"],
    "data verify": [],
    "data show": ["--split", "--ways", "--shots", "--queries", "--tasks", "--seed", "--classes", "--out"],
    "bench": [
        *("--shape", "--methods", "--arms", "--engines", "--precisions", "--rivals", "--sweep", "--values", "--json"),
        *("--iterations", "--eval-tasks", "--tasks", "--shots", "--queries", "--steps", "--filters", "--size"),
        *("--device", "--threads"),
    ],
    "": ["--help", "--version"],
}
SMALL = "--ways 2 --queries 2 --tasks 2 --steps 1 --filters 2 --iterations 2 --val-tasks 2 --test-tasks 2 --threads 1"
LINES = [  # each of them does something, quickly
    *(f"train --out new {SMALL}", "train --resume unfinished", f"train --preset {PRESET} --out new {SMALL}"),
    *(f"compare --out new --jobs 1 {SMALL}", f"compare --out new --controls {SMALL}", "test run", "test run --tasks 5"),
    *("report run", "report .", "report grid", "grid list --no-hours", f"grid list cub-* {SMALL}", "grid status grid"),
    *(f"grid show {PRESET}", f"grid run {PRESET} --out new --seeds 0 1 {SMALL}", "grid run mini-* --out new"),
    *(f"grid run {PRESET} --engine ray --out new --address x:1 --cpus 1 --gpus 0", "data list", "data verify glyphs"),
    *("data import folder folder --name new", "data import cub file --transform resize", "--help"),
    *("data show glyphs --ways 2 --queries 2 --tasks 1 --out new.png", "data show cub --classes --ways 2"),
    *("data download cub --folder new", "export run new", "export run new --epoch 1 --license mit"),
    *("bench --methods maml --no-rivals --json new.json", "bench --sweep tasks --values 1 2 --methods maml"),
]


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A valid command line with up to three changes: words replaced, removed, repeated or added. Or random words."""
    if draw(st.integers(0, 9)) == 0:
        return [*draw(st.sampled_from(sorted(COMMANDS))).split(), *draw(st.lists(WORD, max_size=4))]
    line = draw(st.sampled_from(LINES))
    words, options = line.split(), next(COMMANDS[name] for name in sorted(COMMANDS)[::-1] if line.startswith(name))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        change = draw(st.integers(0, 9))
        if change < 6 and options:
            _set(words, draw(st.sampled_from(options)), draw(st.one_of(st.sampled_from(NUMBERS), WORD)))
        elif change == 6:
            words.insert(draw(st.integers(0, len(words))), draw(st.one_of(WORD, st.sampled_from([*words, *RUN]))))
        elif words:
            place = draw(st.integers(0, len(words) - 1))
            words[place : place + 1] = [draw(WORD)] if change < 9 else []
    return words


def _set(words: list[str], option: str, value: str) -> None:
    """Set an option to a value; replaces the value that it has."""
    if option in words:
        place = words.index(option) + 1
        words[place : place + 1] = [value]
    else:
        words += [f"{option}={value}"] if len(value) % 2 else [option, value]


@cases("command lines")
@given(words=command_lines())
def test_command_lines(play: Play, words: list[str]) -> None:
    play.case("command lines", *words, may_change=REPORT | RESUMED)


FOUND = [  # earlier, by the test above: each gave a traceback, hung or changed a file
    f"compare --out new --jobs -1 {SMALL}",
    "test run --seed -1",
    "test run --split x",
    "grid list --dataset nothing",
    f"train --out new --seed {2**70}",
    f"train --out new --threads {2**63}",
    f"train --out new --ways {2**64}",
    "train --out new --filters 1000000",
    f"train --out new --iterations {10**9}",
    "data show glyphs --seed -1",
    "data show glyphs --ways 2 --queries 2 --tasks 1000000000",
    "data show glyphs --ways 2 --queries 2 --out file",
    "data show glyphs --ways 2 --queries 2 --out fifo",
    "bench --methods maml --no-rivals --json file",
    f"grid run {PRESET} --engine ray --cpus inf",
    f"grid run {PRESET} --engine ray --address x:99999",
    "export run new --epoch -1",
    "data import folder loop",
    "data import folder folder --split-file fifo",
    f"grid run {PRESET} --out loop --out loop/x",
    "bench --methods --rivals",
    f"compare --out new --controls {SMALL} --tasks 1000000000",
    f"train --out new/new {SMALL} --tasks 1000000000",
]


@pytest.mark.parametrize("line", FOUND, ids=lambda line: line[:60])
def test_earlier_findings_end_with_an_error(play: Play, line: str) -> None:
    assert play.case("earlier findings", *line.split(" ")).code == 2


def test_a_name_in_an_index_is_not_a_path(play: Play) -> None:
    with play.copy("../data/glyphs", "store") as store:
        index = json.loads((store / "index.json").read_text())
        index.pop("index_sha256")  # as in older stores, or a stranger writes the right one
        (store / "index.json").write_text(json.dumps({**index, "name": "../../above"}))
        assert "contact sheet: above-train.png" in play.case("earlier findings", *SHOW.split()).out


SHOW = "data show store --ways 2 --queries 2 --tasks 1"


# Configurations

SPECIAL = [None, True, 0, -1, 1, 2, 0.5, 1e308, -1e-320, float("nan"), float("inf"), 2**31, 2**63, 10**30, 10**400, ""]
SPECIAL += ["auto", "\ud800", "<script>", "../x", "a" * 5000, [], {}, [[]], {"": 0}, "glyphs", "run", "fifo"]
VALUE = st.sampled_from(SPECIAL) | st.recursive(
    st.one_of(st.sampled_from(SPECIAL), st.integers(), st.floats(), st.text(max_size=10)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
KEYS = [*(field.name for field in fields(RunConfig)), "version", "sha256", "extra", "", "m"]
DEEP = ["[" * 100_000, '{"a":' * 100_000, "[" * 800 + "]" * 800, '{"version": 1, "x": ' + "[" * 400 + "]" * 400 + "}"]
TEXTS = [*DEEP, "", " ", "null", "[]", "1", '"x"', "{", "{}", "NaN", "-Infinity", "9" * 5000, '{"version": 1}', "\0"]
TEXTS += ['{"version": 1, "ways": 5, "ways": 6}', "\ufeff{}", '{"version": 1e999}', '{"version": 2}', '{"a":1,' * 9]


@st.composite
def damaged(draw: st.DrawFn, good: dict[str, Any]) -> bytes:
    """A JSON object with other values, keys removed or added, and the text cut or in another encoding."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.one_of(st.sampled_from(TEXTS).map(str.encode), st.binary(max_size=50)))
    content = dict(good)
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.sampled_from([*good, *KEYS]))
        if draw(st.integers(0, 4)) == 0:
            content.pop(key, None)
        else:
            content[key] = draw(VALUE)
    text = json.dumps(content)
    how = draw(st.integers(0, 9))
    if how == 0:
        text = text[: draw(st.integers(0, len(text)))]
    elif how == 1:
        text = text.replace("{", '{"seed": 3, ', 1)
    return text.encode(draw(st.sampled_from(["utf-8"] * 6 + ["utf-8-sig", "utf-16"])))


CONFIG: dict[str, Any] = {"version": 1, **asdict(RunConfig(**OPTIONS))}
del CONFIG["deterministic"]  # config.json has it only if it is true
COMPARE = f"compare --out made --arms shared --epochs 2 --device cpu {SMALL}".split()
ON_A_RUN = [["train", "--resume", "made/shared"], ["test", "made/shared"], ["report", "made"], COMPARE]


@cases("configs")
@given(
    content=damaged(CONFIG), words=st.sampled_from([*ON_A_RUN, ["grid", "status", "planned"], ["report", "planned"]])
)
def test_configs(play: Play, content: bytes, words: list[str]) -> None:
    planned = words[-1] == "planned"
    with play.copy("grid", "planned") if planned else play.copy("unfinished", "made/shared") as folder:
        place = next(folder.glob(".grid/*/seed-0.plan.json")) if planned else folder / "config.json"
        place.write_bytes(content)
        play.case("configs", *words, may_change=REPORT | RESUMED)


# Presets


@st.composite
def names(draw: st.DrawFn) -> str:
    """The name of a preset with some characters removed, changed or added."""
    name = draw(st.sampled_from(sorted(EVERY_ARM)))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(name)))
        instead = draw(st.one_of(st.sampled_from([*"*?[]!~-+15", "", "10x", "task", "~half-rate"]), st.characters()))
        name = name[:place] + instead + name[place + draw(st.integers(0, 1)) :]
    return name


WITH_A_NAME = ["grid show", "grid list --no-hours", f"train --out new {SMALL} --preset", f"grid run --out new {SMALL}"]
WITH_A_NAME += [f"compare --out new --jobs 1 {SMALL} --preset", "grid status grid", f"grid list --controls {SMALL}"]


@cases("presets")
@given(name=names(), line=st.sampled_from(WITH_A_NAME))
def test_presets(play: Play, name: str, line: str) -> None:
    play.case("presets", *line.split(), name)


# Run folders

LONGER = ["train", "--resume", "made/shared", "--epochs", "3"]
PLACES = ["config.json", "metrics.jsonl", "timings.jsonl", "summary.json", "DONE", "checkpoints", "report.html"]
PLACES += ["checkpoints/epoch-0002-iteration-0000", "checkpoints/epoch-0001-iteration-0000/checkpoint.json"]
PLACES += [f"checkpoints/epoch-0002-iteration-0000/{name}" for name in ("checkpoint.json", "tensors.safetensors")]
PLACES += ["checkpoints/epoch-0009-iteration-0000", "checkpoints/.epoch-0001-iteration-0000", "checkpoints/epoch-x"]
PLACES += ["diverged.json", "extra", ".config.json.new", ".metrics.jsonl.new", "../.shared.lock", "../original"]
PLACES += ["../.grid/shared.failure.txt", "../.grid/shared.plan.json", "../original/config.json"]
CHANGES = ["remove", "empty", "cut", "garbage", "flip", "folder", "fifo", "loop", "zeros", "dangling", "socket", "json"]


def damage(path: Path, change: str, content: bytes) -> None:
    """Replace a file or a folder of a run by something else."""
    old = path.read_bytes() if path.is_file() else b"{}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    place = len(content) * 37 % (len(old) + 1)
    files = {"empty": b"", "cut": old[:place], "garbage": content, "json": content}
    files["flip"] = old[:place] + bytes(255 - byte for byte in old[place : place + 1]) + old[place + 1 :]
    links = {"loop": path.name, "zeros": "/dev/zero", "dangling": "nowhere"}
    if change in files:
        path.write_bytes(files[change])
    elif change in links:
        path.symlink_to(links[change])
    elif change == "folder":
        path.mkdir()
    elif change == "fifo":
        os.mkfifo(path)
    elif change == "socket":
        bind(path)


@cases("run folders")
@given(
    changes=st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(CHANGES)), min_size=1, max_size=3),
    content=st.one_of(st.binary(max_size=60), damaged(CONFIG)),
    words=st.sampled_from([*ON_A_RUN, ["report", "made"], ["train", "--out", "made/shared"], LONGER]),
    begun=st.sampled_from(["run", "unfinished"]),
)
def test_run_folders(play: Play, changes: list[tuple[str, str]], content: bytes, words: list[str], begun: str) -> None:
    with play.copy(begun, "made/shared") as folder:
        for place, change in changes:
            with suppress(OSError):  # an earlier change replaced its parent folder
                damage(folder / place, change, content)
        play.case("run folders", *words, may_change=REPORT | RESUMED, own=folder)


# Checkpoints with correct checksums and wrong content

NEWEST = "checkpoints/epoch-0002-iteration-0000"
CHANGED_TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flat": lambda tensor: tensor.flatten(),
    "longer": lambda tensor: tensor[None].repeat(2, *[1] * tensor.dim()),
    "integers": lambda tensor: tensor.to(torch.int8),
    "half": lambda tensor: tensor.half(),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "not a number": lambda tensor: tensor * torch.nan if tensor.is_floating_point() else ~tensor,
}


@cases("checkpoints")
@given(
    entry=st.sampled_from(["epoch", "iteration", "seconds", "metrics", "timings", "run", "version", "line", "extra"]),
    value=VALUE,
    tensor=st.integers(0, 100),
    change=st.sampled_from(["none", "gone", "another name", *CHANGED_TENSORS]),
    words=st.sampled_from([*ON_A_RUN, LONGER, ["export", "made/shared", "new"]]),
)
def test_checkpoints(play: Play, entry: str, value: Any, tensor: int, change: str, words: list[str]) -> None:
    with play.copy("unfinished", "made/shared") as folder:
        about = json.loads((folder / NEWEST / "checkpoint.json").read_text())
        tensors = safetensors.load_file(folder / NEWEST / "tensors.safetensors")
        if change == "none":
            place = about["metrics"][0] if entry == "line" else about
            place[list(place)[tensor % len(place)] if entry == "line" else entry] = value
        else:
            name = sorted(tensors)[tensor % len(tensors)]
            found = tensors.pop(name)
            if change == "another name":
                tensors[f"params/{name}"] = found
            elif change != "gone":
                tensors[name] = CHANGED_TENSORS[change](found).contiguous()
        content = safetensors.save(tensors)
        (folder / NEWEST / "tensors.safetensors").write_bytes(content)
        rest = {**about, "tensors_sha256": sha256(content)}
        del rest["sha256"]
        (folder / NEWEST / "checkpoint.json").write_text(json.dumps(add_checksum(rest)))
        play.case("checkpoints", *words, may_change=REPORT | RESUMED, own=folder)


# Metrics

EXTREME = [1e-45, 3.4e38, -3.4e38]  # the smallest and largest float32: what a run may write


@pytest.mark.parametrize("value", EXTREME)
def test_extreme_values_are_drawn(play: Play, value: float) -> None:
    """With real drawing, which the cases below replace."""
    with play.copy("run", "made/shared") as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(gradshare.reports.write, "image_files", image_files)
        extreme = {"val_accuracy": None, "val_loss": value, "val_interval": value, "m": [value], "lam": [value]}
        lines = [json.dumps({**LINE, "val_accuracy": None}), json.dumps({**LINE, **extreme, "epoch": 2})]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        (folder / "timings.jsonl").write_text(json.dumps({"epoch": 1, "train_seconds": value, "val_seconds": value}))
        assert play.case("extreme values", "report", "made").code == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400], ids=["nan", "inf", "10**400"])
def test_what_is_not_a_number_is_damage(play: Play, value: float) -> None:
    with play.copy("run", "made/shared") as folder:
        (folder / "metrics.jsonl").write_text(json.dumps({**LINE, "val_loss": value}))
        assert "metrics.jsonl" in play.case("extreme values", "report", "made").err


LINE: dict[str, Any] = dict(
    epoch=1, train_loss=1.0, train_accuracy=0.5, val_loss=1.0, val_accuracy=0.5, val_interval=0.1, m=[0.5], lam=[0.5]
)  # fmt: skip
TIMES: dict[str, Any] = {"epoch": 1, "train_seconds": 1.0, "val_seconds": 1.0}
SCORE: dict[str, Any] = {"accuracy": 0.5, "interval": 0.1, "loss": 1.0, "diverged": 0}
BEST, ENSEMBLE = {"epoch": 1, **SCORE}, {"epochs": [1, 2], **SCORE}
SUMMARY: dict[str, Any] = {"best_epoch": 1, "best_val_accuracy": 0.5, "test": None}


@st.composite
def lines(draw: st.DrawFn, good: dict[str, Any]) -> bytes:
    """Up to four lines, one for each epoch; some of them are damaged."""
    found = []
    for number in range(draw(st.integers(0, 4))):
        line = json.dumps({**good, "epoch": number + 1}).encode()
        found.append(draw(damaged({**good, "epoch": number + 1})) if draw(st.booleans()) else line)
    text = b"\n".join(found) + draw(st.sampled_from([b"\n", b""]))
    return text if draw(st.integers(0, 7)) else text + b" " * 1_000_000


TESTED = b'{"best_epoch": 1, "best_val_accuracy": 0.5, "test": {"tasks": 2, "best": %b, "ensemble": %b}}'


@cases("metrics")
@given(
    metrics=lines(LINE),
    timings=lines(TIMES),
    summary=st.one_of(
        damaged(SUMMARY),
        st.tuples(damaged(BEST), damaged(ENSEMBLE)).map(lambda texts: TESTED % texts),
    ),
    words=st.sampled_from([*ON_A_RUN[:1], ["report", "made/shared"], ["report", "made"], ["grid", "status", "grid"]]),
    done=st.booleans(),
)
def test_metrics(play: Play, metrics: bytes, timings: bytes, summary: bytes, words: list[str], done: bool) -> None:
    with play.copy("unfinished", "made/shared") as folder:
        (folder / "metrics.jsonl").write_bytes(metrics)
        (folder / "timings.jsonl").write_bytes(timings)
        if done:
            (folder / "summary.json").write_bytes(summary)
            (folder / "DONE").write_text(RunFolder(folder)._checksums())
        play.case("metrics", *words, may_change=REPORT | RESUMED, own=folder)
