"""Downloads from a server on this machine that behaves well, badly, or not at all."""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradshare.cli.data import data_app
from gradshare.data import download
from gradshare.data.download import PUBLISHED, Archive, fetch
from gradshare.errors import UserError

CONTENT = np.random.default_rng(0).bytes(300_001)
MD5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
PAGE = b"\n <!DOCTYPE html><html><body>Please log in</body></html>"


class Handler(BaseHTTPRequestHandler):
    """The path says how to behave; `seen` holds what was asked for."""

    seen: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        first = not any(path == self.path for path, _ in self.seen)
        self.seen.append((self.path, asked))
        getattr(self, self.path.strip("/").replace("-", "_"))(int(asked[6:-1]) if asked else 0, first)

    def answer(self, status: int, body: bytes, claimed: int | None = None, **headers: str) -> None:
        self.send_response(status)
        if claimed != -1:
            self.send_header("Content-Length", str(len(body) if claimed is None else claimed))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def ranges(self, start: int, first: bool, limit: int | None = None) -> None:
        if start >= len(CONTENT):
            return self.answer(416, b"", Content_Range=f"bytes */{len(CONTENT)}")
        rest, where = CONTENT[start:], f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"
        return self.answer(206 if start else 200, rest[:limit], len(rest), Content_Range=where)

    def ignores_ranges(self, start: int, first: bool) -> None:
        self.answer(200, CONTENT)

    def no_length(self, start: int, first: bool) -> None:
        self.answer(200, CONTENT, -1)

    def cut_once(self, start: int, first: bool) -> None:
        self.ranges(start, first, 150_000 if first else None)

    def cut_often(self, start: int, first: bool) -> None:
        self.ranges(start, first, 70_000)

    def cut_without_ranges(self, start: int, first: bool) -> None:
        self.answer(200, CONTENT[:100_000], len(CONTENT))

    def hangs_up(self, start: int, first: bool) -> None:
        self.close_connection = True

    def wrong_range(self, start: int, first: bool) -> None:
        self.answer(206, CONTENT[7:], Content_Range=f"bytes 7-{len(CONTENT) - 1}/{len(CONTENT)}")

    def announces(self, start: int, first: bool) -> None:
        self.answer(200, CONTENT, ETag=f'"md5:{MD5}"')

    def announces_another(self, start: int, first: bool) -> None:
        self.answer(200, CONTENT, ETag=f'"md5:{"0" * 32}"')

    def moved(self, start: int, first: bool) -> None:
        self.answer(302, b"", Location="/ranges")

    def page(self, start: int, first: bool) -> None:
        self.answer(200, b"Please log in", Content_Type="text/html; charset=utf-8")

    def disguised_page(self, start: int, first: bool) -> None:
        self.answer(200, PAGE, Content_Type="application/octet-stream")

    def gone(self, start: int, first: bool) -> None:
        self.answer(404, PAGE)

    def busy(self, start: int, first: bool) -> None:
        self.answer(503, b"")

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Handler.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", Handler.seen
        running.shutdown()
        thread.join()


Server = tuple[str, list[tuple[str, str | None]]]


def bring(server: Server, path: str, folder: Path, md5: str = MD5) -> Path:
    return fetch("cub", Archive("a.tgz", f"{server[0]}/{path}", md5), folder).path


@pytest.mark.parametrize("path", ["ranges", "ignores-ranges", "no-length", "moved", "cut-once", "cut-often"])
def test_the_file_arrives(server: Server, tmp_path: Path, path: str) -> None:
    assert bring(server, path, tmp_path / "new" / "folder").read_bytes() == CONTENT
    assert [file.name for file in (tmp_path / "new" / "folder").iterdir()] == ["a.tgz"]


def test_progress_counts_bytes(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    fetch("cub", Archive("a", f"{server[0]}/cut-once", MD5), tmp_path, lambda *step: seen.append(step))
    assert seen[-1] == (len(CONTENT), len(CONTENT)) and seen == sorted(seen)
    fetch("cub", Archive("b", f"{server[0]}/no-length", MD5), tmp_path, lambda *step: seen.append(step))
    assert seen[-1] == (len(CONTENT), 0)


@pytest.mark.parametrize(
    ("path", "requests"),
    [("ranges", ["bytes=1000-"]), ("ignores-ranges", ["bytes=1000-"]), ("cut-once", ["bytes=1000-", "bytes=151000-"])],
)
def test_an_earlier_part_is_used(server: Server, tmp_path: Path, path: str, requests: list[str]) -> None:
    (tmp_path / "a.tgz.part").write_bytes(CONTENT[:1000])
    assert bring(server, path, tmp_path).read_bytes() == CONTENT
    assert [asked for _, asked in server[1]] == requests


def test_a_complete_part_is_only_checked(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.tgz.part").write_bytes(CONTENT)
    assert bring(server, "ranges", tmp_path).read_bytes() == CONTENT


def test_a_file_that_is_there_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.tgz").write_bytes(CONTENT)
    assert bring(server, "gone", tmp_path) == tmp_path / "a.tgz" and not server[1]
    (tmp_path / "a.tgz").write_bytes(b"something of the user's")
    with pytest.raises(UserError, match="is there already, but its md5 is"):
        bring(server, "ranges", tmp_path)
    assert (tmp_path / "a.tgz").read_bytes() == b"something of the user's"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("gone", "answers 404 Not Found: the address may be dead"),
        ("busy", "answers 503 Service Unavailable"),
        ("page", "answers with a web page, not with the file"),
        ("disguised-page", "answers with a web page, not with the file"),
        ("hangs-up", "cannot be reached"),
    ],
)
def test_a_refusal_says_what_to_do_by_hand(server: Server, tmp_path: Path, path: str, reason: str) -> None:
    with pytest.raises(UserError) as error:
        bring(server, path, tmp_path)
    message = str(error.value)
    assert f"{server[0]}/{path}" in message and reason in message and "\n" not in message
    assert f"get a.tgz (md5 {MD5}) by hand from https://data.caltech.edu/records/65de6-vp158" in message
    assert message.endswith(f"run: gradshare data import cub {tmp_path / 'CUB_200_2011.tgz'}")
    assert list(tmp_path.iterdir()) == []


