"""Downloads from a server on this machine that behaves well, badly, or not at all."""

from __future__ import annotations

import gc
import hashlib
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradshare.cli.data import data_app
from gradshare.data.download import Fetched, fetch, import_command
from gradshare.data.sources import SOURCES, File
from gradshare.errors import UserError

# pooch does not close a response that fails; the collector of garbage then closes the socket, with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")

CONTENT = np.random.default_rng(0).bytes(300_001)
MD5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
PAGE = b"<!DOCTYPE html><html><body>Please log in</body></html>"


class Handler(BaseHTTPRequestHandler):
    """The path says how to behave; `seen` has the requests."""

    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(f"{self.command} {self.path}")
        getattr(self, self.path.strip("/").replace("-", "_"))()

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, claimed: int | None = None, **headers: str) -> None:
        self.send_response(status)
        if claimed != -1:
            self.send_header("Content-Length", str(len(body) if claimed is None else claimed))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
        self.close_connection = True

    def good(self) -> None:
        self.answer(200, CONTENT)

    def no_length(self) -> None:
        self.answer(200, CONTENT, -1)

    def moved(self) -> None:
        self.answer(302, b"", Location="/good")

    def cut(self) -> None:
        self.answer(200, CONTENT[:150_000], len(CONTENT))

    def hangs_up(self) -> None:
        self.close_connection = True

    def announces(self) -> None:
        self.answer(200, CONTENT, ETag=f'"md5:{MD5}"')

    def announces_another(self) -> None:
        self.answer(200, CONTENT, ETag=f'"md5:{"0" * 32}"')

    def page(self) -> None:
        self.answer(200, PAGE, Content_Type="text/html; charset=utf-8")

    def gone(self) -> None:
        self.answer(404, PAGE)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Handler.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()
    gc.collect()


def bring(address: str, folder: Path, md5: str = MD5, progress: Any = lambda *_: None) -> Fetched:
    return fetch("cub", File("a.tgz", address, md5), folder, progress)


@pytest.mark.parametrize("path", ["good", "no-length", "moved"])
def test_the_file_arrives(server: str, tmp_path: Path, path: str) -> None:
    folder, steps = tmp_path / "new" / "folder", list[tuple[int, int]]()
    fetched = bring(f"{server}/{path}", folder, progress=lambda *step: steps.append(step))
    assert fetched == (folder / "a.tgz", MD5, True) and fetched.path.read_bytes() == CONTENT
    assert [file.name for file in folder.iterdir()] == ["a.tgz"]
    assert path == "no-length" or (steps[-1] == (len(CONTENT), len(CONTENT)) and len(steps) > 3)


def test_a_good_file_is_not_fetched_again_and_a_damaged_one_is(server: str, tmp_path: Path) -> None:
    (tmp_path / "a.tgz").write_bytes(CONTENT)
    assert bring(f"{server}/gone", tmp_path).md5 == MD5 and not Handler.seen
    (tmp_path / "a.tgz").write_bytes(CONTENT[:1000])
    with pytest.raises(UserError):
        bring(f"{server}/gone", tmp_path)
    assert (tmp_path / "a.tgz").read_bytes() == CONTENT[:1000]
    assert bring(f"{server}/good", tmp_path).path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("gone", "404"),
        ("hangs-up", "online"),
        ("cut", "online"),
        ("page", "not the published file"),
    ],
)
def test_a_failure_leaves_nothing_and_says_what_to_do_by_hand(
    server: str, tmp_path: Path, path: str, reason: str
) -> None:
    with pytest.raises(UserError) as error:
        bring(f"{server}/{path}", tmp_path)
    message = str(error.value)
    assert f"{server}/{path}" in message and reason in message and "\n" not in message
    assert f"a.tgz (md5 {MD5}) by hand from https://data.caltech.edu" in message
    assert message.endswith(f"run: gradshare data import cub {tmp_path / 'CUB_200_2011.tgz'}")
    assert list(tmp_path.iterdir()) == []


def test_offline(server: str, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        port = closed.server_port
    for md5 in (MD5, ""):
        with pytest.raises(UserError, match="are you online"):
            bring(f"http://127.0.0.1:{port}/good", tmp_path, md5)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        bring(f"{server}/good", tmp_path / "file")


def test_without_a_published_md5_the_one_of_the_server_is_used(server: str, tmp_path: Path) -> None:
    for path, checked in (("announces", True), ("good", False)):
        assert bring(f"{server}/{path}", tmp_path / path, "").checked == checked
    for path, message in (("announces-another", "not the published file"), ("page", "web page"), ("cut", "online")):
        with pytest.raises(UserError, match=message):
            bring(f"{server}/{path}", tmp_path / path, "")
        assert not (tmp_path / path / "a.tgz").exists()


def test_the_command(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADSHARE_DATA", str(tmp_path))
    files = (File("a.zip", f"{server}/good", MD5), File("b.zip", f"{server}/no-length"))
    monkeypatch.setitem(SOURCES, "omniglot", replace(SOURCES["omniglot"], files=files))
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


def test_a_stopped_download_leaves_no_part(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(SOURCES, "cub", replace(SOURCES["cub"], files=(File("a.tgz", f"{server}/good", MD5),)))
    monkeypatch.setattr("gradshare.cli.data.bar", lambda *_: nullcontext(stop))
    with pytest.raises(SystemExit) as stopped:
        data_app(["download", "cub", "--folder", str(tmp_path)], exit_on_error=False, result_action="return_value")
    assert stopped.value.code == 3 and list(tmp_path.iterdir()) == []


def test_the_table_of_published_files() -> None:
    for source in SOURCES.values():
        for file in source.files:
            assert file.address.startswith("https://") and len(file.md5) in (0, 32)
    assert import_command("cub", Path("d x")) == "gradshare data import cub 'd x/CUB_200_2011.tgz'"
    assert import_command("omniglot", Path("d")) == "gradshare data import omniglot d"
