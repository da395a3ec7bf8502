"""Archives and folders as streams: every form gives the same files, and hostile or broken ones raise one error."""

from __future__ import annotations

import gzip
import io
import os
import stat
import struct
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradshare.data import archive as archives
from gradshare.data.archive import Member, open_archive
from gradshare.errors import UserError

FILES = {"birds/wren/a.jpg": b"first" * 300, "birds/wren/b.jpg": b"", "birds/übung/ć.jpg": b"third", "x" * 150: b"long"}


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reading writes nothing anywhere near: not beside the archive, not here, and no temporary file stays."""
    temporary, here = tmp_path / "temporary", tmp_path / "here"
    temporary.mkdir()
    here.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(here)
    yield
    assert not list(temporary.iterdir()) and not list(here.iterdir())
    assert {path.name for path in tmp_path.iterdir()} <= {"temporary", "here", "in"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def read_all(path: Path) -> dict[str, bytes]:
    with open_archive(path) as opened:
        return dict(opened.read([member.name for member in opened.members()]))


def refused(path: Path, *parts: str) -> None:
    """Reading everything gives one UserError of one line that names the archive."""
    with pytest.raises(UserError) as caught:
        read_all(path)
    message = str(caught.value)
    assert path.name in message and "\n" not in message
    for part in parts:
        assert part in message, message


def write_tar(path: Path, mode: str = "w", form: int = tarfile.GNU_FORMAT, files: dict[str, bytes] = FILES) -> Path:
    with tarfile.open(path, mode, format=form) as archive:  # type: ignore[call-overload]
        archive.addfile(member("birds", kind=tarfile.DIRTYPE))
        for name, content in files.items():
            archive.addfile(member(name, len(content)), io.BytesIO(content))
    return path


def member(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, link
    return info


def write_zip(path: Path, files: dict[str, bytes] = FILES, method: int = zipfile.ZIP_DEFLATED) -> Path:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", method) as archive:
        warnings.simplefilter("ignore")  # duplicate names
        archive.writestr("birds/", b"")
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def write_folder(path: Path) -> Path:
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "gnu.tar": write_tar,
    "pax.tar": lambda path: write_tar(path, form=tarfile.PAX_FORMAT),
    "ustar.tar": lambda path: write_tar(
        path, form=tarfile.USTAR_FORMAT, files={k: v for k, v in FILES.items() if len(k) < 99}
    ),
    "a.tgz": lambda path: write_tar(path, "w:gz"),
    "a.tar.bz2": lambda path: write_tar(path, "w:bz2"),
    "a.tar.xz": lambda path: write_tar(path, "w:xz"),
    "deflated.zip": write_zip,
    "stored.zip": lambda path: write_zip(path, method=zipfile.ZIP_STORED),
    "folder": write_folder,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_source_gives_the_same_files(place: Path, name: str) -> None:
    path = WRITERS[name](place / name)
    expected = {key: value for key, value in FILES.items() if name != "ustar.tar" or len(key) < 99}
    with open_archive(path) as opened:
        members = opened.members()
        assert {member.name: member.size for member in members} == {key: len(value) for key, value in expected.items()}
        assert dict(opened.read(expected)) == expected
        assert list(dict(opened.read(list(expected)[:2]))) == list(expected)[:2]
        with opened.open_stream("birds/wren/a.jpg") as stream:
            assert stream.seek(0, 2) == 1500 and stream.seek(5) == 5 and stream.read(5) == b"first"
        assert len(opened.sha256()) == 64
        with pytest.raises(UserError, match="'nobody' is not there"):
            list(opened.read(["nobody"]))
    if name != "folder":
        assert [member.name for member in members] == list(expected)  # as stored


def test_a_long_member_is_copied_to_a_file_that_goes_with_the_source(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "IN_MEMORY", 100)
    with open_archive(write_zip(place / "a.zip")) as opened:
        stream = opened.open_stream("birds/wren/a.jpg")
        assert stream.read() == FILES["birds/wren/a.jpg"]
    assert stream.closed


def test_a_file_that_is_no_archive_is_read_where_it_is(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickles of MiniImagenet have 800 MB."""
    (place / "a.pkl").write_bytes(b"content")
    monkeypatch.setattr(archives.shutil, "copyfileobj", lambda *_: pytest.fail("it was copied"))
    with open_archive(place / "a.pkl") as opened, opened.open_stream("a.pkl") as stream:
        assert stream.read() == b"content" and stream.seek(0) == 0


