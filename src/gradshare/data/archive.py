"""Archives: the files of a folder, a zip or a tar, read as a stream. Nothing is ever extracted.

    with open_archive(path) as archive:
        wanted = [member.name for member in archive.members() if member.name.endswith(".jpg")]
        for name, content in archive.read(wanted):
            print(name, len(content))

Every problem with an archive, hostile or broken, is one UserError that names it.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import math
import os
import re
import shutil
import stat
import tarfile
import tempfile
import unicodedata
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, cast

from gradshare.errors import UserError, short_repr
from gradshare.files import reading

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".npz")
SINGLE = (".pkl", ".hdf5")  # a file with one of these suffixes counts as an archive of one file
DECOMPRESSORS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}  # by the first bytes of a file

CHUNK = 1 << 20
BLOCK = 512  # bytes of a header of a tar
MAX_MEMBER = 64 << 20  # bytes of a member that `read` holds in memory
MAX_NAME = 1024
MAX_HEADER = 1 << 20  # bytes of an extended header of a tar
MAX_RATIO, MAX_SMALL = 250, 256 << 20
"""An archive may unpack to MAX_RATIO times its size, or to MAX_SMALL bytes. Zeros have a ratio of 1000."""
IN_MEMORY = 64 << 20  # bytes of a copy that `open_stream` holds in memory; a longer one is a temporary file

JUNK = re.compile(r"(^|/)(__MACOSX/|\.DS_Store$|\._[^/]*$|Thumbs\.db$|desktop\.ini$|Icon\r$)")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
FILE, FOLDER, LINK, SPECIAL = "a file", "a folder", "a link", "a device, a pipe or the like"


class Member(NamedTuple):
    """A file in an archive."""

    name: str  # relative, with "/" between its parts, in Unicode's NFC form
    size: int  # bytes


class Entry(NamedTuple):
    """Anything in an archive, not yet checked."""

    name: str
    size: int  # bytes, as the archive claims
    kind: str  # FILE, FOLDER, or else
    open: Callable[[], IO[bytes]]  # valid until the next entry is asked for


class Archive:
    """An open archive or folder; a context manager. `open_archive` makes one."""

    def __init__(self, path: Path, entries: Callable[[], Iterator[Entry]], limit: float = math.inf) -> None:
        self.path, self.name = path, path.name or str(path)
        self._entries, self._limit = entries, limit  # one pass over all entries; bytes that they may claim together
        self._resources = ExitStack()
        self._near = ""  # the last entry met, for messages

    def members(self) -> list[Member]:
        """The files in stored order. The first call checks the whole archive."""
        return list(self._by_name.values())

    @cached_property
    def _by_name(self) -> dict[str, Member]:
        found: dict[str, Member] = {}
        with self._errors():
            for member, _ in self._files():
                if member.name in found:
                    raise self._error(member.name, "is there twice")
                found[member.name] = member
        return found

    def read(self, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Names and contents of the wanted members, in one pass, in stored order."""
        left = {self._known(name) for name in wanted}
        for member in left:
            if member.size > MAX_MEMBER:
                raise self._error(member.name, f"has {member.size:,} bytes, over {MAX_MEMBER:,}")
        with self._errors():
            for member, open_member in self._files():
                if member in left:
                    left.remove(member)
                    with open_member() as stream:
                        content = stream.read(member.size + 1)
                    self._check_size(member, len(content))
                    yield member.name, content
                if not left:
                    return
            raise self._error(min(left).name, "is no longer there")

    def open_stream(self, name: str) -> IO[bytes]:
        """One long member as a file that can seek; it is closed with the archive."""
        member = self._known(name)
        with self._errors():
            for found, open_member in self._files():
                if found == member:
                    return self._seekable(member, self._resources.enter_context(open_member()))
            raise self._error(name, "is no longer there")

    def _seekable(self, member: Member, stream: IO[bytes]) -> IO[bytes]:
        if self._limit == math.inf:  # a file on the disk, not in an archive
            return stream
        copy: IO[bytes] = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115 - the archive closes it
        self._resources.enter_context(copy)
        shutil.copyfileobj(stream, copy, CHUNK)
        self._check_size(member, copy.tell())
        copy.seek(0)
        return copy

    def sha256(self) -> str:
        """Checksum of the archive file; of a folder, checksum of its sorted names and sizes."""
        if self.path.is_dir():
            lines = sorted(f"{name} {size}\n" for name, size in self.members())
            return hashlib.sha256("".join(lines).encode()).hexdigest()
        with self._errors(), self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _known(self, name: str) -> Member:
        if name not in self._by_name:
            raise self._error(name, "is not there")
        return self._by_name[name]

    def _check_size(self, member: Member, size: int) -> None:
        if size != member.size:
            raise self._error(member.name, f"does not have the {member.size:,} bytes that the archive claims")

    def _files(self) -> Iterator[tuple[Member, Callable[[], IO[bytes]]]]:
        """One pass over the files. All checks for hostile archives are here."""
        self._near, claimed = "", 0
        for entry in self._entries():
            self._near = entry.name
            if entry.kind not in (FILE, FOLDER):
                raise self._error(entry.name, f"is {entry.kind}, and only files and folders are read")
            claimed += max(entry.size, 0) + BLOCK
            if entry.size < 0 or claimed > self._limit:
                raise self._error(entry.name, f"claims {entry.size:,} bytes: far more than the archive can hold")
            junk = JUNK.search(entry.name)
            name = self._clean(entry.name.removesuffix("\r") if junk else entry.name)  # macOS has files "Icon\r"
            if entry.kind == FILE and not junk:
                yield Member(name, entry.size), entry.open

    def _clean(self, name: str) -> str:
        """The name as a relative path that stays inside the archive."""
        if CONTROL.search(name) or not 0 < len(name) <= MAX_NAME:
            raise self._error(name, f"has a name that is not text of 1 to {MAX_NAME} characters")
        slashed = unicodedata.normalize("NFC", name.replace("\\", "/"))
        parts = [part for part in slashed.split("/") if part not in ("", ".")]
        if slashed.startswith("/") or ".." in parts or re.match("[A-Za-z]:", slashed):
            raise self._error(name, "has a name that leads outside the archive")
        return "/".join(parts)

    def _error(self, member: str, problem: str) -> UserError:
        return UserError(f"{self.name}: member {short_repr(member, 200)} {problem}")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # zipfile, tarfile and the decompressors raise many kinds for damaged files
            near = f" at or after member {short_repr(self._near, 200)}" if self._near else ""
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise UserError(f"{self.name} cannot be read, or is damaged or cut short{near}: {reason}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()


def open_archive(path: Path) -> Archive:
    """Open a folder, a zip, or a tar that is plain or compressed by gzip, bzip2 or xz."""
    if path.is_dir():
        return Archive(path, partial(_folder_entries, path))
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is neither a file nor a folder")
    with reading(f"{path} cannot be read"), path.open("rb") as file:
        head = file.read(BLOCK)
        size = file.seek(0, os.SEEK_END)
    if path.suffix in SINGLE:
        return Archive(path, lambda: iter([Entry(path.name, size, FILE, lambda: path.open("rb"))]))
    limit = max(MAX_SMALL, MAX_RATIO * size)
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        return Archive(path, partial(_zip_entries, path), limit)
    if head.startswith(tuple(DECOMPRESSORS)) or _is_tar_header(head):
        return Archive(path, partial(_tar_entries, path), limit)
    page = ": it is a web page" if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")) else ""
    raise UserError(f"{path.name} is not a folder, a zip or a tar archive{page}")


def _folder_entries(path: Path) -> Iterator[Entry]:
    """The entries of a folder and its subfolders, sorted. Hidden ones are skipped, links are not followed."""
    for parent, folders, files in os.walk(path, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in [*folders, *sorted(name for name in files if not name.startswith("."))]:
            place = Path(parent, name)
            status = place.lstat()
            opener = cast(Callable[[], IO[bytes]], partial(place.open, "rb"))
            yield Entry(place.relative_to(path).as_posix(), status.st_size, _kind(status.st_mode), opener)


def _raise(error: OSError) -> None:
    raise error


def _kind(mode: int) -> str:
    kinds = {0: FILE, stat.S_IFREG: FILE, stat.S_IFDIR: FOLDER, stat.S_IFLNK: LINK}
    return kinds.get(stat.S_IFMT(mode), SPECIAL)


def _zip_entries(path: Path) -> Iterator[Entry]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            kind = FOLDER if info.is_dir() else _kind(info.external_attr >> 16)
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                kind = "packed by a method other than deflate"  # zipfile unpacks those without a bound on memory
            yield Entry(_zip_name(info), info.file_size, kind, partial(archive.open, info))


def _zip_name(info: zipfile.ZipInfo) -> str:
    if info.flag_bits & 0x800:
        return info.orig_filename
    try:  # macOS writes UTF-8 without the flag that says so
        return info.orig_filename.encode("cp437").decode()
    except UnicodeError:
        return info.orig_filename


class _Header(tarfile.TarInfo):
    """A header of a tar. tarfile itself takes a damaged one for the end, and reads extended ones of any length."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf and not any(buf):  # zeros: the end mark
                raise
            raise ValueError(str(error)) from None
        if header.type in (b"L", b"K", b"x", b"X", b"g") and not 0 <= header.size <= MAX_HEADER:
            raise ValueError(f"an extended header claims {header.size:,} bytes")
        return header


def _tar_entries(path: Path) -> Iterator[Entry]:
    with _decompressed(path) as stream, tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as tar:
        while (info := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # tarfile keeps every header
            yield Entry(
                info.name, info.size, _tar_kind(info), cast(Callable[[], IO[bytes]], partial(tar.extractfile, info))
            )
        stream.read(CHUNK)  # the padding: gzip and xz compare their checksum at the end


def _decompressed(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        head = file.read(6)
    opener: Any = next((opener for magic, opener in DECOMPRESSORS.items() if head.startswith(magic)), open)
    return cast(IO[bytes], opener(path, "rb"))


def _tar_kind(info: tarfile.TarInfo) -> str:
    if info.isdir():
        return FOLDER
    if info.isreg() and not info.issparse():
        return FILE
    return LINK if info.issym() or info.islnk() else SPECIAL


def _is_tar_header(head: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True
