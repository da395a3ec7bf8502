"""Every source on a small archive in the published format: every pixel is where it belongs."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import gradshare as gs
from gradshare.data import splits
from gradshare.data.sources import Options, mini_imagenet, pickles
from gradshare.data.sources.importing import build
from gradshare.data.store import read_images, read_index
from gradshare.method import SPLITS
from tests.support.archives import class_folders, direct, encoded, few, make_folder, make_tar, make_zip, picture


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], splits.Split]:
    """Makes a standard split a small one: two classes in each of train, val and test."""

    def shrink(name: str) -> splits.Split:
        split = few(name)
        monkeypatch.setattr(splits, "standard_split", {name: split}.__getitem__)
        return split

    return shrink


def images_of(folder: Path) -> dict[tuple[str, str], np.ndarray]:
    """The images of a store by split and class."""
    index = read_index(folder)
    images, start, result = read_images(folder, index), 0, {}
    for entry in index.classes:
        result[entry.split, entry.name] = np.array(images[start : start + entry.images])
        start += entry.images
    return result


def expected(
    files: dict[str, bytes], split: splits.Split, transform: str, size: int = 84
) -> dict[tuple[str, str], np.ndarray]:
    """The images that class folders must give, in the order of their names."""
    by_class = split.by_class()
    classes: dict[tuple[str, str], list[np.ndarray]] = {}
    for name in sorted(files):
        if name.lower().endswith((".png", ".jpg", ".webp")):
            folder = name.split("/")[-2]
            classes.setdefault((by_class[folder], folder), []).append(direct(files[name], transform, size))
    return {key: np.stack(images) for key, images in classes.items()}


def assert_same(folder: Path, wanted: dict[tuple[str, str], np.ndarray], tolerance: int = 0) -> None:
    found = images_of(folder)
    assert sorted(found) == sorted(wanted)
    for key, images in wanted.items():
        assert found[key].shape == images.shape
        assert np.abs(found[key].astype(int) - images).max() <= tolerance, key


def six(split: splits.Split, images: int = 3) -> dict[str, int]:
    return {name: images + number for number, name in enumerate(split.by_class())}


@pytest.mark.parametrize(("form", "transform"), [("tgz", "crop"), ("folder", "resize"), ("zip", "crop")])
def test_cub_as_published_as_a_folder_and_as_class_folders(
    tmp_path: Path, small: Callable[[str], splits.Split], form: str, transform: Any
) -> None:
    split = small("cub")
    photos = class_folders(six(split), "JPEG", width=170, height=130)
    published = {
        "attributes.txt": b"1 has_bill_shape::curved",
        **{f"CUB_200_2011/images/{name}": content for name, content in reversed(photos.items())},
        "CUB_200_2011/parts/parts.txt": b"1 back",
        "CUB_200_2011/segmentations/" + next(iter(photos)).replace(".jpg", ".png"): encoded(picture(5)),
    }
    path = {
        "tgz": lambda: make_tar(tmp_path / "CUB_200_2011.tgz", published),
        "folder": lambda: make_folder(tmp_path / "unpacked", published),
        "zip": lambda: make_zip(tmp_path / "cub.zip", photos),
    }[form]()
    calls: list[tuple[int, int]] = []
    index = build("cub", [path], tmp_path / "store", Options(transform), lambda *call: calls.append(call))
    assert_same(tmp_path / "store", expected(photos, split, transform))
    assert calls[-1] == (index.images, index.images) and index == read_index(tmp_path / "store")
    assert index.transform == transform and path.name in index.source and len(index.sha256) == 64
    assert [entry.name for entry in index.classes] == list(split.by_class())


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_images_that_have_the_size_are_stored_as_they_are(tmp_path: Path, form: str) -> None:
    files = class_folders({"train/a": 3, "val/b": 2, "test/c": 4}, form, width=84, height=84)
    build("folder", [make_folder(tmp_path / "mine", files)], tmp_path / "store", Options("crop"))
    wanted = expected(files, splits.Split(("a",), ("b",), ("c",)), "none")
    assert_same(tmp_path / "store", wanted)
    assert read_index(tmp_path / "store").source == "mine; split by its folders"


def mini_arrays_of(split: splits.Split) -> dict[tuple[str, str], np.ndarray]:
    make = np.random.default_rng(0).integers
    return {(own, name): make(0, 256, (5, 84, 84, 3), np.uint8) for name, own in split.by_class().items()}


def as_pickles(arrays: dict[tuple[str, str], np.ndarray], protocol: int) -> dict[str, bytes]:
    """The cache pickles; the rows of the classes are interleaved, so that the class_dict matters."""
    files = {}
    for split in SPLITS:
        names = [name for own, name in arrays if own == split]
        stacked = np.stack([arrays[split, name] for name in names], 1).reshape(-1, 84, 84, 3)
        rows = {name: list(range(number, len(stacked), len(names))) for number, name in enumerate(names)}
        content = {"image_data": stacked, "class_dict": rows}
        files[f"mini-imagenet-cache-{split}.pkl"] = pickle.dumps(content, protocol)
    return files


@pytest.mark.parametrize("large", [1000, 2**20])
@pytest.mark.parametrize("protocol", range(6))
def test_mini_imagenet_from_the_cache_pickles(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small: Callable[[str], splits.Split],
    protocol: int,
    large: int,
) -> None:
    left: list[int] = []
    read_rows = mini_imagenet._read_rows
    monkeypatch.setattr(pickles, "LARGE", large)
    monkeypatch.setattr(mini_imagenet, "_read_rows", lambda *given: (left.append(given[1]), read_rows(*given))[1])
    arrays = mini_arrays_of(small("mini"))
    files = as_pickles(arrays, protocol)
    if protocol % 2:
        paths = [make_tar(tmp_path / "mini-imagenet.tar.gz", files)]
    else:
        paths = [make_folder(tmp_path, files) / name for name in files]
    build("mini", paths, tmp_path / "store")
    assert_same(tmp_path / "store", arrays)
    assert bool(left) == (large == 1000 and protocol >= 3)  # images stay in the file until they are wanted


def fortran(content: dict[str, Any]) -> dict[str, Any]:
    rows = {name: np.array(own, np.int32) for name, own in content["class_dict"].items()}
    return {"image_data": np.asfortranarray(content["image_data"]), "class_dict": rows}


@pytest.mark.parametrize("change", [lambda content: {"more": bytes(2000), **content}, fortran])
def test_pickles_whose_images_cannot_stay_in_the_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small: Callable[[str], splits.Split],
    change: Callable[[Any], Any],
) -> None:
    monkeypatch.setattr(pickles, "LARGE", 1000)
    arrays = mini_arrays_of(small("mini"))
    files = {name: pickle.dumps(change(pickle.loads(content))) for name, content in as_pickles(arrays, 4).items()}
    build("mini", [make_zip(tmp_path / "mini.zip", files)], tmp_path / "store")
    assert_same(tmp_path / "store", arrays)


def test_mini_imagenet_pickles_in_a_folder_beside_their_archive(
    tmp_path: Path, small: Callable[[str], splits.Split]
) -> None:
    arrays = mini_arrays_of(small("mini"))
    folder = make_folder(tmp_path / "mini", as_pickles(arrays, 3))
    build("mini", [folder], tmp_path / "store")
    assert_same(tmp_path / "store", arrays)


def as_hdf5(arrays: dict[tuple[str, str], np.ndarray], folder: Path) -> Path:
    h5py = pytest.importorskip("h5py")
    folder.mkdir()
    for split in SPLITS:
        names = [name for own, name in arrays if own == split]
        with h5py.File(folder / f"{split}_data.hdf5", "w") as file:
            group = file.create_group("datasets")
            for name in names:
                group.create_dataset(name, data=arrays[split, name])
        (folder / f"{split}_labels.json").write_text(json.dumps(sorted(names)))
    return folder


@pytest.mark.parametrize("form", ["folder", "zip", "files"])
def test_mini_imagenet_from_the_hdf5_of_torchmeta(
    tmp_path: Path, small: Callable[[str], splits.Split], form: str
) -> None:
    arrays = mini_arrays_of(small("mini"))
    folder = as_hdf5(arrays, tmp_path / "miniimagenet")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    paths: Any = {
        "folder": folder,
        "zip": make_zip(tmp_path / "mini.zip", {f"miniimagenet/{name}": content for name, content in files.items()}),
        "files": sorted(folder.glob("*.hdf5")),
    }[form]
    build("mini", paths if isinstance(paths, list) else [paths], tmp_path / "store")
    assert_same(tmp_path / "store", arrays)


def test_hdf5_without_h5py_says_what_to_install(
    tmp_path: Path, small: Callable[[str], splits.Split], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = as_hdf5(mini_arrays_of(small("mini")), tmp_path / "miniimagenet")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(gs.UserError, match=r"pip install 'gradshare\[hdf5\]"):
        build("mini", [folder], tmp_path / "store")


def test_hdf5_that_leads_to_other_files_is_refused(tmp_path: Path, small: Callable[[str], splits.Split]) -> None:
    h5py = pytest.importorskip("h5py")
    arrays = mini_arrays_of(small("mini"))
    name = next(iter(arrays))[1]
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(5 * 84 * 84 * 3))
    makers: dict[str, Callable[[Any], Any]] = {
        "external": lambda group: group.create_dataset(
            name, (5, 84, 84, 3), np.uint8, external=[(str(secret), 0, secret.stat().st_size)]
        ),
        "link": lambda group: group.__setitem__(name, h5py.ExternalLink(str(secret), "datasets")),
        "soft": lambda group: group.__setitem__(name, h5py.SoftLink("/elsewhere")),
        "group": lambda group: group.create_group(name),
    }
    for case, make in makers.items():
        folder = as_hdf5(arrays, tmp_path / case)
        with h5py.File(folder / "train_data.hdf5", "a") as file:
            del file["datasets"][name]
            make(file["datasets"])
        with pytest.raises(gs.UserError, match=f"'{name}' in train_data.hdf5"):
            build("mini", [folder], tmp_path / "store")


def test_hdf5_that_claims_more_than_it_can_hold(tmp_path: Path, small: Callable[[str], splits.Split]) -> None:
    h5py = pytest.importorskip("h5py")
    folder = as_hdf5(mini_arrays_of(small("mini")), tmp_path / "miniimagenet")
    with h5py.File(folder / "train_data.hdf5", "w") as file:
        file.create_group("datasets").create_dataset("n01", (20_000, 84, 84, 3), np.uint8, chunks=(1, 84, 84, 3))
    with pytest.raises(gs.UserError, match="far more images"):
        build("mini", [folder], tmp_path / "store")


def test_mini_imagenet_from_jpegs_and_the_csvs_of_ravi(tmp_path: Path, small: Callable[[str], splits.Split]) -> None:
    split = small("mini")
    photos = class_folders(six(split), "JPEG")
    files = {f"images/{name.split('/')[1]}": content for name, content in photos.items()}
    for own in SPLITS:
        names = [name.split("/") for name in photos if name.split("/")[0] in getattr(split, own)]
        lines = [f"{file},{label}" for label, file in names]
        files[f"{own}.csv"] = "\r\n".join(["filename,label", *lines, ""]).encode()
    build("mini", [make_zip(tmp_path / "mini.zip", files)], tmp_path / "store")
    assert_same(tmp_path / "store", expected(photos, split, "resize"))


@pytest.mark.parametrize("form", ["wnids", "splits", "two zips", "a folder of zips"])
def test_mini_imagenet_from_class_folders(tmp_path: Path, small: Callable[[str], splits.Split], form: str) -> None:
    split = small("mini")
    by_class = split.by_class()
    photos = class_folders(six(split), "WEBP", width=84, height=84)
    in_splits = {f"{by_class[name.split('/')[0]]}/{name}": content for name, content in photos.items()}
    train = {name: content for name, content in in_splits.items() if name.startswith("train")}
    rest = {name: content for name, content in in_splits.items() if name not in train}
    (tmp_path / "zips").mkdir()
    paths: Any = {
        "wnids": lambda: make_folder(tmp_path / "mini", {f"mini/images/{k}": v for k, v in photos.items()}),
        "splits": lambda: make_tar(tmp_path / "mini.tar", in_splits, "w"),
        "two zips": lambda: [make_zip(tmp_path / "a.zip", train), make_zip(tmp_path / "b.zip", rest)],
        "a folder of zips": lambda: (
            make_zip(tmp_path / "zips/a.zip", rest),
            make_zip(tmp_path / "zips/b.zip", train),
            tmp_path / "zips",
        )[-1],
    }[form]()
    build("mini", paths if isinstance(paths, list) else [paths], tmp_path / "store")
    assert_same(tmp_path / "store", expected(photos, split, "resize"))


def drawings(split: splits.Split) -> dict[str, np.ndarray]:
    """Black strokes on white paper, 105 x 105, for each character: bool, True for paper."""
    make = np.random.default_rng(1)
    return {name: make.random((20, 105, 105)) > 0.2 for name in split.by_class()}


def omniglot_zips(folder: Path, papers: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    halves: dict[str, dict[str, bytes]] = {"images_background": {}, "images_evaluation": {}}
    for number, (name, paper) in enumerate(papers.items()):
        half = sorted(halves)[number % 2]
        for i, page in enumerate(paper):
            halves[half][f"{half}/{name}/{number:04}_{i + 1:02}.png"] = encoded(Image.fromarray(page))
    for half, files in halves.items():
        make_zip(folder / f"{half}.zip", files)
    return folder


def test_omniglot_from_its_two_zips_and_as_npz_gives_the_same_store(
    tmp_path: Path, small: Callable[[str], splits.Split]
) -> None:
    split = small("omniglot")
    papers = drawings(split)
    zips = omniglot_zips(tmp_path / "zips", papers)
    packed = np.packbits(np.stack(list(papers.values())).reshape(len(papers), 20, -1), axis=-1)
    np.savez_compressed(tmp_path / "omniglot.npz", images=packed, names=list(papers), shape=np.array([105, 105]))
    build("omniglot", [zips], tmp_path / "a")
    build("omniglot", sorted(zips.iterdir()), tmp_path / "b")
    build("omniglot", [tmp_path / "omniglot.npz"], tmp_path / "c")
    by_class = split.by_class()
    ink = {key: [Image.fromarray(np.uint8(255) * ~page) for page in paper] for key, paper in papers.items()}
    wanted = {
        (by_class[name], name): np.stack([np.asarray(page.resize((28, 28), Image.Resampling.BOX)) for page in pages])
        for name, pages in ink.items()
    }
    for store in "abc":
        assert_same(tmp_path / store, {key: images[..., None] for key, images in wanted.items()})
    build("omniglot", [zips], tmp_path / "d", Options(size=105))
    build("omniglot", [tmp_path / "omniglot.npz"], tmp_path / "e", Options(size=105))
    whole = {(by_class[name], name): np.stack(list(map(np.asarray, pages)))[..., None] for name, pages in ink.items()}
    for store in "de":
        assert_same(tmp_path / store, whole)


def test_a_folder_with_a_split_file_uses_the_classes_that_it_names(tmp_path: Path) -> None:
    files = class_folders({"Élan": 3, "日本": 2, "c d": 2, "unused": 2, "e": 2})
    split = splits.Split(("E\u0301lan", "e"), ("日本",), ("c d",))  # the accent apart, as macOS writes it
    file = tmp_path / "split.json"
    file.write_text(json.dumps(asdict(split)), encoding="utf-8")
    for form, make in (("zip", make_zip), ("tar.xz", make_tar), ("folder", make_folder)):
        options = {"mode": "w:xz"} if make is make_tar else {}
        path = make(tmp_path / f"mine.{form}", {f"mine/{k}": v for k, v in files.items()}, **options)  # type: ignore[operator]
        build("folder", [path], tmp_path / form, Options(split_file=file))
        used = {name: content for name, content in files.items() if "unused" not in name}
        assert_same(tmp_path / form, expected(used, split, "resize"))
        assert read_index(tmp_path / form).source.endswith("split file split.json")


def test_a_seeded_split_is_the_same_everywhere_and_differs_by_seed(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "mine.zip", class_folders({f"class {i}": 2 for i in range(25)}))
    indexes = [build("folder", [path], tmp_path / str(i), Options(seed=seed)) for i, seed in enumerate((0, 0, 1))]
    counts = [[entry.split for entry in index.classes].count(split) for index in indexes for split in ("train", "val")]
    assert counts == [16, 4] * 3
    assert indexes[0].classes == indexes[1].classes != indexes[2].classes
    assert indexes[2].source == "mine.zip; seeded split 64/16/20 %, seed 1"
    assert splits.seeded_split("01234", 7) == splits.Split(("2", "3", "4"), ("1",), ("0",))


def test_photos_of_another_size(tmp_path: Path, small: Callable[[str], splits.Split]) -> None:
    split = small("cub")
    photos = class_folders(six(split), "PNG", width=170, height=130)
    build("cub", [make_zip(tmp_path / "cub.zip", photos)], tmp_path / "store", Options("crop", size=32))
    assert_same(tmp_path / "store", expected(photos, split, "crop", 32))


@pytest.mark.parametrize("form", ["pickles", "hdf5"])
def test_mini_imagenet_of_another_size(tmp_path: Path, small: Callable[[str], splits.Split], form: str) -> None:
    arrays = mini_arrays_of(small("mini"))
    if form == "hdf5":
        pytest.importorskip("h5py")
    pickled = make_folder(tmp_path / "pickles", as_pickles(arrays, 4))
    folder = pickled if form == "pickles" else as_hdf5(arrays, tmp_path / form)
    index = build("mini", [folder], tmp_path / "store", Options(size=20))
    assert index.image == (20, 20, 3) and index.transform == "resize"
    scaled = {key: np.stack([Image.fromarray(one).resize((20, 20), 2) for one in own]) for key, own in arrays.items()}
    assert_same(tmp_path / "store", scaled)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("cub", (100, 50, 50)),
        ("mini", (64, 16, 20)),
        ("omniglot", (1028, 172, 423)),
        ("cifar-fs", (64, 16, 20)),
        ("fc100", (60, 20, 20)),
    ],
)
def test_the_standard_splits_are_disjoint_and_whole(name: str, counts: tuple[int, ...]) -> None:
    split = splits.standard_split(name)
    assert (len(split.train), len(split.val), len(split.test)) == counts
    assert len(split.by_class()) == sum(counts)


def test_both_cifar_splits_hold_the_same_100_classes_and_cub_counts_in_fours() -> None:
    cifar, fc100 = (set(splits.standard_split(name).by_class()) for name in ("cifar-fs", "fc100"))
    assert cifar == fc100 and len(cifar) == 100
    cub = splits.standard_split("cub")
    assert {int(name[:3]) for name in cub.train} == set(range(1, 201, 2))
    assert {int(name[:3]) for name in cub.val} == set(range(2, 201, 4))
