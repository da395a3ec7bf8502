"""Fetches published archives: goes on after a cut, checks the md5, and says what to do by hand when it cannot.

The file grows as `NAME.part` and gets its name only when it is complete and right. Imports nothing heavy.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import re
import shlex
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from gradshare import __version__
from gradshare.errors import UserError

CHUNK, TIMEOUT, PAUSE = 1 << 16, 60.0, 2.0  # bytes; seconds without an answer; seconds before going on after a cut
Progress = Callable[[int, int], None] | None  # bytes here, bytes in all (0: the server does not say)


class Archive(NamedTuple):
    file: str  # the name it is kept under
    address: str
    md5: str = ""  # "": none is published; then the server's own counts, where it sends one


class Published(NamedTuple):
    title: str
    archives: tuple[Archive, ...]
    by_hand: str  # where a person finds the files


class Fetched(NamedTuple):
    path: Path
    md5: str
    checked: bool  # whether there was an md5 to compare with


_CUB = "https://data.caltech.edu/records/65de6-vp158"
_OMNIGLOT = "https://github.com/brendenlake/omniglot/raw/master/python/images"
_MINI = "https://zenodo.org/records/7978538/files/mini-imagenet-cache"
PUBLISHED = {
    "cub": Published(
        "CUB-200-2011, 11,788 photographs of 200 kinds of bird, 1.2 GB",
        (Archive("CUB_200_2011.tgz", f"{_CUB}/files/CUB_200_2011.tgz", "97eceeb196236b17998738112f37df78"),),
        f"{_CUB} (mirror: https://zenodo.org/records/8000562)",
    ),
    "mini": Published(
        "MiniImagenet, 60,000 photographs of 100 classes, for research without commerce",
        (
            Archive("mini-imagenet-cache-train.pkl", f"{_MINI}-train.pkl"),
            Archive("mini-imagenet-cache-val.pkl", f"{_MINI}-validation.pkl"),
            Archive("mini-imagenet-cache-test.pkl", f"{_MINI}-test.pkl"),
        ),
        "https://zenodo.org/records/7978538 (where -val is called -validation; or import mini-imagenet.tar.gz, md5"
        " b38f1eb4251fb9459ecc8e7febf9b2eb, from https://github.com/renmengye/few-shot-ssl-public)",
    ),
    "omniglot": Published(
        "Omniglot, 1,623 handwritten characters, 20 drawings each",
        (
            Archive("images_background.zip", f"{_OMNIGLOT}_background.zip", "68d2efa1b9178cc56df9314c21c6e718"),
            Archive("images_evaluation.zip", f"{_OMNIGLOT}_evaluation.zip", "6b91aef0f799c5bb55b94e3f2daec811"),
        ),
        "https://github.com/brendenlake/omniglot, folder python",
    ),
}


def import_command(kind: str, folder: Path) -> str:
    """The command that imports what `folder` holds."""
    archives = PUBLISHED[kind].archives
    return shlex.join(
        ["gradshare", "data", "import", kind, str(folder / archives[0].file if len(archives) == 1 else folder)]
    )


def fetch(kind: str, archive: Archive, folder: Path, progress: Progress = None) -> Fetched:
    """Bring one archive of a data set into `folder`; what an earlier try brought is used.

    Args:
        kind: a key of `PUBLISHED`; the advice that goes with every error is about it.
        archive: which of its files.
        folder: where it is kept; made if it is not there.
        progress: called with (bytes here, bytes in all, 0 if unknown).
    """
    target = folder / archive.file
    try:
        if target.exists():
            return _existing(target, archive.md5)
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{archive.file}.part"
        announced = _receive(archive.address, part, progress)
        return _accept(part, target, archive.md5 or announced)
    except UserError as error:
        raise UserError(f"{error}; {_advice(kind, archive, folder)}") from None


def _advice(kind: str, archive: Archive, folder: Path) -> str:
    checksum = f" (md5 {archive.md5})" if archive.md5 else ""
    return (
        f"you can also get {archive.file}{checksum} by hand from {PUBLISHED[kind].by_hand},"
        f" put it into {folder} and run: {import_command(kind, folder)}"
    )


def _existing(target: Path, md5: str) -> Fetched:
    found = _md5(target)
    if md5 and found != md5:
        raise UserError(f"{target} is there already, but its md5 is {found}, not {md5}: delete it and try again")
    return Fetched(target, found, bool(md5))


def _accept(part: Path, target: Path, md5: str) -> Fetched:
    found = _md5(part)
    if md5 and found != md5:
        part.unlink()
        raise UserError(f"what came for {target.name} is not the published file (md5 {found}, not {md5}): removed")
    os.replace(part, target)
    return Fetched(target, found, bool(md5))


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


class _Cut(Exception):
    """The connection ended before the file did."""


def _receive(address: str, part: Path, progress: Progress) -> str:
    """Fill `part`, going on after a cut as long as every try brings more; gives the md5 that the server announced."""
    while True:
        before = _size(part)
        try:
            return _receive_once(address, part, progress)
        except _Cut as cut:
            if _size(part) <= before:
                raise UserError(
                    f"the connection to {address} was cut ({cut}); {_size(part):,} bytes are kept in {part}, and the"
                    " same command goes on from there"
                ) from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"the disk is full: {_size(part):,} bytes are kept in {part}; make room, and the same command goes on"
                " from there"
            ) from None
        time.sleep(PAUSE)


def _receive_once(address: str, part: Path, progress: Progress) -> str:
    asked = _size(part)
    response = _open(address, asked)
    with response:
        announced = _announced_md5(response)
        if response.status == 416 and _range_total(response) == asked:
            return announced  # an earlier try brought all of it
        start = _start(response, asked, part)
        first = _read(response)
        _refuse_page(address, response, b"" if start else first)
        length = int(response.headers.get("Content-Length") or 0)
        _check_space(part.parent, length, address)
        with part.open("ab" if start else "wb") as file:
            _copy(response, first, file, start, length and start + length, progress)
    return announced


def _open(address: str, offset: int) -> Any:
    """The server's answer, 416 (nothing after `offset`) included."""
    headers = {"User-Agent": f"gradshare/{__version__}", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    try:
        return urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and offset:
            return error
        error.close()
        raise UserError(f"{address} answers {error.code} {error.reason}: the address may be dead") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"{address} cannot be reached ({reason})") from None