def test_names_are_normalised_and_junk_is_skipped(place: Path) -> None:
    names = ["./a//b.jpg", "c\\d.jpg", "e/./f.jpg", "u\u0308.jpg"]
    junk = ["__MACOSX/a/._b.jpg", ".DS_Store", "a/.DS_Store", "a/._b.jpg", "a/Thumbs.db", "a/Icon\r"]
    for path in (
        write_tar(place / "a.tar", files=dict.fromkeys(names + junk, b"x")),
        write_zip(place / "a.zip", dict.fromkeys(names + junk, b"x")),
    ):
        assert list(read_all(path)) == ["a/b.jpg", "c/d.jpg", "e/f.jpg", "ü.jpg"]


def test_zip_names_in_utf8_that_do_not_say_so(place: Path) -> None:
    path = write_zip(place / "a.zip", {"é.jpg": b"x"})
    content = bytearray(path.read_bytes())
    for signature, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.rindex(signature) + at + 1] &= ~0x08
    path.write_bytes(content)
    assert list(read_all(path)) == ["é.jpg"]


def test_the_checksum_of_a_folder_changes_with_its_names_and_sizes(place: Path) -> None:
    folder = write_folder(place / "folder")
    with open_archive(folder) as opened:
        before = opened.sha256()
    (folder / "more.jpg").write_bytes(b"x")
    with open_archive(folder) as opened:
        assert opened.sha256() != before


def test_hidden_files_of_a_folder_are_skipped(place: Path) -> None:
    folder = write_folder(place / "folder")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_bytes(b"x")
    (folder / ".hidden").symlink_to("/etc/passwd")
    assert read_all(folder).keys() == FILES.keys()


ESCAPES = [
    "../evil.jpg",
    "a/../../evil.jpg",
    "/etc/evil.jpg",
    "C:\\evil.jpg",
    "c:evil.jpg",
    "a\\..\\..\\evil.jpg",
    "\\evil.jpg",
]


@pytest.mark.parametrize("name", ESCAPES)
def test_names_that_lead_outside(place: Path, name: str) -> None:
    refused(write_tar(place / "a.tar", files={name: b"x"}), repr(name), "outside")
    refused(write_tar(place / "b.tgz", "w:gz", tarfile.PAX_FORMAT, {name: b"x"}), repr(name), "outside")
    refused(write_zip(place / "a.zip", {name: b"x"}), repr(name), "outside")


@pytest.mark.parametrize("name", ["a\x1b[2Jb.jpg", "a\nb.jpg", "c.jpg\r", "y" * 2000])
def test_names_that_are_not_text(place: Path, name: str) -> None:
    refused(write_tar(place / "a.tar", files={name: b"x"}), "not text")
    refused(write_zip(place / "a.zip", {name: b"x"}), "not text")


def test_a_nul_in_a_name(place: Path) -> None:
    path = write_zip(place / "a.zip", {"aaZ.jpg": b"x"})
    path.write_bytes(path.read_bytes().replace(b"aaZ.jpg", b"aa\0.jpg"))
    refused(path, "'aa\\x00.jpg'")
    with tarfile.open(place / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        info = member("a")
        info.pax_headers = {"path": "aa\0.jpg"}
        archive.addfile(info)
    refused(place / "a.tar", "'aa\\x00.jpg'")


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (tarfile.SYMTYPE, "a link"),
        (tarfile.LNKTYPE, "a link"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.FIFOTYPE, "a device"),
        (tarfile.GNUTYPE_SPARSE, "only files"),
        (b"Q", "only files"),
    ],
)
def test_tar_members_that_are_no_files(place: Path, kind: bytes, word: str) -> None:
    with tarfile.open(place / "a.tgz", "w:gz") as archive:
        archive.addfile(member("good.jpg", 4), io.BytesIO(b"good"))
        archive.addfile(member("evil.jpg", kind=kind, link="/etc/passwd"))
    refused(place / "a.tgz", "'evil.jpg'", word)


