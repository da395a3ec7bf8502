"""`gradshare data`, called as the command line calls it, on data sets that the tests make."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import gradshare as gs
from gradshare.cli.data import data_app
from gradshare.cli.waiting import bar
from gradshare.data import contact_sheet as sheets
from gradshare.data import sources
from gradshare.data.splits import standard_split
from gradshare.data.store import ClassEntry, Index, read_index, write_store
from gradshare.errors import UserError
from tests.conftest import write_blobs


def command(*words: object) -> None:
    data_app(list(map(str, words)), exit_on_error=False, print_error=False, result_action="return_value")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder."""
    monkeypatch.setenv("GRADSHARE_DATA", str(tmp_path / "home"))
    return tmp_path / "home"


def write_folder(root: Path, classes: int = 10, images: int = 4, shade: int = 0) -> Path:
    for number in range(classes):
        (root / f"kind {number}").mkdir(parents=True, exist_ok=True)
        for place in range(images):
            picture = np.full((20, 30, 3), 20 * number + place + shade + 1, np.uint8)
            Image.fromarray(picture).save(root / f"kind {number}" / f"{place}.png")
    return root


def write_cub(path: Path) -> Path:
    """All classes of CUB, two small images each, laid out as in the published archive."""
    with zipfile.ZipFile(path, "w") as archive:
        for number, name in enumerate(standard_split("cub").by_class()):
            for place in range(2):
                with archive.open(f"CUB_200_2011/images/{name}/{place}.jpg", "w") as file:
                    Image.new("RGB", (9, 8), (number, 255 - number, 90 * place)).save(file, "JPEG")
    return path


# list


