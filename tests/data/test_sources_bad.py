"""Sources on bad input: one clear error, and nothing is left behind."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradshare as gs
from gradshare.data import splits
from gradshare.data.sources import Options, importing
from gradshare.data.sources.importing import build
from gradshare.data.store import Writer, read_images, read_index
from tests.support.archives import class_folders, encoded, few, make_folder, make_tar, make_zip, picture

GOOD = {"train/a": 3, "val/b": 3, "test/c": 3}


def refused(message: str, kind: str, path: Any, folder: Path, **options: Any) -> None:
    """The import fails with this message, and the folder of the stores is as it was."""
    home = folder / "stores"
    with pytest.raises(gs.UserError, match=message) as caught:
        build(kind, path if isinstance(path, list) else [path], home / "store", Options(**options))
    assert "\n" not in str(caught.value)
    assert not home.exists() or list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train/a": 2, "val/a": 2, "test/c": 2}, "both train and val"),
        ({"train/a": 2, "val/b": 1, "test/c": 2}, "class 'b' has 1 images"),
        ({"a": 2, "b": 2}, "at least 3 classes"),
        ({"train/a": 2, "b": 2}, "must all be in"),
        ({"x/train/a": 2, "y/val/b": 2}, "must all be in"),
        ({"x/a": 2, "y/z/b": 2}, "'x/a/a_0000.png' and 'y/z/b/b_0000.png'"),
        ({}, "no JPEG, PNG or WebP images"),
    ],
)
def test_folders_that_are_no_data_set(tmp_path: Path, files: dict[str, int], message: str) -> None:
    refused(message, "folder", make_zip(tmp_path / "mine.zip", class_folders(files)), tmp_path)


def test_images_outside_of_folders_and_of_other_formats(tmp_path: Path) -> None:
    photos = class_folders(GOOD)
    loose = make_zip(tmp_path / "a.zip", {**photos, "loose.png": encoded(picture(1))})
    refused("'loose.png'", "folder", loose, tmp_path)
    only = make_zip(tmp_path / "b.zip", {"1.png": encoded(picture(1)), "2.png": encoded(picture(2))})
    refused("'1.png'", "folder", only, tmp_path)
    other = make_zip(tmp_path / "c.zip", {**photos, "train/a/x.bmp": encoded(picture(1), "BMP")})
    refused("train/a/x.bmp", "folder", other, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"train": ["a", "x", "y"], "val": ["b"], "test": ["c", "z", "w"]}', "names 4 unknown classes: w, x, y, ..."),
        ('{"train": ["a", "b"], "val": ["b"], "test": ["c"]}', "1 classes twice: b"),
        ('{"train": ["a", "a"], "val": ["b"]}', "1 classes twice: a"),
        ('{"train": ["\u00e9"], "val": ["e\u0301"]}', "1 classes twice: \u00e9"),
        ('{"train": "abc"}', "train is 'abc', not a list"),
        ('{"train": [1]}', "is 1, not text"),
        ('{"training": ["a"]}', "is not of the form"),
        ("[1, 2]", "is not of the form"),
        ("{}", "is not of the form"),
        ('{"train": ', "split.json cannot be read: "),
        ("\x00", "split.json cannot be read: "),
        ("[" * 100_000, "split.json cannot be read: "),
    ],
)
def test_bad_split_files(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "split.json").write_text(content, encoding="utf-8")
    path = make_zip(tmp_path / "mine.zip", class_folders({"a": 2, "b": 2, "c": 2}))
    refused(message, "folder", path, tmp_path, split_file=tmp_path / "split.json")


def test_split_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "mine.zip", class_folders({"a": 2, "b": 2, "c": 2}))
    refused("cannot be read: No such file", "folder", path, tmp_path, split_file=tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\xfa")
    refused("binary.json cannot be read", "folder", path, tmp_path, split_file=tmp_path / "binary.json")


def test_a_split_file_with_a_class_of_one_image(tmp_path: Path) -> None:
    (tmp_path / "split.json").write_text('{"train": ["a"], "val": ["b"], "test": ["c"]}')
    path = make_zip(tmp_path / "mine.zip", class_folders({"a": 1, "b": 2, "c": 2}))
    refused("class 'a' has 1 images;", "folder", path, tmp_path, split_file=tmp_path / "split.json")


def test_the_same_images_twice(tmp_path: Path) -> None:
    photos = class_folders(GOOD)
    first, second = make_zip(tmp_path / "a.zip", photos), make_zip(tmp_path / "b.zip", photos)
    refused("class 'a' has 3 images twice: a_0000.png", "folder", [first, second], tmp_path)
    refused("class 'a' has 3 images twice: a_0000.png", "folder", [first, first], tmp_path)


def test_archives_that_are_not_there_or_not_archives(tmp_path: Path) -> None:
    (tmp_path / "page.zip").write_text("<html>Sign in</html>")
    for kind in ("cub", "mini", "omniglot", "folder"):
        refused("none.zip cannot be read", kind, tmp_path / "none.zip", tmp_path)
        refused("web page", kind, tmp_path / "page.zip", tmp_path)


@pytest.mark.parametrize("content", [b"", b"this is text", encoded(picture(1), "JPEG")[:-500]])
def test_a_bad_image_ends_the_import_and_is_named(tmp_path: Path, content: bytes) -> None:
    path = make_zip(tmp_path / "mine.zip", {**class_folders(GOOD), "train/a/zz.jpg": content})
    refused("image 'train/a/zz.jpg' ", "folder", path, tmp_path)


def test_missing_and_unknown_classes_of_a_standard_split(tmp_path: Path) -> None:
    birds = list(splits.standard_split("cub").by_class())
    some = make_zip(tmp_path / "cub.zip", class_folders(dict.fromkeys(birds[5:], 2), width=8, height=8))
    refused(f"5 of the 200 classes .* {birds[0]}, {birds[1]}", "cub", some, tmp_path)
    more = make_zip(tmp_path / "more.zip", class_folders(dict.fromkeys([*birds, "201.Dodo"], 2), width=8, height=8))
    refused("1 classes of more.zip .*: 201.Dodo", "cub", more, tmp_path)
    half = make_zip(tmp_path / "images_background.zip", class_folders({"images_background/Greek/character01": 2}))
    refused("1622 of the 1623 classes", "omniglot", half, tmp_path)


def test_mini_imagenet_with_another_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = few("mini")
    monkeypatch.setattr(splits, "standard_split", {"mini": split}.__getitem__)
    rotated = splits.Split(split.train, split.test, split.val).by_class()
    path = make_zip(tmp_path / "mini.zip", class_folders({f"{own}/{name}": 2 for name, own in rotated.items()}))
    refused("in a folder val of mini.zip, but in test", "mini", path, tmp_path)
    both = class_folders({f"{own}/{name}": 2 for own in ("train", "val", "test") for name in rotated})
    refused("in a folder train of both.zip, but in", "mini", make_zip(tmp_path / "both.zip", both), tmp_path)


IMAGES = np.zeros((4, 84, 84, 3), np.uint8)
PAIR = [0, 1]


def shared(depth: int) -> list[Any]:
    """Nested lists that share their parts: 2**depth numbers in a few hundred bytes."""
    return [0, 1] if depth == 0 else [shared(depth - 1)] * 2


def cycle() -> list[Any]:
    """A list that holds itself."""
    result: list[Any] = []
    result.append(result)
    return result


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "image_data"),
        ({"image_data": IMAGES.astype(float), "class_dict": {}}, "image_data"),
        ({"image_data": IMAGES[:, :80], "class_dict": {}}, "image_data"),
        ({"image_data": IMAGES.astype(object), "class_dict": {}}, "not of numbers"),
        ({"image_data": IMAGES, "class_dict": [1]}, "class_dict"),
        ({"image_data": IMAGES, "class_dict": {"n01": [0, 4]}}, "class 'n01' .* 4 images"),
        ({"image_data": IMAGES, "class_dict": {"n01": [-1, 0]}}, "class 'n01' .* 4 images"),
        ({"image_data": IMAGES, "class_dict": {"n01": [0, 1], "n02": [1]}}, "class 'n02' .* twice"),
        ({"image_data": IMAGES, "class_dict": {"n01": [1, 1]}}, "class 'n01' .* twice"),
        ({"image_data": IMAGES, "class_dict": {"n01": np.eye(2, dtype=int)}}, "class 'n01' .* not a list"),
        ({"image_data": IMAGES, "class_dict": {"n01": [0, 1]}}, "1 classes of mini.zip"),
        (Path("x"), "is not a pickle"),
        # Found by a tester: these hung the import, or took all memory.
        ({"image_data": IMAGES, "class_dict": {"n01": shared(30)}}, "class 'n01' .* not a list"),
        ({"image_data": IMAGES, "class_dict": {"n01": [[0], [0, 1]]}}, "class 'n01' .* not a list"),
        ({"image_data": IMAGES, "class_dict": {"n01": cycle()}}, "class 'n01' .* not a list"),
        ({"image_data": IMAGES, "class_dict": {"n01": ["x" * 200_000] + ["y"] * 200_000}}, "class 'n01' .* not a list"),
        ({"image_data": IMAGES, "class_dict": {str(n): PAIR for n in range(9_000)}}, "class '1' .* twice"),
    ],
)
def test_pickles_that_are_not_mini_imagenet(tmp_path: Path, content: Any, message: str) -> None:
    files = {"mini-imagenet-cache-train.pkl": pickle.dumps(content)}
    started = time.process_time()
    refused(message, "mini", make_zip(tmp_path / "mini.zip", files), tmp_path)
    assert time.process_time() - started < 3


def test_a_truncated_pickle_and_two_of_a_kind(tmp_path: Path) -> None:
    name, content = "mini-imagenet-cache-train.pkl", pickle.dumps({"image_data": IMAGES, "class_dict": {}})
    cut = make_zip(tmp_path / "cut.zip", {name: content[:5000]})
    refused("is not a pickle", "mini", cut, tmp_path)
    two = make_zip(tmp_path / "two.zip", {f"a/{name}": content, f"b/{name}": content})
    refused(f"there are two {name}: 'a/{name}' and 'b/{name}'", "mini", two, tmp_path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("filename,label\nx.jpg,n01\ny.jpg,n01\n", "2 of the 2 images .*: x.jpg, y.jpg"),
        ("name;label\n", "columns filename,label"),
        ("filename,label\nx.jpg\n", "columns filename,label"),
        ("", "columns filename,label"),
        ('filename,label\n"x', "is not a CSV file: "),
        ("\xff", "is not a CSV file"),
    ],
)
def test_tables_that_do_not_fit(tmp_path: Path, table: str, message: str) -> None:
    files = {"train.csv": table.encode("latin-1"), "images/a.jpg": encoded(picture(1), "JPEG")}
    refused(message, "mini", make_zip(tmp_path / "mini.zip", files), tmp_path)


def test_tables_that_name_an_image_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = splits.Split(train=("n01", "n02"))
    monkeypatch.setattr(splits, "standard_split", {"mini": split}.__getitem__)
    photos = {f"images/{name}.jpg": encoded(picture(1), "JPEG") for name in "abc"}
    tables = {
        "a.jpg,n01\nb.jpg,n01\nb.jpg,n02\nc.jpg,n02": "class 'n02' shares 1 images .* images/b.jpg",
        "a.jpg,n01\na.jpg,n01\nb.jpg,n02\nc.jpg,n02": "1 images twice: a.jpg",
    }
    for table, message in tables.items():
        files = {**photos, "train.csv": f"filename,label\n{table}\n".encode()}
        refused(message, "mini", make_zip(tmp_path / "mini.zip", files), tmp_path)
    files = {**photos, "more/a.jpg": photos["images/a.jpg"], "train.csv": b"filename,label\na.jpg,n01\n"}
    refused("there are two images a.jpg", "mini", make_zip(tmp_path / "mini.zip", files), tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x89HDF\r\n\x1a\n", b"text" * 1000])
def test_files_that_are_not_hdf5(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("h5py")
    path = make_zip(tmp_path / "mini.zip", {"train_data.hdf5": content})
    refused("train_data.hdf5 is not an HDF5 file", "mini", path, tmp_path)


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_npz_files_that_are_not_omniglot(tmp_path: Path) -> None:
    images, shape = np.zeros((2, 20, 1379), np.uint8), np.array([105, 105])
    wrong = [
        dict(images=images, names=["a/1"], shape=shape),
        dict(images=images[:, :, :9], names=["a/1", "a/2"], shape=shape),
        dict(images=images.astype(int), names=["a/1", "a/2"], shape=shape),
        dict(images=images, names=[1, 2], shape=shape),
        dict(images=images, names=["a/1", "a/2"], shape=np.array([105.0, 105.0])),
        dict(images=images, names=["a/1", "a/2"], shape=np.array([-105, -105])),
        dict(images=images, names=["a/1", "a/2"], shape=np.array([10**12, 10**12])),
    ]
    for number, arrays in enumerate(wrong):
        path = npz(tmp_path / f"{number}.npz", **arrays)
        refused("does not hold Omniglot", "omniglot", path, tmp_path)
    path = npz(tmp_path / "twice.npz", images=images, names=["a/1", "a/1"], shape=shape)
    refused("1 characters twice", "omniglot", path, tmp_path)
    path = npz(tmp_path / "other.npz", images=images, names=["a/1", "a/2"], shape=shape)
    refused("2 classes of other.npz", "omniglot", path, tmp_path)


def test_npz_files_with_hostile_headers(tmp_path: Path) -> None:
    def header(shape: tuple[int, ...], descr: str = "|u1") -> bytes:
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        return file.getvalue()

    for content in (header((10**6, 10**6)), header((2,), "|O"), header((2, 20, 1379))[:20], b"\x93NUMPY\x09\x09", b""):
        files = {"images.npy": content, "names.npy": header((0,)), "shape.npy": header((0,))}
        refused("images.npy in o.npz is damaged", "omniglot", make_zip(tmp_path / "o.npz", files), tmp_path)


def test_an_import_never_writes_over_anything(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "mine.zip", class_folders(GOOD))
    build("folder", [path], tmp_path / "store")
    before = (tmp_path / "store" / "images.npy").stat()
    with pytest.raises(gs.UserError, match="exists"):
        build("folder", [path], tmp_path / "store")
    assert (tmp_path / "store" / "images.npy").stat() == before


def test_a_disk_that_fills_or_fails_during_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(number: int) -> Callable[[Writer, int, Any], None]:
        def fail(self: Writer, row: int, image: Any) -> None:
            if row == 5:
                raise OSError(number, os.strerror(number))
            put(self, row, image)

        return fail

    put, path = Writer.put, make_zip(tmp_path / "mine.zip", class_folders(GOOD))
    for number, message in {errno.ENOSPC: "No space left.* 0 MiB", errno.EIO: "Input/output error"}.items():
        monkeypatch.setattr(Writer, "put", failing(number))
        refused(message, "folder", path, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(gs.UserError, match="cannot write"):
        build("folder", [path], tmp_path / "file" / "below" / "store")


def test_a_disk_that_is_too_small_is_found_before_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing.shutil, "disk_usage", lambda _: type("usage", (), {"free": 1000})())
    monkeypatch.setattr(Writer, "put", lambda *_: pytest.fail("the import began"))
    refused("No space left", "folder", make_zip(tmp_path / "mine.zip", class_folders(GOOD)), tmp_path)


SLOW = """
    import sys, time
    from pathlib import Path
    from gradshare.data.sources import importing
    importing.PROGRESS_EVERY = 1
    def progress(done, total):
        print(done, flush=True)
        time.sleep(float(sys.argv[3]))
    importing.build("folder", [Path(sys.argv[1])], Path(sys.argv[2]), progress=progress)
