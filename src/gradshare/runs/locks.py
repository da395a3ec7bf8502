"""Locks: a run folder is trained by one process at a time, on this machine or another that shares the disk.

The lock of `runs/one` is the file `runs/.one.lock`, which says who holds it: host, boot, process. It is there while
the process lives, and a thread renews its time. A lock is stale, and the next process takes it over, when its process
is gone, when its machine has been started anew, or when it is another machine's and was not renewed for `LEASE`
seconds by the clock of the disk. Imports nothing heavy.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from gradshare.errors import UserError
from gradshare.files import parse_json, read_text, tidy

LEASE, RENEWAL = 120.0, 15.0  # seconds


class Holder(NamedTuple):
    """Who holds a lock."""

    host: str
    boot: str  # changes when the machine is started anew; "" where the system has no such thing
    namespace: str  # process ids of two containers on one machine are different things
    pid: int
    born: int  # the process's start, in clock ticks since the boot: ids are used again, with another start
    since: float  # wall clock, for people

    @property
    def here(self) -> bool:
        """Whether this process could see the holder's."""
        own = _own()
        return (self.host, self.namespace) == (own.host, own.namespace)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


UNKNOWN = Holder("a machine unknown", "", "", 0, 0, 0.0)


class Held(UserError):
    """Another process has the lock, and is alive."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within the block this process alone works on `folder`, which need not be there yet; `Held` if another does."""
    path = lock_of(folder)
    with tidy(path.parent):
        try:
            own = _acquire(path, folder)
        except OSError as error:
            raise UserError(f"cannot lock {folder}: {error.strerror}: {path}") from error
        done = threading.Event()
        renewing = threading.Thread(target=_renew, args=(path, done), daemon=True)
        renewing.start()
        try:
            yield
        finally:
            done.set()
            renewing.join()
            if _read(path) == own:
                path.unlink(missing_ok=True)


def lock_of(folder: Path) -> Path:
    """Where the lock of a folder is, whatever path leads there: beside it, for the folder may have to be empty."""
    parent, name = os.path.split(os.path.realpath(folder))
    return Path(parent) / f".{name}.lock"


def holder(folder: Path) -> Holder | None:
    """Who is at work on a folder; None if nobody is."""
    path = lock_of(folder)
    found = _read(path)
    return found if found is not None and _alive(found, path) else None


def _acquire(path: Path, folder: Path) -> Holder:
    path.parent.mkdir(parents=True, exist_ok=True)
    own = _own()
    while True:
        try:
            _create(path, json.dumps(own._asdict()))
            for left in path.parent.glob(f"{glob.escape(path.name)}.*"):  # by a process killed in `_create`
                left.unlink(missing_ok=True)
            return own
        except FileExistsError:
            found = _read(path)
        if found == own:  # a network disk made the link and lost its answer
            return own
        if found is not None and _alive(found, path):
            raise Held(f"{folder} is in use by {found} (lock {path})")
        _remove_stale(path, found)


def _create(path: Path, text: str) -> None:
    """Make a file that is not there yet, and has its content from the first moment; FileExistsError if it is there."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # a disk without links, such as a USB stick's
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_stale(path: Path, found: Holder | None) -> None:
    """Of two processes that find a stale lock one removes it, and the other finds the first one's new lock."""
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network disks cannot: then two takers in the same millisecond could both go on
            fcntl.flock(directory, fcntl.LOCK_EX)
        if path.is_symlink() or (found is not None and _read(path) == found and not _alive(found, path)):
            path.unlink(missing_ok=True)  # a link is nobody's lock
    finally:
        os.close(directory)


def _renew(path: Path, done: threading.Event) -> None:
    while not done.wait(RENEWAL):
        with suppress(OSError):
            os.utime(path)


def _read(path: Path) -> Holder | None:
    """Who a lock names; None if there is no lock."""
    try:
        found = Holder(**parse_json(read_text(path)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):  # damaged: somebody's, as long as it is renewed
        return UNKNOWN
    kinds = [type(value) for value in found]
    return found if kinds == [type(value) for value in UNKNOWN] and 0 <= found.since < 1e11 else UNKNOWN


def _alive(found: Holder, path: Path) -> bool:
    if found.here:
        return found.boot == _own().boot and _born(found.pid) == found.born
    try:
        return _disk_clock(path.parent) - path.stat().st_mtime < LEASE
    except FileNotFoundError:
        return False


def _disk_clock(folder: Path) -> float:
    """The time by which the disk dates its files, which on a network is not always ours."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as new:
        return os.fstat(new.fileno()).st_mtime
    return time.time()


def _own() -> Holder:
    pid = os.getpid()
    return Holder(socket.gethostname(), _boot(), _namespace(), pid, _born(pid) or 0, time.time())


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _born(pid: int) -> int | None:
    """When a process of this machine started; None if it is gone. Without /proc: 0 if it is there."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return None if state in "ZX" else int(rest[18])
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0
