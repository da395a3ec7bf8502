"""What SECURITY.md says is never done."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gradshare as gs
from tests.support.commands import SMALL, call

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


def uses(path: Path) -> set[str]:
    """The modules that a file imports and the functions that it calls, by their names in the code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Call):
            risky = [word for word in node.keywords if word.arg in ("allow_pickle", "shell", "trust_remote_code")]
            found |= {_called(node), *(f"{word.arg}={ast.unparse(word.value)}" for word in risky)}
        elif isinstance(node, ast.Attribute) and node.attr in ("extract", "extractall"):
            found.add(node.attr)
    return found


def _called(node: ast.Call) -> str:
    safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
    return ast.unparse(node.func) + (" of weights only" if safe else "")


def test_no_module_can_execute_what_it_reads() -> None:
    known = {"pickles.py": {"pickle"}}  # an Unpickler that knows arrays, text and numbers alone
    never = {*MODULES, *CALLS, "extract", "extractall", "allow_pickle=True", "shell=True", "trust_remote_code=True"}
    found = {path.name: uses(path) & never - known.get(path.name, set()) for path in SOURCES}
    assert {name: names for name, names in found.items() if names} == {}


def test_only_the_download_and_ray_know_how_to_connect() -> None:
    network = {"urllib", "http", "requests", "pooch", "socket", "ftplib"}
    found = {path.name for path in SOURCES if uses(path) & network}
    assert found <= {"download.py", "ray.py", "on_ray.py", "locks.py"}  # a lock names its host


def test_the_commands_use_no_network_no_program_and_no_pickle(
    blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [*SMALL, "--epochs", "1", "--iterations", "1", "--dataset", str(blobs)]
    commands = [
        ["train", *options, "--out", "run"],
        ["train", "--resume", "run"],
        ["test", "run", "--tasks", "2"],
        ["report", "run"],
        ["export", "run", "model"],
        ["grid", "list", "--no-hours"],
        ["data", "list"],
        ["data", "verify", str(blobs)],
    ]
    with watched() as found:
        for words in commands:
            call(*words)
            plant(tmp_path)
        gs.from_pretrained("model")
        gs.load_run("run").state()
        missing = call("train", "--dataset", "cub", "--out", "new", code=2).err
    assert found == []
    assert "gradshare data download cub" in missing  # says how, and does not do it
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
