"""What stands in a folder or a zip archive, one entry after another, unchecked; tar archives are in tar_stream."""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

MAX_DIRECTORY = 128 << 20
"""The longest table of contents of a zip, in bytes."""
FILE, FOLDER = "a file", "a folder"


class Entry(NamedTuple):
    """One thing in an archive or a folder, as it stands there."""

    name: str
    size: int  # bytes, as claimed
    kind: str  # FILE, FOLDER, or in words what else it is
    open: Callable[[], IO[bytes]]


def folder_entries(path: Path) -> Iterator[Entry]:
    """The entries of a folder and its subfolders, sorted; hidden ones are skipped, links are not followed."""
    for parent, folders, files in os.walk(path, onerror=_fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in [*folders, *sorted(name for name in files if not name.startswith("."))]:
            place = Path(parent, name)
            status = place.lstat()
            yield Entry(
                place.relative_to(path).as_posix(), status.st_size, _kind(status.st_mode), partial(_open, place)
            )


def zip_entries(path: Path, limit: int) -> Iterator[Entry]:
    """The entries in the order of the table of contents; they can be opened until the pass ends.

    Raises zipfile.BadZipFile, OSError, EOFError, ValueError and others for whatever is wrong, and ValueError for
    content of more than `limit` bytes.
    """
    with _Bounded(path.open("rb", buffering=0)) as file, zipfile.ZipFile(file) as archive:
        _check_claims(archive, limit)
        for info in archive.infolist():
            yield Entry(_zip_name(info), info.file_size, _zip_kind(info), partial(archive.open, info))


def _zip_name(info: zipfile.ZipInfo) -> str:
    if info.flag_bits & 0x800:
        return info.orig_filename
    try:  # macOS writes UTF-8 and does not say so
        return info.orig_filename.encode("cp437").decode()
    except UnicodeError:
        return info.orig_filename


def _zip_kind(info: zipfile.ZipInfo) -> str:
    if info.flag_bits & 0x41:
        return "encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # the others unpack without a bound
        return "packed by a method other than deflate"
    return FOLDER if info.is_dir() else _kind(info.external_attr >> 16)


def _check_claims(archive: zipfile.ZipFile, limit: int) -> None:
    """Refuse bombs: more content than the file can honestly hold, or members that share their bytes."""
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    if sum(info.file_size for info in infos) > limit:
        name = max(infos, key=lambda info: info.file_size).filename
        raise ValueError(f"it claims to unpack to over {limit:,} bytes, far more than its own size, most in {name!r}")
    ends = [*(info.header_offset for info in infos[1:]), archive.start_dir]
    for info, end in zip(infos, ends, strict=False):
        if info.header_offset + 30 + info.compress_size > end:
            raise ValueError(f"member {info.filename!r} overlaps with another")


class _Bounded(io.BufferedReader):
    """A file from which nothing long is read at once: zipfile reads as much as a header claims."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size and size > MAX_DIRECTORY:
            raise ValueError(f"its table of contents claims {size:,} bytes")
        return super().read(size)


def _kind(mode: int) -> str:
    kinds = {0: FILE, stat.S_IFREG: FILE, stat.S_IFDIR: FOLDER, stat.S_IFLNK: "a symbolic link"}
    return kinds.get(stat.S_IFMT(mode), "a device, pipe or socket")


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")


def _fail(error: OSError) -> None:
    raise error