def test_list_shows_what_is_there_and_how_to_get_the_rest(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("list")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"data sets in {home}:"
    assert lines[1] == "  glyphs           built in; made on first use"
    assert lines[2] == "  cub              not here; to get it: gradshare data download cub"
    assert lines[-1] == "your own images: gradshare data import folder PATH"
    write_blobs(home / "blobs", {"train": 3, "val": 2, "test": 1})
    write_blobs(home / "cub", {"train": 3})
    write_blobs(home / ".half-made", {"train": 3})
    write_blobs(home / "broken", {"train": 3})
    write_blobs(home / "red \x1b[31m", {"train": 3})
    (home / "broken" / "index.json").write_text("{")
    (home / "downloads" / "omniglot").mkdir(parents=True)
    for file in sources.SOURCES["omniglot"].files:
        (home / "downloads" / "omniglot" / file.name).touch()
    command("list")
    shown = capsys.readouterr().out
    assert "  blobs            120 images of 16x16x1; classes: train 3 val 2 test 1\n" in shown
    assert "  broken           cannot be used: " in shown and "index.json is damaged" in shown
    assert "download cub" not in shown and "half-made" not in shown
    assert "red \\x1b[31m" in shown and "\x1b" not in shown
    folder = home / "downloads" / "omniglot"
    assert f"  omniglot         downloaded; to import it: gradshare data import omniglot {folder}\n" in shown


# import


def test_import_of_a_folder(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("import", "folder", write_folder(tmp_path / "my pictures"), "--seed", 3)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "importing folder: 40 images"
    assert second == f"my-pictures: 40 images of 84x84x3; classes: train 6 val 2 test 2; in {home / 'my-pictures'}"
    assert re.fullmatch(r"\d+\.\d s, \d+ images/s; to look at it: gradshare data show my-pictures", third)
    index = gs.load_dataset("my-pictures").index
    assert index.name == "my-pictures" and index.image == (84, 84, 3) and "seed 3" in index.source
    assert os.listdir(home) == ["my-pictures"]


def test_import_with_a_size(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "pictures")
    command("import", "folder", folder, "--size", 200)
    assert "pictures: 40 images of 200x200x3; " in capsys.readouterr().out
    dataset = gs.load_dataset("pictures")
    assert dataset.index.image == (200, 200, 3) and dataset.image == (3, 200, 200)
    command("show", "pictures", "--ways", 2, "--queries", 1, "--tasks", 1, "--out", tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width < 2 * 200  # large images are shrunk
    for size, text in ((3, "at least 4"), (1025, "at most 1024")):
        with pytest.raises(UserError, match=f"size is {size}; it must be {text}"):
            command("import", "folder", folder, "--name", "other", "--size", size)
    assert os.listdir(home) == ["pictures"]


def test_import_with_a_split_file(home: Path, tmp_path: Path) -> None:
    split = {"train": ["kind 0", "kind 1"], "val": ["kind 2"], "test": ["kind 3"]}
    (tmp_path / "split.json").write_text(json.dumps(split))
    command("import", "folder", write_folder(tmp_path / "x"), "--split-file", tmp_path / "split.json", "--name", "mine")
    assert [(entry.name, entry.split) for entry in read_index(home / "mine").classes] == [
        (name, each) for each, names in split.items() for name in names
    ]


def test_both_transforms_of_cub_have_names_of_their_own(home: Path, tmp_path: Path) -> None:
    archive = write_cub(tmp_path / "cub.zip")
    command("import", "cub", archive)
    command("import", "cub", archive, "--transform", "resize")
    command("import", "cub", archive, "--transform", "crop", "--name", "birds")
    assert {store.name: read_index(store).transform for store in home.iterdir()} == {
        "cub": "crop",
        "cub-resize": "resize",
        "birds": "crop",
    }


def test_an_import_never_overwrites_unless_told_to(home: Path, tmp_path: Path) -> None:
    old, new = write_folder(tmp_path / "old"), write_folder(tmp_path / "new", shade=5)
    command("import", "folder", old, "--name", "mine")
    with pytest.raises(UserError, match=r"mine exists; --replace"):
        command("import", "folder", new, "--name", "mine")
    assert gs.load_dataset("mine").images[0, 0, 0, 0] < 200
    before = np.array(gs.load_dataset("mine").images)
    command("import", "folder", new, "--name", "mine", "--replace")
    assert np.array_equal(gs.load_dataset("mine").images, before + 5) and os.listdir(home) == ["mine"]
    command("import", "folder", new, "--name", "another", "--replace")  # nothing to replace: all the same
    assert sorted(os.listdir(home)) == ["another", "mine"]


@pytest.mark.parametrize(
    ("trouble", "error"), [("broken image", UserError), ("rename fails", UserError), ("stopped", SystemExit)]
)
def test_a_failed_replacement_keeps_the_old(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, error: type[BaseException]
) -> None:
    command("import", "folder", write_folder(tmp_path / "old"), "--name", "mine")
    before = (home / "mine" / "images.npy").read_bytes()
    new = write_folder(tmp_path / "new", shade=5)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "store" and target == home / "mine":
            raise OSError("the disk is gone")
        return rename(self, target)

    if trouble == "broken image":
        (new / "kind 7" / "2.png").write_bytes(b"not a picture")
    elif trouble == "rename fails":
        monkeypatch.setattr(Path, "rename", failing)
    else:
        monkeypatch.setattr("gradshare.data.sources.importing.PROGRESS_EVERY", 10)
        monkeypatch.setattr("rich.progress.Progress.update", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with pytest.raises(error):
        command("import", "folder", new, "--name", "mine", "--replace")
    assert (home / "mine" / "images.npy").read_bytes() == before and os.listdir(home) == ["mine"]
    assert gs.load_dataset("mine").index.images == 40


def test_only_data_sets_are_replaced(home: Path, tmp_path: Path) -> None:
    (home / "mine").mkdir(parents=True)
    (home / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="mine is not a data set"):
        command("import", "folder", write_folder(tmp_path / "x"), "--name", "mine", "--replace")
    assert (home / "mine" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_import_leaves_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def stopping(archives: object, options: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(1)
        raise AssertionError("was not stopped")

    monkeypatch.setattr("gradshare.data.sources.folder.find", stopping)
    with pytest.raises(SystemExit) as stop:
        command("import", "folder", write_folder(tmp_path / "x"))
    assert stop.value.code == 3 and not (home / "x").exists()
    assert capsys.readouterr().err == "gradshare: stopped; nothing is left of the import\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("kind", "path", "transform", "name"),
    [
        ("cub", "CUB_200_2011.tgz", None, "cub"),
        ("cub", "x", "resize", "cub-resize"),
        ("mini", "x", "resize", "mini"),
        ("mini", "x", "crop", "mini-crop"),
        ("omniglot", "x", None, "omniglot"),
        ("folder", "birds.tar.gz", None, "birds"),
        ("folder", "all my birds.ZIP", "crop", "all-my-birds-crop"),
        ("folder", "鳥 2.0", None, "鳥-2.0"),
    ],
)
def test_default_names(kind: str, path: str, transform: sources.Transform | None, name: str) -> None:
    assert sources._default_name(kind, [Path(path)], transform) == name


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for unit in ("images", "bytes"):
        with bar("importing birds", unit) as progress:  # type: ignore[arg-type]
            progress(1000, 0)
            progress(20_000, 40_000)
    shown = capsys.readouterr().out
    assert "importing birds" in shown and "20000/40000" in shown and "20.0/40.0 kB" in shown


# verify


def test_verify_reads_everything(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_blobs(home / "blobs", {"train": 12, "val": 6})
    command("verify", "blobs", home / "blobs")
    shown = capsys.readouterr().out
    assert "blobs: 360 images of 16x16x1, none, from made by the tests\n" in shown
    assert "  train    12 classes     240 images, 20 a class\n  val       6 classes" in shown
    assert shown.count("no image is blank") == 2
    assert re.search(r"images.npy has sha256 [0-9a-f]{64}\n", shown)


def test_verify_finds_blank_images(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = Index("dark", (2, 2, 1), (ClassEntry("day", "train", 3), ClassEntry("night", "train", 4)), "none", "test")
    write_store(home / "dark", index, (np.full((2, 2, 1), value, np.uint8) for value in (1, 2, 3, 0, 4, 0, 5)))
    with pytest.raises(UserError, match=r"2 of 7 images .* 'night' .2."):
        command("verify", "dark")
    assert "3 to 4 a class" in capsys.readouterr().out


# show


def test_show_writes_a_png_and_counts(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_blobs(home / "blobs", {"train": 12, "val": 6})
    out = tmp_path / "new" / "sheet.image"
    command("show", "blobs", "--split", "val", "--tasks", 2, "--shots", 2, "--classes", "--out", out)
    shown = capsys.readouterr().out
    assert "  train    12 classes" in shown and "        20  val-5\n" in shown and f"contact sheet: {out}\n" in shown
    with Image.open(out) as picture:
        assert picture.format == "PNG" and picture.width > 17 * 80 and picture.height > 10 * 80


def test_show_is_called_after_the_data_set(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_blobs(home / "blobs", {"train": 5})
    monkeypatch.chdir(tmp_path)
    command("show", home / "blobs")
    assert (tmp_path / "blobs-train.png").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ways", 0], "ways is 0; it must be at least 1"),
        (["--tasks", -1], "tasks is -1; it must be at least 1"),
        (["--shots", 9], "9-shot with 15 queries needs 24 images of a class"),
        (["--split", "test"], "the test split of blobs has no classes"),
    ],
)
def test_show_refuses_what_cannot_be(home: Path, words: list[object], message: str) -> None:
    write_blobs(home / "blobs", {"train": 12, "val": 6})
    with pytest.raises(UserError, match=message):
        command("show", "blobs", *words)


def test_a_sheet_shows_the_tasks_that_a_run_would_see(dataset: gs.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, shown = gs.Shape(ways=4, shots=2, queries=3), list[tuple[str, torch.Tensor]]()
    monkeypatch.setattr(
        sheets, "_draw_row", lambda *row: shown.append((row[3], torch.from_numpy(row[4]).permute(0, 3, 1, 2) / 255))
    )
    sheets.contact_sheet(dataset, "val", shape, 3, 7)
    names, images = zip(*shown, strict=True)
    assert all(len(set(names[task * 4 : task * 4 + 4])) == 4 for task in range(3)) and names[0].startswith("val-")
    rows, episodes = torch.stack(images).unflatten(0, (3, 4)), dataset.sample("val", shape, 3, (7, 1, 0, 0))
    assert torch.equal(rows[:, :, :2].flatten(1, 2), episodes.support_x)
    assert torch.equal(rows[:, :, 2:].flatten(1, 2), episodes.query_x)


def test_a_sheet_holds_every_image_and_any_name(tmp_path: Path) -> None:
    names = ["plain", "鳥と Vögel", "a name that never ends " * 30, "", "👩‍🚀\n"]
    index = Index("x", (84, 40, 3), tuple(ClassEntry(name, "train", 2) for name in names), "none", "test")
    shades = [(10 * n + 5, 255 - 10 * n, 77) for n in range(10)]
    write_store(tmp_path / "x", index, (np.full((84, 40, 3), shade, np.uint8) for shade in shades))
    sheet = sheets.contact_sheet(gs.load_dataset(tmp_path / "x"), "train", gs.Shape(5, 1, 1), 1)
    colours = {colour: count for count, colour in sheet.getcolors(1 << 20) or []}
    assert all(colours[shade] == 84 * 40 for shade in shades)