@pytest.mark.parametrize("mode", [stat.S_IFLNK, stat.S_IFIFO])
def test_zip_members_that_are_no_files(place: Path, mode: int) -> None:
    with zipfile.ZipFile(place / "a.zip", "w") as archive:
        info = zipfile.ZipInfo("evil.jpg")
        info.external_attr = (mode | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    refused(place / "a.zip", "'evil.jpg'", "link" if mode == stat.S_IFLNK else "device")


def test_links_and_pipes_in_a_folder(place: Path) -> None:
    for name, make in {
        "link.jpg": lambda path: path.symlink_to("/etc/passwd"),
        "folder": lambda path: path.symlink_to("/etc", target_is_directory=True),
        "pipe": os.mkfifo,
    }.items():
        folder = write_folder(place / f"with-{name}")
        make(folder / name)
        refused(folder, f"'{name}'")


def test_a_pipe_or_nothing_instead_of_an_archive(place: Path) -> None:
    os.mkfifo(place / "pipe.zip")
    refused(place / "pipe.zip", "neither a file")
    refused(place / "missing.zip", "No such file")


@pytest.mark.parametrize("content", [b"", b"x" * 2000, b"\0" * 10240, b"<!DOCTYPE html><p>gone"])
def test_files_that_are_no_archives(place: Path, content: bytes) -> None:
    (place / "a.tgz").write_bytes(content)
    refused(place / "a.tgz", "web page" if b"html" in content else "not a folder, a zip or a tar")


def test_duplicate_names(place: Path) -> None:
    with tarfile.open(place / "a.tar", "w") as archive:
        for name in ("a/b.jpg", "a/./b.jpg"):
            archive.addfile(member(name, 1), io.BytesIO(b"x"))
    refused(place / "a.tar", "'a/b.jpg' is there twice")
    refused(write_zip(place / "a.zip", {"a/b.jpg": b"x", "a//b.jpg": b"y"}), "'a/b.jpg' is there twice")


def test_a_member_that_claims_10_gigabytes(place: Path) -> None:
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        header = member("huge.jpg", 10 << 30).tobuf(form)
        for name, content in {"a.tar": header, "a.tgz": gzip.compress(header + b"\0" * 9999)}.items():
            (place / name).write_bytes(content)
            refused(place / name, "'huge.jpg'", "10,737,418,240")
    path = write_zip(place / "a.zip", {"huge.jpg": b"x" * 99})
    content = bytearray(path.read_bytes())
    start = content.rindex(b"PK\1\2")
    content[start + 24 : start + 28] = struct.pack("<I", 0xFFFFFFF0)
    path.write_bytes(content)
    refused(path, "'huge.jpg'", "4,294,967,280")


def test_a_member_too_long_to_be_an_image(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBER", 1000)
    refused(write_tar(place / "a.tar"), "1,500 bytes, over 1,000")
    with open_archive(place / "a.tar") as opened, opened.open_stream("birds/wren/a.jpg") as stream:
        assert len(stream.read()) == 1500


@pytest.mark.parametrize("form", ["gz", "bz2", "xz", "zip"])
def test_a_decompression_bomb(place: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(archives, "MAX_SMALL", 1 << 20)
    files = {"zeros.jpg": b"\0" * (8 << 20)}
    path = write_zip(place / "a.zip", files) if form == "zip" else write_tar(place / "a", f"w:{form}", files=files)
    refused(path, "'zeros.jpg'", "8,388,608")


def test_a_bomb_of_empty_members(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_SMALL", 10_000)
    path = write_tar(place / "a.tgz", "w:gz", files={f"{number}.jpg": b"" for number in range(500)})
    monkeypatch.setattr(archives, "MAX_RATIO", 2)
    refused(path, "claims 0 bytes")


@pytest.mark.parametrize("name", ["gnu.tar", "a.tgz", "a.tar.bz2", "a.tar.xz", "deflated.zip", "stored.zip"])
def test_truncated_archives(place: Path, name: str) -> None:
    """Cut anywhere, also between two members of a tar, and one byte before the end of a compressed one."""
    content = WRITERS[name](place / name).read_bytes()
    last = content.rstrip(b"\0")
    cuts = {*range(1, len(last), max(1, len(last) // 11)), *range(512, len(last), 512), len(last) - 1}
    for cut in sorted(cuts):
        (place / name).write_bytes(content[:cut])
        refused(place / name)


def test_a_tar_without_its_end_mark(place: Path) -> None:
    content = write_tar(place / "a.tar").read_bytes().rstrip(b"\0")
    (place / "a.tar").write_bytes(content + b"\0" * (-len(content) % 512))
    refused(place / "a.tar", "cut short")


def test_a_damaged_header_is_not_the_end(place: Path) -> None:
    content = bytearray(write_tar(place / "a.tar").read_bytes())
    at = content.index(b"birds/wren/b.jpg")
    content[at] ^= 1
    (place / "a.tar").write_bytes(content)
    refused(place / "a.tar", "'birds/wren/a.jpg'", "bad checksum")


@pytest.mark.parametrize("name", ["a.tgz", "stored.zip", "deflated.zip"])
def test_content_that_does_not_fit_its_checksum(place: Path, name: str) -> None:
    path = WRITERS[name](place / name)
    content = bytearray(path.read_bytes())
    if name == "a.tgz":
        content[-6] ^= 1
    elif name == "stored.zip":
        content[content.index(b"first") + 7] ^= 1
    else:
        content[content.index(b"birds/wren/a.jpg") + 20] ^= 16
    path.write_bytes(content)
    refused(path, "damaged")


@pytest.mark.parametrize("claim", [98, 100])
def test_a_zip_member_whose_size_lies(place: Path, claim: int) -> None:
    path = write_zip(place / "a.zip", {"a.jpg": b"x" * 99})
    content = bytearray(path.read_bytes())
    start = content.rindex(b"PK\1\2")
    content[start + 24 : start + 28] = struct.pack("<I", claim)
    path.write_bytes(content)
    refused(path, "'a.jpg'")


def test_a_negative_size(place: Path) -> None:
    header = bytearray(member("a.jpg", 1 << 40).tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 12
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 8 * 32)
    (place / "a.tar").write_bytes(bytes(header) + b"\0" * 1024)
    refused(place / "a.tar", "claims -1 bytes")


def test_extended_headers_that_claim_much(place: Path) -> None:
    for kind in (b"L", b"x"):
        header = member("././@LongLink", 1 << 30, kind).tobuf(tarfile.GNU_FORMAT)
        (place / "a.tar").write_bytes(header + b"\0" * 4096)
        refused(place / "a.tar", "extended header claims 1,073,741,824 bytes")


@pytest.mark.parametrize("bit", [0x01, 0x40])
def test_encrypted_zip_members(place: Path, bit: int) -> None:
    path = write_zip(place / "a.zip", {"secret.jpg": b"x" * 99})
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\1\2") + 8] |= bit
    content[content.rindex(b"PK\3\4") + 6] |= bit
    path.write_bytes(content)
    refused(path, "secret.jpg", "encrypt")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_methods_that_unpack_without_a_bound(place: Path, method: int) -> None:
    refused(write_zip(place / "a.zip", method=method), "other than deflate")


def test_a_disk_that_fills_during_a_copy(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with open_archive(write_tar(place / "a.tgz", "w:gz")) as opened:
        opened.members()
        monkeypatch.setattr(archives.shutil, "copyfileobj", full)
        with pytest.raises(UserError, match="No space left on device"):
            opened.open_stream("birds/wren/a.jpg")


def test_an_archive_that_changes_while_it_is_read(place: Path) -> None:
    path = write_tar(place / "a.tar")
    with open_archive(path) as opened:
        assert Member("birds/wren/a.jpg", 1500) in opened.members()
        write_tar(path, files={"other.jpg": b"x"})
        with pytest.raises(UserError, match="no longer"):
            list(opened.read(["birds/wren/a.jpg"]))
