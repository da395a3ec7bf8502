"""Locks: one process at a time, and no lock outlives the process that holds it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.runs.test_training import TINY, learner

import gradshare as gs
from gradshare.cli.app import main
from gradshare.runs import locks
from gradshare.runs.locks import Held, holder, lock_of, locked

TAKE = """
import sys, time
from pathlib import Path
from gradshare.runs.locks import Held, locked
try:
    with locked(Path(sys.argv[1])):
        print("taken", flush=True)
        time.sleep(float(sys.argv[2]))
except Held as error:
    print(error, flush=True)
"""


def taker(folder: Path, seconds: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", TAKE, str(folder), str(seconds)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def forge(folder: Path, **different: Any) -> Path:
    """A lock as another process would have left it."""
    path = lock_of(folder)
    path.write_text(json.dumps({**locks._own()._asdict(), **different}))
    return path


def test_a_lock_is_there_while_the_block_lasts(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with locked(folder):
        found = holder(folder)
        assert found is not None and found.pid == os.getpid() and found.here
        with pytest.raises(Held, match=f"is in use by process {os.getpid()} on "), locked(folder):
            pass
        with locked(tmp_path / "new" / "other"):
            pass
    assert holder(folder) is None and list(tmp_path.iterdir()) == []  # not even the folder that it made


def test_a_lock_is_released_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "run"):
        raise ZeroDivisionError
    assert not lock_of(tmp_path / "run").exists()


def test_a_living_process_keeps_others_out_and_a_killed_one_does_not(tmp_path: Path) -> None:
    with taker(tmp_path / "run", 60) as process:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        with pytest.raises(Held, match=f"process {process.pid} "), locked(tmp_path / "run"):
            pass
        process.send_signal(signal.SIGKILL)
        time.sleep(0.2)  # dead and not yet waited for
        assert lock_of(tmp_path / "run").exists()
        with locked(tmp_path / "run"):
            assert holder(tmp_path / "run") is not None
    assert not lock_of(tmp_path / "run").exists()


def test_of_many_at_once_one_gets_a_stale_lock(tmp_path: Path) -> None:
    forge(tmp_path / "run", boot="before the power cut")
    processes = [taker(tmp_path / "run", 2) for _ in range(8)]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert sorted(words == "taken\n" for words in said) == [False] * 7 + [True]


@pytest.mark.parametrize(
    ("different", "stale"),
    [
        ({}, False),
        ({"born": 1}, True),  # the number belongs to another process by now
        ({"pid": 2**22 + 1}, True),  # no such process
        ({"boot": "an earlier one"}, True),
        ({"host": "elsewhere"}, False),
        ({"namespace": "pid:[1]", "pid": 2**22 + 1}, False),  # another container
    ],
)
def test_which_locks_are_stale(tmp_path: Path, different: dict[str, Any], stale: bool) -> None:
    forge(tmp_path / "run", **different)
    assert (holder(tmp_path / "run") is None) == stale


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"pid": 1}'])
def test_another_machines_lock_or_a_damaged_one_lasts_as_long_as_it_is_renewed(
    tmp_path: Path, content: str | None
) -> None:
    path = forge(tmp_path / "run", host="elsewhere")
    if content is not None:
        path.write_text(content)
    with pytest.raises(Held), locked(tmp_path / "run"):
        pass
    old = time.time() - locks.LEASE - 1
    os.utime(path, (old, old))
    with locked(tmp_path / "run"):
        pass
    assert not path.exists()


def test_a_lock_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "RENEWAL", 0.02)
    with locked(tmp_path / "run"):
        os.utime(lock_of(tmp_path / "run"), (0, 0))
        until = time.monotonic() + 10
        while lock_of(tmp_path / "run").stat().st_mtime == 0 and time.monotonic() < until:
            time.sleep(0.01)
        assert lock_of(tmp_path / "run").stat().st_mtime > 0


def test_a_lock_that_another_took_over_is_left_alone(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        forge(tmp_path / "run", host="elsewhere")
    assert lock_of(tmp_path / "run").exists()


def test_two_paths_to_one_folder_have_one_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    for path in (tmp_path / "elsewhere" / "link", Path("."), Path("../run"), tmp_path / "run"):
        assert lock_of(path) == tmp_path / ".run.lock"


@pytest.mark.parametrize(
    "different",
    [{"pid": "1"}, {"pid": None}, {"host": 5}, {"born": 1.5}, {"since": "soon"}, {"since": 1e300}, {"since": -1.0}],
)
def test_a_lock_with_fields_of_another_kind_is_a_damaged_one(tmp_path: Path, different: dict[str, Any]) -> None:
    forge(tmp_path / "run", **different)
    with pytest.raises(Held, match="in use by process 0 on a machine unknown"), locked(tmp_path / "run"):
        pass


def test_a_process_that_dies_while_it_locks_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock has its content from the first moment: an empty one would keep everybody out for `LEASE` seconds."""

    class Crash(BaseException): ...

    def crash(source: Path, target: Path) -> None:
        assert json.loads(Path(source).read_text())["pid"] == os.getpid()
        raise Crash

    monkeypatch.setattr(os, "link", crash)
    with pytest.raises(Crash), locked(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    with locked(tmp_path / "run"):
        assert holder(tmp_path / "run") is not None
        with pytest.raises(Held), locked(tmp_path / "run"):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_link_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network disk that makes the link, loses its answer and is asked again."""
    usual = os.link

    def twice(source: Path, target: Path) -> None:
        usual(source, target)
        usual(source, target)

    monkeypatch.setattr(os, "link", twice)
    with locked(tmp_path / "run"):
        assert holder(tmp_path / "run") is not None
    assert list(tmp_path.iterdir()) == []


def test_where_no_lock_can_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(gs.UserError, match=r"cannot lock .*file/run: .*file/\.run\.lock"),
        locked(tmp_path / "file" / "run"),
    ):
        pass

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_text", read_only)
    with (
        pytest.raises(gs.UserError, match=r"cannot lock .*run: Read-only file system: .*\.run\.lock"),
        locked(tmp_path / "run"),
    ):
        pass


def test_every_training_locks_its_folder(dataset: gs.Dataset, tmp_path: Path) -> None:
    seen: list[str] = []

    class Second:
        """Tries to train in the same folder while the first is at it."""

        def iteration(self, *_: Any) -> None:
            for resume in (True, False, None):
                with pytest.raises(Held) as refused:
                    gs.train(learner(), dataset, tmp_path / "run", resume, **TINY)
                seen.append(str(refused.value))

        def evaluating(self, *_: Any) -> None: ...
        def epoch(self, *_: Any) -> None: ...

    gs.train(learner(), dataset, tmp_path / "run", display=Second(), **TINY | {"epochs": 1, "iterations": 1})
    assert len(seen) == 3 and all(f"run is in use by process {os.getpid()} on " in text for text in seen)
    assert holder(tmp_path / "run") is None and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_second_process_gets_one_sentence_and_exit_code_2(
    blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gradshare", "train", "--dataset", str(blobs), "--out", str(tmp_path / "run")])
    with taker(tmp_path / "run", 60) as process:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        with pytest.raises(SystemExit) as end:
            main()
        process.kill()
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and f"run is in use by process {process.pid} on " in said
    assert not (tmp_path / "run").exists()


def test_a_link_in_the_place_of_a_lock_is_no_lock(tmp_path: Path) -> None:
    lock_of(tmp_path / "run").symlink_to(tmp_path / "nowhere")
    with locked(tmp_path / "run"):
        assert holder(tmp_path / "run") is not None
    assert list(tmp_path.iterdir()) == []
