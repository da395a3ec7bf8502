"""Small disks of our own, seen by this process and its children alone, and a user without rights."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

CLONE_NEWNS, MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 0x20000, 1, 32, 0x4000, 0x40000
NOBODY = 65534


class NotAllowed(Exception):
    """The system lets us mount nothing."""


class Mounts:
    """A place at which small tmpfs disks are mounted, one after the other, within the block."""

    def __init__(self, place: Path) -> None:
        self.place, self._mounted = place, False

    def __enter__(self) -> Self:
        self.place.mkdir(exist_ok=True)
        if os.geteuid() != 0:
            raise NotAllowed("needs root")
        self._library = ctypes.CDLL(None, use_errno=True)
        self._call("unshare", CLONE_NEWNS)
        self._call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)  # nobody else sees what we mount
        return self

    def __exit__(self, *_: object) -> None:
        if self._mounted:
            self.unmount()

    def mount(self, options: str) -> None:
        self._call("mount", b"chaos", bytes(self.place), b"tmpfs", 0, options.encode())
        self._mounted = True

    def remount(self, options: str) -> None:
        """With other options: a size, `ro` or `rw`."""
        size = options if options.startswith("size") else "size=64m"
        self._call(
            "mount",
            b"chaos",
            bytes(self.place),
            b"tmpfs",
            MS_REMOUNT | (MS_RDONLY if options == "ro" else 0),
            size.encode(),
        )

    def unmount(self) -> None:
        self._call("umount", bytes(self.place))
        self._mounted = False

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._library, name)(*arguments) != 0:
            error = ctypes.get_errno()
            raise NotAllowed(f"{name}: {os.strerror(error)}")


@contextmanager
def as_nobody(place: Path, *readable: Path) -> Iterator[Callable[[], None]]:
    """Within the block nobody may write at `place`; gives what a child calls to be subject to that."""
    for folder in readable:
        folder.chmod(0o755)
    folders = [place, *(path for path in place.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        yield lambda: os.setuid(NOBODY) if os.geteuid() == 0 else None
    finally:
        for folder in folders:
            folder.chmod(0o755)
