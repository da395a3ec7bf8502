"""Where images come from: a folder, a zip or a tar archive, read as a stream; nothing is ever extracted.

    with open_source(path) as source:
        wanted = [member.name for member in source.members() if member.name.endswith(".jpg")]
        for name, content in source.read(wanted):
            print(name, len(content))

Whatever is wrong with an archive, hostile or broken, is one UserError that names it.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import shutil
import struct
import tempfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

from gradshare.data.entries import FILE, FOLDER, Entry, folder_entries, zip_entries
from gradshare.data.tar_stream import CHUNK, MAGIC, is_tar, tar_entries
from gradshare.errors import UserError

MAX_MEMBER = 64 << 20
"""The longest member that `read` holds in memory, in bytes."""
MAX_STREAM = 8 << 30
"""The longest member of all, in bytes."""
MAX_MEMBERS = 1_000_000
MAX_NAME = 1024
MAX_RATIO, MAX_SMALL = 250, 256 << 20
"""An archive may unpack to MAX_RATIO times its size, or to MAX_SMALL bytes; a bomb of zeros has a ratio of 1000."""
IN_MEMORY = 64 << 20
"""The longest copy that `open_stream` keeps in memory and not in a temporary file."""

JUNK = re.compile(r"(^|/)(__MACOSX/|\.DS_Store$|\._[^/]*$|Thumbs\.db$|desktop\.ini$|Icon\r$)")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
BROKEN = (
    *(OSError, EOFError, ValueError, RuntimeError, ArithmeticError, LookupError, MemoryError),
    *(zlib.error, lzma.LZMAError, zipfile.BadZipFile, struct.error),
)


class Member(NamedTuple):
    """A file in a source."""

    name: str  # relative, parted by "/", NFC
    size: int  # bytes


class Source:
    """An open archive or folder; a context manager."""

    def __init__(self, path: Path, entries: Callable[[], Iterator[Entry]]) -> None:
        self.path, self.name = path, path.name or str(path)
        self._entries = entries  # one pass over everything in stored order, unchecked
        self._resources = ExitStack()
        self._members: dict[str, Member] = {}
        self._near = ""  # the last member met, for messages

    def members(self) -> list[Member]:
        """The files in stored order; the whole source is checked at the first call."""
        if not self._members:
            found: dict[str, Member] = {}
            with self._border():
                for member, _ in self._files():
                    if member.name in found:
                        raise self._refusal(member.name, "is there twice")
                    found[member.name] = member
            self._members = found
        return list(self._members.values())

    def read(
        self, wanted: Collection[str], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[str, bytes]]:
        """The names and contents of the wanted members, in one pass, in stored order.

        progress: called after each member with the number of members done and their total.
        """
        left = {member.name for member in self._known(wanted, MAX_MEMBER)}
        for done, content in enumerate(self._contents(set(left)), start=1):
            yield content
            if progress:
                progress(done, len(left))

    def open_stream(self, name: str) -> IO[bytes]:
        """One big member as a file that can seek, closed with the source: a folder's own, or a temporary copy."""
        (member,) = self._known([name], MAX_STREAM)
        with self._border(), ExitStack() as undo:
            stream = undo.enter_context(self._opened(member))
            if not self.path.is_dir():
                archived, stream = stream, undo.enter_context(tempfile.SpooledTemporaryFile(IN_MEMORY))
                shutil.copyfileobj(archived, stream, CHUNK)
                self._check_size(member, stream.tell())
                stream.seek(0)
            self._resources.push(undo.pop_all())
            return stream

    def sha256(self) -> str:
        """The checksum of the archive file; of a folder, of the sorted lines `<name> <size>`."""
        if self.path.is_dir():
            lines = sorted(f"{name} {size}\n" for name, size in self.members())
            return hashlib.sha256("".join(lines).encode()).hexdigest()
        with self._border(), self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _known(self, wanted: Collection[str], limit: int) -> list[Member]:
        self.members()
        for name in wanted:
            if name not in self._members:
                raise self._refusal(name, "is not there")
            if self._members[name].size > limit:
                raise self._refusal(name, f"has {self._members[name].size:,} bytes; at most {limit:,} are read")
        return [self._members[name] for name in wanted]

    def _contents(self, left: set[str]) -> Iterator[tuple[str, bytes]]:
        with self._border():
            for member, opener in self._files():
                if member.name in left and member == self._members[member.name]:
                    left.remove(member.name)
                    with opener() as stream:
                        content = stream.read(member.size + 1)
                    self._check_size(member, len(content))
                    yield member.name, content
                if not left:
                    return
            raise self._refusal(min(left), "is not there any more")

    @contextmanager
    def _opened(self, member: Member) -> Iterator[IO[bytes]]:
        for found, opener in self._files():
            if found == member:
                with opener() as stream:
                    yield stream
                return
        raise self._refusal(member.name, "is not there any more")

    def _check_size(self, member: Member, size: int) -> None:
        if size != member.size:
            raise self._refusal(member.name, f"does not have the {member.size:,} bytes that it claims")

    def _files(self) -> Iterator[tuple[Member, Callable[[], IO[bytes]]]]:
        """One pass over the files; everything that is hostile is refused here."""
        self._near = ""
        for count, entry in enumerate(self._entries(), start=1):
            self._near = entry.name
            if count > MAX_MEMBERS:
                raise UserError(f"{self.name} has over {MAX_MEMBERS:,} members")
            if entry.kind not in (FILE, FOLDER):
                raise self._refusal(entry.name, f"is {entry.kind}; only files and folders are read")
            junk = JUNK.search(entry.name)
            name = self._clean(entry.name.removesuffix("\r") if junk else entry.name)  # macOS has files "Icon\r"
            if entry.kind == FOLDER or junk:
                continue
            if not 0 <= entry.size <= MAX_STREAM:
                raise self._refusal(entry.name, f"claims {entry.size:,} bytes; at most {MAX_STREAM:,} are read")
            yield Member(name, entry.size), entry.open

    def _clean(self, name: str) -> str:
        """The name as a relative path without detours; a name that leads outside is refused."""
        if CONTROL.search(name) or not 0 < len(name) <= MAX_NAME:
            raise self._refusal(name, f"has a name that is not text of 1 to {MAX_NAME} characters")
        slashed = unicodedata.normalize("NFC", name.replace("\\", "/"))
        parts = [part for part in slashed.split("/") if part not in ("", ".")]
        if slashed.startswith("/") or ".." in parts or re.match("[A-Za-z]:", slashed):
            raise self._refusal(name, "has a name that leads outside the archive")
        return "/".join(parts)

    def _refusal(self, member: str, reason: str) -> UserError:
        return UserError(f"{self.name}: member {_shown(member)} {reason}")

    @contextmanager
    def _border(self) -> Iterator[None]:
        """Everything that can go wrong inside is one UserError outside."""
        try:
            yield
        except UserError:
            raise
        except BROKEN as error:
            near = f" at or after member {_shown(self._near)}" if self._near else ""
            if isinstance(error, OSError) and error.strerror:
                raise UserError(f"{self.name} cannot be read{near}: {error.strerror}") from None
            reason = str(error) or type(error).__name__
            raise UserError(f"{self.name} is damaged or cut short{near}: {reason}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()


def open_source(path: Path) -> Source:
    """Open a folder, a zip, or a tar that is plain or packed by gzip, bzip2 or xz, by what its first bytes say."""
    try:
        if path.is_dir():
            return Source(path, partial(folder_entries, path))
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is neither a file nor a folder")
        with path.open("rb") as file:
            head = file.read(512)
            limit = max(MAX_SMALL, MAX_RATIO * file.seek(0, os.SEEK_END))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        return Source(path, partial(zip_entries, path, limit))
    if head.startswith(tuple(MAGIC)) or is_tar(head):
        return Source(path, partial(tar_entries, path, limit))
    page = " but a web page" if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")) else ""
    raise UserError(f"{path.name} is not a folder, a zip or a tar archive{page}")


def _shown(name: str) -> str:
    return repr(name) if len(name) <= 200 else repr(name[:200]) + "..."