def test_nobody_listens(server: Server, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        port = closed.server_port
    with pytest.raises(UserError, match=r"cannot be reached .*Connection refused"):
        bring((f"http://127.0.0.1:{port}", []), "ranges", tmp_path)


@pytest.mark.parametrize("path", ["gone", "page"])
def test_trouble_keeps_what_was_there(server: Server, tmp_path: Path, path: str) -> None:
    (tmp_path / "a.tgz.part").write_bytes(CONTENT[:1000])
    with pytest.raises(UserError):
        bring(server, path, tmp_path)
    assert (tmp_path / "a.tgz.part").read_bytes() == CONTENT[:1000]
    assert bring(server, "ranges", tmp_path).read_bytes() == CONTENT


def test_a_server_that_always_cuts_keeps_the_part(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"was cut \(after 100,000 of 300,001 bytes\); 100,000 bytes are kept in"):
        bring(server, "cut-without-ranges", tmp_path)
    assert len(server[1]) == 2 and (tmp_path / "a.tgz.part").read_bytes() == CONTENT[:100_000]
    assert bring(server, "ranges", tmp_path).read_bytes() == CONTENT


def test_a_wrong_file_is_removed(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"not the published file .md5 {MD5}, not {'1' * 32}.: removed"):
        bring(server, "ranges", tmp_path, "1" * 32)
    (tmp_path / "a.tgz.part").write_bytes(b"x" * 1000)  # the start of another file
    with pytest.raises(UserError, match="not the published file"):
        bring(server, "ranges", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("path", "size"), [("ranges", 400_000), ("wrong-range", 1000)])
def test_a_part_that_cannot_be_gone_on_from_is_removed(server: Server, tmp_path: Path, path: str, size: int) -> None:
    (tmp_path / "a.tgz.part").write_bytes(bytes(size))
    with pytest.raises(UserError, match=f"cannot go on from byte {size:,}"):
        bring(server, path, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_a_published_md5_the_servers_counts(server: Server, tmp_path: Path) -> None:
    for path, checked in (("announces", True), ("ranges", False)):
        assert fetch("mini", Archive(path, f"{server[0]}/{path}"), tmp_path) == (tmp_path / path, MD5, checked)
    with pytest.raises(UserError, match="not the published file"):
        fetch("mini", Archive("c", f"{server[0]}/announces-another"), tmp_path)


def test_no_space_is_seen_before_anything_is_written(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(UserError, match=r"no space: .* 300,001 bytes to come and .* 1,000 free; make room"):
        bring(server, "ranges", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_keeps_the_part(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = download._copy

    def full(response: Any, first: bytes, file: Any, *rest: Any) -> None:
        file.write(first)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "_copy", full)
    with pytest.raises(UserError, match="the disk is full: 65,536 bytes are kept in"):
        bring(server, "ranges", tmp_path)
    monkeypatch.setattr(download, "_copy", copy)
    assert bring(server, "ranges", tmp_path).read_bytes() == CONTENT


def test_the_command(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADSHARE_DATA", str(tmp_path))
    archives = (Archive("a.zip", f"{server[0]}/cut-once", MD5), Archive("b.zip", f"{server[0]}/no-length"))
    monkeypatch.setitem(PUBLISHED, "omniglot", PUBLISHED["omniglot"]._replace(archives=archives))
    data_app(["download", "omniglot"], exit_on_error=False, result_action="return_value")
    folder = tmp_path / "downloads" / "omniglot"
    assert capsys.readouterr().out.splitlines() == [
        "Omniglot, 1,623 handwritten characters, 20 drawings each",
        "downloading a.zip: 300,001 bytes",
        f"{folder / 'a.zip'}: md5 {MD5}, checked",
        "downloading b.zip: of unknown size",
        f"{folder / 'b.zip'}: md5 {MD5}, not checked: none is published",
        f"next: gradshare data import omniglot {folder}",
    ]


def test_a_stopped_download_keeps_its_part(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(PUBLISHED, "cub", PUBLISHED["cub"]._replace(archives=(Archive("a.tgz", f"{server[0]}/ranges"),)))
        patch.setattr("gradshare.cli.data.bar", lambda *_: nullcontext(stop))
        with pytest.raises(SystemExit) as stopped:
            data_app(["download", "cub", "--folder", str(tmp_path)], exit_on_error=False, result_action="return_value")
    assert stopped.value.code == 3
    assert (tmp_path / "a.tgz.part").read_bytes() == CONTENT[: download.CHUNK]
    assert bring(server, "ranges", tmp_path).read_bytes() == CONTENT


def test_the_table_of_published_archives() -> None:
    for published in PUBLISHED.values():
        for archive in published.archives:
            assert archive.address.startswith("https://") and len(archive.md5) in (0, 32)
    assert download.import_command("cub", Path("d x")) == "gradshare data import cub 'd x/CUB_200_2011.tgz'"
    assert download.import_command("omniglot", Path("d")) == "gradshare data import omniglot d"
