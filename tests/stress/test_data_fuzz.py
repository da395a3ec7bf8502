"""32,000 damaged archives, images, pickles and stores: each is read, or is one UserError, and soon."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import signal
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from PIL import Image

from gradshare.data.archive import open_archive
from gradshare.data.sources.pickles import PickledArray, load_pickle
from gradshare.data.sources.pixels import decode
from gradshare.data.store import ClassEntry, Index, read_images, read_index, write_store
from gradshare.errors import UserError

ARCHIVE_CASES, IMAGE_CASES, PICKLE_CASES, STORE_CASES = 2000, 3000, 8000, 3000
"""Of each of the six kinds of damaged archive, two of images, one of pickles and two of stores."""
SECONDS = 10
"""What one case may take; a hang is a failure and not a wait."""
Random = np.random.Generator
Damage = Callable[[bytearray, Random], None]


class Hang(BaseException):
    """Not an Exception, so that nothing takes it for a damaged file."""


def stop(signal_number: int, frame: FrameType | None) -> None:
    raise Hang(f"over {SECONDS} s")


@contextmanager
def outcome(counts: dict[str, int], case: str) -> Iterator[None]:
    """Count a success or a UserError of one line; everything else fails the test and names the case."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
        counts["read"] += 1
    except UserError as error:
        assert str(error) and "\n" not in str(error), f"{case}: {error!r}"
        counts["refused"] += 1
    except BaseException as error:
        pytest.fail(f"{case}: {type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.signal(signal.SIGALRM, before)


def flip(content: bytearray, random: Random) -> None:
    for _ in range(random.integers(1, 9)):
        content[random.integers(len(content))] ^= 1 << random.integers(8)


def cut(content: bytearray, random: Random) -> None:
    del content[random.integers(len(content)) :]


def splice(content: bytearray, random: Random) -> None:
    start, to, length = random.integers(len(content)), random.integers(len(content)), random.integers(1, 200)
    content[to : to + random.choice([0, length])] = content[start : start + length]


def drop(content: bytearray, random: Random) -> None:
    start = random.integers(len(content))
    del content[start : start + random.integers(1, 50)]


def saturate(content: bytearray, random: Random) -> None:
    """Lengths and counts at their limits."""
    start, length = random.integers(len(content)), random.integers(1, 9)
    content[start : start + length] = bytes([random.choice([0xFF, 0, 0x80, 0x7F])]) * length


def renumber(content: bytearray, random: Random) -> None:
    """Digits of text formats."""
    digits = [at for at, byte in enumerate(content) if 48 <= byte <= 57]
    if digits:
        at = random.choice(digits)
        tokens = [
            b"-1",
            b"1e999",
            b"Infinity",
            b"NaN",
            b"null",
            b"[[[]]]",
            b'"x"',
            b"9" * 30,
            b"(" * 300,
            b"[" * 9000,
            b"1L",
        ]
        content[at : at + 1] = tokens[random.integers(len(tokens))]


DAMAGES: list[Damage] = [flip, flip, cut, splice, drop, saturate, renumber]


def damaged(content: bytes, random: Random) -> bytes:
    result = bytearray(content)
    if random.random() < 0.4:  # as little as can be
        result[random.integers(len(result))] ^= 1 << random.integers(8)
        return bytes(result)
    for _ in range(random.integers(1, 4)):
        if result:
            DAMAGES[random.integers(len(DAMAGES))](result, random)
    return bytes(result)


def image(mode: str = "RGB", form: str = "PNG", size: int = 24) -> bytes:
    pixels = np.random.default_rng(1).integers(0, 256, (size, size, 3)).astype(np.uint8)
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    (deep if mode == "I;16" else Image.fromarray(pixels).convert(mode)).save(buffer, form, exif=exif)
    return buffer.getvalue()


FILES = {
    "CUB/images/001.Wren/Wren_1.jpg": image(form="JPEG", size=8),
    "CUB/classes.txt": b"1 001.Wren\n",
    "é" * 60: b"x",
}


def tar(form: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, content in FILES.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()[:-8192]  # less of the padding, so that damage finds something


def zipped(method: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def resealed_tar(content: bytes, random: Random) -> bytes:
    """Damage in the headers under checksums that are right, so that it is met further inside."""
    blocks = bytearray(content)
    for start in range(0, len(blocks) - 511, 512):
        if blocks[start + 257 : start + 262] == b"ustar":
            if random.random() < 0.5:
                at = start + random.choice([0, 99, 124, 124, 130, 135, 156, 156, 345])
                blocks[at] = random.choice([0, 0x80, 0xFF, *b"./7LKxgX125", random.integers(256)])
            total = sum(blocks[start : start + 148]) + 256 + sum(blocks[start + 156 : start + 512])
            blocks[start + 148 : start + 156] = b"%06o\0 " % total
    return bytes(blocks)


def resealed_zip(content: bytes, random: Random) -> bytes:
    """Damage in the table of contents."""
    result = bytearray(content)
    start = result.index(b"PK\1\2")
    for _ in range(random.integers(1, 4)):
        at = random.integers(start, len(result))
        result[at] = random.choice([0, 1, 0x7F, 0x80, 0xFF, random.integers(256)])
    return bytes(result)


def resealed_png(content: bytes, random: Random) -> bytes:
    result, at = bytearray(content), 8
    while at + 12 <= len(result):
        length = int.from_bytes(result[at : at + 4], "big")
        if length and random.random() < 0.4:
            result[at + 8 + random.integers(length)] = random.integers(256)
        result[at + 8 + length : at + 12 + length] = struct.pack(">I", zlib.crc32(result[at + 4 : at + 8 + length]))
        at += 12 + length
    return bytes(result)


TARS = [tar(form) for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]
ZIPS = [zipped(method) for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)]
ARCHIVES: dict[str, Callable[[Random], bytes]] = {
    "tar": lambda random: damaged(TARS[random.integers(2)], random),
    "resealed tar": lambda random: resealed_tar(TARS[random.integers(2)], random),
    "tgz": lambda random: damaged(gzip.compress(TARS[random.integers(2)], 1), random),
    "tgz of a damaged tar": lambda random: gzip.compress(damaged(TARS[random.integers(2)], random), 1),
    "zip": lambda random: damaged(ZIPS[random.integers(2)], random),
    "resealed zip": lambda random: resealed_zip(ZIPS[random.integers(2)], random),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_archives(kind: str, tmp_path: Path) -> None:
    counts = {"read": 0, "refused": 0}
    for case in range(ARCHIVE_CASES):
        path = tmp_path / "archive"
        path.write_bytes(ARCHIVES[kind](np.random.default_rng([1, case])))
        with outcome(counts, f"{kind} {case}"), open_archive(path) as opened:
            members = opened.members()
            assert all(".." not in member.name.split("/") and member.name[0] != "/" for member in members)
            for _ in opened.read([member.name for member in members]):
                pass
            if members:
                opened.open_stream(members[-1].name)
    assert sum(counts.values()) == ARCHIVE_CASES and counts["refused"] > ARCHIVE_CASES // 4
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


MODES = {"JPEG": ["RGB", "L", "CMYK"], "PNG": ["RGB", "RGBA", "LA", "P", "1", "I;16"], "WEBP": ["RGB", "RGBA"]}
IMAGES = [image(mode, form) for form, modes in MODES.items() for mode in modes]


@pytest.mark.parametrize("damage", [damaged, resealed_png])
def test_images(damage: Callable[[bytes, Random], bytes]) -> None:
    counts = {"read": 0, "refused": 0}
    originals = [content for content in IMAGES if damage is damaged or content[1:4] == b"PNG"]
    for case in range(IMAGE_CASES):
        random = np.random.default_rng([2, case])
        content = damage(originals[case % len(originals)], random)
        with outcome(counts, f"image {case}"):
            assert decode(content, "a.jpg", ("crop", "resize")[case % 2], 16).shape == (16, 16, 3)  # type: ignore[arg-type]
    assert sum(counts.values()) == IMAGE_CASES and min(counts.values()) > IMAGE_CASES // 20


PICKLES = [
    pickle.dumps(data, protocol)
    for protocol in range(6)
    for data in (
        {
            "image_data": np.arange(48, dtype=np.uint8).reshape(1, 4, 4, 3),
            "class_dict": {"n01": [0, 1], "é": (2.5, None)},
        },
        [np.arange(3.0), np.array(["a", "bc"]), b"bytes", "text" * 20, 2**40, True, {"a": (1, None)}],
    )
]


def _arrays(content: object) -> None:
    """Make arrays of what was read, as the source of MiniImagenet does."""
    for item in content.values() if isinstance(content, dict) else content if isinstance(content, list) else []:
        if isinstance(item, PickledArray):
            with suppress(ValueError):
                item.array()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a damaged escape sequence in text
def test_pickles() -> None:
    counts = {"read": 0, "refused": 0}
    for case in range(PICKLE_CASES):
        content = damaged(PICKLES[case % len(PICKLES)], np.random.default_rng([3, case]))
        with outcome(counts, f"pickle {case}"):
            _arrays(load_pickle(io.BytesIO(content), "train.pkl").content)
    assert sum(counts.values()) == PICKLE_CASES and min(counts.values()) > PICKLE_CASES // 20


@pytest.mark.parametrize("name", ["index.json", "images.npy"])
def test_stores(name: str, tmp_path: Path) -> None:
    folder, counts = tmp_path / "store", {"read": 0, "refused": 0}
    entries = (ClassEntry("wren", "train", 2), ClassEntry("Käuzchen", "test", 1))
    write_store(folder, Index("birds", (2, 2, 1), entries, "crop", "a"), [np.zeros((2, 2, 1), np.uint8)] * 3)
    original = (folder / name).read_bytes()
    if name == "index.json":
        original = json.dumps(json.loads(original), ensure_ascii=False).encode()
    for case in range(STORE_CASES):
        (folder / name).write_bytes(damaged(original, np.random.default_rng([4, case])))
        with outcome(counts, f"{name} {case}"):
            assert read_images(folder, read_index(folder)).shape == (3, 2, 2, 1)
    assert sum(counts.values()) == STORE_CASES and min(counts.values()) > STORE_CASES // 100
    assert sorted(path.name for path in folder.iterdir()) == ["images.npy", "index.json"]


def test_the_number_of_cases() -> None:
    assert ARCHIVE_CASES * len(ARCHIVES) + 2 * IMAGE_CASES + PICKLE_CASES + 2 * STORE_CASES == 32_000
