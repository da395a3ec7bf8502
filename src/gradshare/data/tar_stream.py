"""A tar archive, plain or compressed, as a stream of entries; strict, in constant memory, and nothing is extracted.

The standard `tarfile` ends silently at a damaged header, keeps every header, believes the lengths that extended headers
claim and parses them in quadratic time; and its extraction filter has holes. Reading takes a page.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, cast

from gradshare.data.entries import FILE, FOLDER, Entry

CHUNK = 1 << 20
BLOCK = 512
MAX_EXTENDED = 1 << 20
"""The longest extended header (a long name, or pax attributes), in bytes."""
MAX_XZ_MEMORY = 256 << 20
"""What an xz archive may ask for; `xz -9` needs 65 MiB."""
MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz"}

KINDS = {
    **{b"0": FILE, b"\0": FILE, b"7": FILE, b"5": FOLDER, b"1": "a hard link", b"2": "a symbolic link"},
    **{b"3": "a device", b"4": "a device", b"6": "a pipe", b"S": "a sparse file"},
}
LONG_NAME, LONG_LINK, PAX, PAX_SOLARIS, PAX_GLOBAL = b"L", b"K", b"x", b"X", b"g"


class Pipe:
    """Chunks of bytes, taken in any lengths."""

    def __init__(self, chunks: Iterator[bytes], limit: int) -> None:
        self._chunks, self._limit, self._total = chunks, limit, 0
        self._buffer, self._at = b"", 0

    def read(self, count: int) -> bytes:
        """At most `count` bytes; none at the end only."""
        while self._at == len(self._buffer):
            chunk = next(self._chunks, None)
            if chunk is None:
                return b""
            self._buffer, self._at, self._total = chunk, 0, self._total + len(chunk)
            if self._total > self._limit:
                raise ValueError(f"it unpacks to over {self._limit:,} bytes, far more than its own size")
        piece = self._buffer[self._at : self._at + count]
        self._at += len(piece)
        return piece

    def take(self, count: int) -> bytes:
        """Exactly `count` bytes."""
        pieces = []
        while count:
            pieces.append(self.read(count))
            if not pieces[-1]:
                raise EOFError("it ends too early")
            count -= len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def skip(self, count: int) -> None:
        while count:
            count -= len(self.take(min(count, CHUNK)))


class Window(io.RawIOBase):
    """The content of the entry that a pipe stands at."""

    def __init__(self, pipe: Pipe, size: int) -> None:
        self._pipe, self.left = pipe, size

    def readable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        count = self.left if count < 0 else min(count, self.left)
        self.left -= count
        return self._pipe.take(count) if count else b""


def tar_entries(path: Path, limit: int) -> Iterator[Entry]:
    """The entries in order; an entry can be opened until the next one is asked for.

    Raises EOFError, OSError, ValueError or lzma.LZMAError for whatever is wrong, also for a missing end mark, and for
    content of more than `limit` bytes. The file is read to its end, so that its checksum is checked.
    """
    with path.open("rb") as file:
        pipe = Pipe(_chunks(file), limit)
        extended: dict[str, bytes] = {}
        while (header := pipe.take(BLOCK)).strip(b"\0"):
            _check_sum(header)
            kind, size = header[156:157], _number(header[124:136])
            if kind in (LONG_NAME, LONG_LINK, PAX, PAX_SOLARIS, PAX_GLOBAL):
                extended |= _extended(kind, _padded(pipe, size))
                continue
            yield from _entry(pipe, header, extended)
            extended = {}
        while pipe.read(CHUNK):
            pass


def _entry(pipe: Pipe, header: bytes, extended: dict[str, bytes]) -> Iterator[Entry]:
    name = _text(extended.get("path", _short_name(header)))
    kind = KINDS.get(header[156:157], "of an unknown kind")
    if any(key.startswith("GNU.sparse") for key in extended):
        kind = KINDS[b"S"]
    elif header[156:157] == b"\0" and name.endswith("/"):
        kind = FOLDER
    claimed = int(extended["size"]) if "size" in extended else _number(header[124:136])
    if claimed < 0:
        raise ValueError("a header gives a negative size")
    size = claimed if kind == FILE else 0
    window = Window(pipe, size)
    yield Entry(name, size, kind, lambda: cast(IO[bytes], window))
    pipe.skip(window.left + -size % BLOCK)


def _short_name(header: bytes) -> bytes:
    name, prefix = header[:100].split(b"\0")[0], header[345:500].split(b"\0")[0]
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def is_tar(head: bytes) -> bool:
    """Whether a file that begins like this is a plain tar archive."""
    try:
        _check_sum(head[:BLOCK])
    except ValueError:
        return False
    return len(head) >= BLOCK


def _check_sum(header: bytes) -> None:
    blanked = header[:148] + b" " * 8 + header[156:]
    unsigned = sum(blanked)
    signed = unsigned - 256 * sum(byte > 127 for byte in blanked)  # as some old programs sum
    if _number(header[148:156]) not in (unsigned, signed):
        raise ValueError("a header is damaged")


def _number(field: bytes) -> int:
    if field[:1] >= b"\x80":  # base 256, for sizes over 8 GiB; the bit below is the sign
        return -1 if field[0] & 0x40 else int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    digits = field.strip(b" \0")
    if digits.strip(b"01234567"):
        raise ValueError("a header is damaged")
    return int(digits or b"0", 8)


def _padded(pipe: Pipe, size: int) -> bytes:
    if not 0 <= size <= MAX_EXTENDED:
        raise ValueError(f"an extended header claims {size:,} bytes")
    return pipe.take(size + -size % BLOCK)[:size]


def _extended(kind: bytes, content: bytes) -> dict[str, bytes]:
    if kind == LONG_NAME:
        return {"path": content.split(b"\0")[0]}
    return dict(_records(content)) if kind in (PAX, PAX_SOLARIS) else {}


def _records(content: bytes) -> Iterator[tuple[str, bytes]]:
    """The records `<length> <key>=<value>\\n` of a pax header."""
    at = 0
    while at < len(content):
        space = content.find(b" ", at, at + 8)
        length = int(content[at:space]) if space > at and content[at:space].isdigit() else 0
        key, equals, value = content[space + 1 : at + length - 1].partition(b"=")
        if not equals or content[at + length - 1 : at + length] != b"\n":
            raise ValueError("an extended header is damaged")
        yield _text(key), value
        at += length


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name.decode("latin-1")  # archives from before UTF-8


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """The content of a file, decompressed by what its first bytes say, in pieces of at most CHUNK."""
    head = file.read(8)
    file.seek(0)
    form = next((form for magic, form in MAGIC.items() if head.startswith(magic)), "")
    if form == "xz":
        return _unxz(file)
    stream = gzip.GzipFile(fileobj=file) if form == "gzip" else bz2.BZ2File(file) if form == "bzip2" else file
    return iter(lambda: stream.read(CHUNK), b"")


def _unxz(file: BinaryIO) -> Iterator[bytes]:
    """As lzma.LZMAFile, with a limit on the dictionary that an archive may ask for."""
    data = file.read(CHUNK)
    while data:
        decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_XZ_MEMORY)
        while not decoder.eof:
            if decoder.needs_input and not data:
                data = file.read(CHUNK)
                if not data:
                    raise EOFError("it ends too early")
            if content := decoder.decompress(data, CHUNK):
                yield content
            data = b""
        data = (decoder.unused_data or file.read(CHUNK)).lstrip(b"\0")