def _start(response: Any, asked: int, part: Path) -> int:
    """Where in the file the answer begins."""
    if response.status == 200:
        return 0
    if response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {asked}-"):
        return asked
    part.unlink()
    raise UserError(f"the server cannot go on from byte {asked:,}: {part} is removed, run the same command again")


def _refuse_page(address: str, response: Any, first: bytes) -> None:
    opening = first[:512].lstrip().lower()
    if response.headers.get_content_type() == "text/html" or opening.startswith((b"<!doctype", b"<html", b"<head")):
        raise UserError(f"{address} answers with a web page, not with the file")


def _check_space(folder: Path, needed: int, address: str) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"no space: {address} has {needed:,} bytes to come and {folder} has {free:,} free; make room, or choose"
            " another place with --folder"
        )


def _copy(response: Any, first: bytes, file: BinaryIO, done: int, total: int, progress: Progress) -> None:
    chunk = first
    while chunk:
        file.write(chunk)
        done += len(chunk)
        if progress is not None:
            progress(done, total)
        chunk = _read(response)
    if done < total:
        raise _Cut(f"after {done:,} of {total:,} bytes")


def _read(response: Any) -> bytes:
    try:
        return response.read(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _Cut(str(error) or type(error).__name__) from None


def _announced_md5(response: Any) -> str:
    """Zenodo's ETag is `"md5:..."`."""
    found = re.fullmatch(r'"md5:([0-9a-f]{32})"', response.headers.get("ETag", ""))
    return found[1] if found else ""


def _range_total(response: Any) -> int:
    found = re.fullmatch(r"bytes \*/(\d+)", response.headers.get("Content-Range", ""))
    return int(found[1]) if found else -1


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
