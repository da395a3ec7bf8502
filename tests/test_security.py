"""What is never done: SECURITY.md promises it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.test_cli import SMALL
from tests.support.fuzzing import Ended, call

import gradshare as gs

SOURCES = sorted(Path(gs.__file__).parent.rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "subprocess", "runpy"}
CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "torch.hub.load", "np.load", "numpy.load", "os.system"}
CALLS |= {"os.popen", "yaml.load", "pickle.load", "pickle.loads", "torch.package", "tarfile.extractall"}
WATCHED = {
    "socket.connect",
    "socket.getaddrinfo",
    "socket.sendto",
    "socket.bind",
    "urllib.Request",
    "pickle.find_class",
}
WATCHED |= {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.startfile"}
seen: list[str] | None = None


def watch(event: str, arguments: tuple[object, ...]) -> None:
    if seen is not None and event in WATCHED:
        seen.append(f"{event}{arguments}")


@contextmanager
def watched() -> Iterator[list[str]]:
    """What Python itself saw of the network, other programs and unpickling."""
    global seen
    if not hasattr(watch, "hooked"):
        sys.addaudithook(watch)
        watch.hooked = True  # type: ignore[attr-defined]
    seen = found = []
    yield found
    seen = None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_module_can_run_what_it_reads(path: Path) -> None:
    allowed = {"pickle"} if path.name == "pickles.py" else set()  # checks a pickle before it runs it
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & (MODULES - allowed)
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in MODULES
        elif isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in CALLS
            risky = [word for word in node.keywords if word.arg in ("allow_pickle", "shell", "trust_remote_code")]
            assert all(ast.unparse(word.value) == "False" for word in risky)
        elif isinstance(node, ast.Attribute):
            assert node.attr not in ("extract", "extractall")


def test_addresses_are_in_the_download_module_alone() -> None:
    """And among the advice on Ray: nothing else in the package knows how to fetch."""
    fetching = [
        path.name for path in SOURCES if re.search("urlopen|import (pooch|requests)", path.read_text(encoding="utf-8"))
    ]
    connecting = [path.name for path in SOURCES if "create_connection" in path.read_text(encoding="utf-8")]
    assert fetching == ["download.py"] and connecting == ["on_ray.py"]


def test_the_commands_use_no_network_no_program_and_no_pickle(
    blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [*SMALL, "--dataset", str(blobs), "--epochs", "1", "--iterations", "2"]
    (tmp_path / "run").mkdir()
    commands = [
        ["train", *options, "--out", "run"],
        ["train", "--resume", "run"],
        ["test", "run", "--tasks", "2"],
        ["report", "run"],
        ["export", "run", "model"],
        ["compare", *options, "--jobs", "1", "--out", "both"],
        ["grid", "list", "--no-hours"],
        ["data", "list"],
        ["data", "verify", str(blobs)],
        ["data", "show", str(blobs), "--ways", "2", "--queries", "1"],
    ]
    with watched() as found:
        for words in commands:
            assert call(*words).code == 0, words
            plant(tmp_path)
        gs.from_pretrained("model")
        gs.load_run("run").state()
        missing: Ended = call("train", "--dataset", "cub", "--out", "new")
    assert found == []
    assert missing.code == 2 and "gradshare data download cub" in missing.err  # says how, and does not do it
    assert not (tmp_path / "ran").exists()


def plant(folder: Path) -> None:
    """Programs in every folder that a command may read."""
    program = f"open({str(folder / 'ran')!r}, 'w').close()\n"
    for place in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        for name in ("__init__.py", "gradshare.py", "modeling.py", "sitecustomize.py"):
            (place / name).write_text(program)


def test_what_is_watched_is_seen() -> None:
    import pickle
    import socket

    with watched() as found:
        pickle.loads(pickle.dumps(Path("x")))
        with socket.socket() as one, pytest.raises(OSError):
            one.connect(("127.0.0.1", 1))
    assert {event.partition("(")[0] for event in found} == {"pickle.find_class", "socket.connect"}
