"""Downloads of published archives by pooch: a file gets its name only when it is complete and its md5 is right."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gradshare import __version__
from gradshare.data.sources import SOURCES, File
from gradshare.errors import UserError

TIMEOUT = 60.0  # seconds without an answer
Progress = Callable[[int, int], None]  # bytes done, bytes in all (0: the server does not say)


class Fetched(NamedTuple):
    """A downloaded file."""

    path: Path
    md5: str
    checked: bool  # whether there was an md5 to compare with


def import_command(kind: str, folder: Path) -> str:
    """The command that imports the downloads in `folder`."""
    files = SOURCES[kind].files
    path = folder / files[0].name if len(files) == 1 else folder
    return shlex.join(["gradshare", "data", "import", kind, str(path)])


def fetch(kind: str, file: File, folder: Path, progress: Progress) -> Fetched:
    """Download a file of a source into `folder`, unless it is there already with the right md5.

    Args:
        kind: a key of `SOURCES`; every error says how to get its files by hand.
        progress: called with (bytes done, bytes in all, 0 if unknown).
    """
    try:
        known = _receive(file, folder, progress)
    except UserError as error:
        checksum = f" (md5 {file.md5})" if file.md5 else ""
        raise UserError(
            f"{error}; you can also get {file.name}{checksum} by hand from {SOURCES[kind].page},"
            f" put it into {folder} and run: {import_command(kind, folder)}"
        ) from None
    with (folder / file.name).open("rb") as content:
        md5 = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    return Fetched(folder / file.name, md5, bool(known))


def _receive(file: File, folder: Path, progress: Progress) -> str:
    """Bring the file into the folder; returns the md5 that it was compared with, or ""."""
    import pooch  # type: ignore[import-untyped]  # imported here: reading stores needs no pooch
    import requests

    pooch.get_logger().setLevel("WARNING")
    headers = {"User-Agent": f"gradshare/{__version__}", "Accept-Encoding": "identity"}
    downloader = pooch.HTTPDownloader(progressbar=_Bar(progress), chunk_size=1 << 16, headers=headers, timeout=TIMEOUT)
    try:
        md5 = file.md5 or _announced_md5(file.address, headers)
        pooch.retrieve(file.address, f"md5:{md5}" if md5 else None, file.name, folder, downloader=downloader)
    except requests.RequestException as error:
        hint = "the address may be out of date" if isinstance(error, requests.HTTPError) else "are you online?"
        raise UserError(f"{file.address} cannot be downloaded; {hint} ({error})") from None
    except OSError as error:
        raise UserError(f"{file.name} cannot be written to {folder}: {error.strerror or error}") from None
    except UserError:
        raise
    except ValueError:
        raise UserError(f"what {file.address} sent is not the published file: its md5 is not {md5}") from None
    return md5


def _announced_md5(address: str, headers: dict[str, str]) -> str:
    """The md5 that the server announces (Zenodo's ETag is `"md5:..."`), or ""."""
    import requests

    answer = requests.head(address, headers=headers, timeout=TIMEOUT, allow_redirects=True)
    answer.raise_for_status()
    if answer.headers.get("Content-Type", "").startswith("text/html"):
        raise UserError(f"{address} answers with a web page, not with the file")
    found = re.fullmatch(r'"md5:([0-9a-f]{32})"', answer.headers.get("ETag", ""))
    return found[1] if found else ""


class _Bar:
    """The interface that pooch expects of a progress bar."""

    def __init__(self, report: Progress) -> None:
        self._report, self._done, self.total = report, 0, 0

    def update(self, count: int) -> None:
        self._done += count
        self._report(min(self._done, self.total or self._done), self.total)

    def reset(self) -> None:
        self._done = 0

    def close(self) -> Any: ...