"""


def start(path: Path, folder: Path, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(SLOW), str(path), str(folder), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_import_leaves_no_store_and_can_be_run_again(tmp_path: Path, number: signal.Signals) -> None:
    path, store = make_zip(tmp_path / "mine.zip", class_folders(GOOD)), tmp_path / "stores" / "store"
    process = start(path, store, 60)
    assert process.stdout is not None and process.stdout.readline() == "1\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0 and not store.exists()
    if number == signal.SIGINT:  # it had the time to clean up
        assert list((tmp_path / "stores").iterdir()) == []
    build("folder", [path], store)
    assert read_images(store, read_index(store)).shape == (9, 84, 84, 3)
    assert [child.name for child in (tmp_path / "stores").iterdir()] == ["store"]


def test_two_imports_at_once_give_one_whole_store(tmp_path: Path) -> None:
    path, store = make_tar(tmp_path / "mine.tgz", class_folders(GOOD)), tmp_path / "stores" / "store"
    processes = [start(path, store, 0.05) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "1\n"  # both have begun
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    build("folder", [path], tmp_path / "alone" / "store")
    assert [child.name for child in (tmp_path / "stores").iterdir()] == ["store"]
    for file in ("images.npy", "index.json"):
        assert (store / file).read_bytes() == (tmp_path / "alone" / "store" / file).read_bytes()


def test_two_imports_at_once_of_different_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_zip(tmp_path / "a.zip", class_folders(GOOD))
    second = make_folder(tmp_path / "b", class_folders({"train/d": 2, "val/e": 2, "test/f": 2}))
    put, store = Writer.put, tmp_path / "store"

    def meanwhile(self: Writer, row: int, image: Any) -> None:
        monkeypatch.setattr(Writer, "put", put)
        build("folder", [second], store)
        put(self, row, image)

    monkeypatch.setattr(Writer, "put", meanwhile)
    with pytest.raises(gs.UserError, match="another import"):
        build("folder", [first], store)
    assert [entry.name for entry in read_index(store).classes] == ["d", "e", "f"]
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a.zip", "b", "store"]


def test_names_beyond_ascii_and_names_that_look_alike(tmp_path: Path) -> None:
    names = {"train/Ære": 2, "train/日本語": 2, "val/🐦": 2, "test/naïve café": 2, "test/a'b\"c": 2}
    for form, make in ((".zip", make_zip), (".tgz", make_tar), ("", make_folder)):
        index = build("folder", [make(tmp_path / f"mine{form}", class_folders(names))], tmp_path / f"store{form}")
        assert {f"{entry.split}/{entry.name}" for entry in index.classes} == set(names)
        assert read_index(tmp_path / f"store{form}") == index
    assert json.loads((tmp_path / "store" / "index.json").read_text(encoding="utf-8"))["classes"][0][0] == "Ære"


def test_memory_does_not_grow_with_the_archive(tmp_path: Path) -> None:
    """What waits to be written is bounded, however slow the disk is."""
    waiting, most = [0], [0]

    class Fake:
        def read(self, wanted: Any) -> Any:
            for name in wanted:
                waiting[0] += 1
                most[0] = max(most[0], waiting[0])
                yield name, bytes(1000)

    rows = {(0, str(i)): i for i in range(500)}
    decode: Any = lambda content, name: np.zeros(1, np.uint8)  # noqa: E731
    for _ in importing.decoded([Fake()], rows, decode):  # type: ignore[list-item]
        waiting[0] -= 1
    assert waiting[0] == 0 and most[0] <= importing.IN_FLIGHT + 1
