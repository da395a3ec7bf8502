"""The store: writing, reading, verifying, and a store that an earlier version wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradshare as gs
from gradshare.data.store import ClassEntry, Index, building, read_images, read_index, verify, write_store
from tests.conftest import write_blobs
from tests.support.archives import digest

OLD = Path(__file__).parent / "fixtures" / "store"  # written before the data layer was rewritten
ONE = Index("one", (2, 2, 1), (ClassEntry("a", "train", 1),), "none", "test")
BLANK = np.zeros((2, 2, 1), np.uint8)


def test_a_store_of_an_earlier_version_opens_and_gives_the_same_tasks() -> None:
    draws = [("train", (0,)), ("train", (0, 0, 3, 7)), ("val", (5, 1, 0, 0)), ("test", (2**40, 2, 1, 1))]
    expected = {
        "unit": "0f6575ed5906e50d545303c0fbaaefccd4a9bef43d960c0e25ba63514fee809d",
        "imagenet": "af5ba9cacb6d60d3beab7c8762c84fd5dbb90cfc810c13b2587bd86f310198e0",
    }
    assert {
        pixels: digest(gs.load_dataset(OLD, pixels=pixels), gs.Shape(3, 1, 3), draws, 4)  # type: ignore[arg-type]
        for pixels in expected
    } == expected
    index, sha256, blank = verify(OLD)
    assert sha256 == index.images_sha256 and not blank and index.sha256 == "ab" * 32
    assert index.classes[1] == ClassEntry("train 1 ü", "train", 7) and (len(index.classes), index.images) == (13, 67)


def test_writing_a_store_again_gives_the_same_bytes(tmp_path: Path) -> None:
    index = read_index(OLD)
    for new in ("new", "newer"):
        write_store(tmp_path / new, replace(index, images_sha256=""), read_images(OLD, index))
        assert (tmp_path / new / "images.npy").read_bytes() == (OLD / "images.npy").read_bytes()
    written, again, old = (
        (folder / "index.json").read_text() for folder in (tmp_path / "new", tmp_path / "newer", OLD)
    )
    assert written == again
    assert old.removesuffix("\n}") == written[: written.index(',\n "index_sha256"')]  # a checksum is all that is new


def swap_splits(content: dict[str, Any]) -> None:
    first, last = content["classes"][0], content["classes"][-1]
    first[1], last[1] = last[1], first[1]


def move_an_image(content: dict[str, Any]) -> None:
    content["classes"][0][2] += 1
    content["classes"][1][2] -= 1


def swap_names(content: dict[str, Any]) -> None:
    first, last = content["classes"][0], content["classes"][-1]
    first[0], last[0] = last[0], first[0]


@pytest.mark.parametrize("change", [swap_splits, move_an_image, swap_names])
def test_a_changed_index_does_not_match_its_checksum(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    store = write_blobs(tmp_path / "blobs", {"train": 2, "test": 2}, images=3)
    content = json.loads((store / "index.json").read_text())
    change(content)
    (store / "index.json").write_text(json.dumps(content))
    for use in (verify, gs.load_dataset):
        with pytest.raises(gs.UserError, match=r"index.json was changed after the import.*; import the data set again"):
            use(store)
    del content["index_sha256"]  # as a store of an earlier version
    (store / "index.json").write_text(json.dumps(content))
    assert verify(store).store.images == 12


def test_a_store_without_checksums_opens(tmp_path: Path) -> None:
    store = Path(shutil.copytree(OLD, tmp_path / "store"))
    content = json.loads((store / "index.json").read_text())
    del content["sha256"], content["images_sha256"]
    (store / "index.json").write_text(json.dumps(content))
    assert verify(store).store == replace(read_index(OLD), sha256="", images_sha256="")


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), building(tmp_path / "half", ONE) as store:
        store.put(0, BLANK)
        raise KeyboardInterrupt
    with pytest.raises(gs.UserError, match="1 of 1 images"), building(tmp_path / "half", ONE):
        pass
    with pytest.raises(gs.UserError, match="image 0 is"), building(tmp_path / "half", ONE) as store:
        store.put(0, BLANK[:1])
    assert list(tmp_path.iterdir()) == []


def test_verify_finds_one_flipped_bit_and_blank_images(tmp_path: Path) -> None:
    store = Path(shutil.copytree(OLD, tmp_path / "store"))
    content = bytearray((store / "images.npy").read_bytes())
    content[-7] ^= 1
    (store / "images.npy").write_bytes(content)
    with pytest.raises(gs.UserError, match="checksum"):
        verify(store)
    index = Index("dark", (2, 2, 1), (ClassEntry("day", "train", 1), ClassEntry("night", "train", 2)), "none", "test")
    write_store(tmp_path / "dark", index, [BLANK + 1, BLANK, BLANK])
    steps: list[tuple[int, int]] = []
    assert verify(tmp_path / "dark", lambda *step: steps.append(step)).blank == {"night": 2}
    assert steps == [(1, 3), (3, 3)]


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([("a", "train", 1), ("a", "test", 1)], "train and in test"),
        ([("a", "training", 1)], "'training'"),
        ([("a", "train", 0)], "no images"),
    ],
)
def test_impossible_classes_raise_an_error(tmp_path: Path, classes: list[tuple[str, str, int]], message: str) -> None:
    index = replace(ONE, classes=tuple(ClassEntry(*entry) for entry in classes))
    with pytest.raises(gs.UserError, match=message), building(tmp_path / "x", index):
        pass
    assert list(tmp_path.iterdir()) == []


def rewrite(**changes: object) -> Callable[[Path], object]:
    def change(store: Path) -> None:
        content = json.loads((store / "index.json").read_text())
        del content["index_sha256"]
        (store / "index.json").write_text(json.dumps({**content, **changes}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: (s / "index.json").unlink(), "no index.json"),
        (lambda s: (s / "images.npy").unlink(), "images.npy cannot be read: No such file"),
        (lambda s: (s / "index.json").write_text("{"), "index.json is damaged"),
        (lambda s: (s / "index.json").write_text("[]"), "index.json is damaged"),
        (lambda s: (s / "index.json").write_bytes(b"\xff"), "index.json is damaged"),
        (rewrite(version=99), "version 99"),
        (rewrite(name=5), "name is 5"),
        (rewrite(image=[2, 2]), "size"),
        (rewrite(classes=[["a", "train"]]), "no images"),
        (rewrite(classes=["a"]), "index.json is damaged"),
        (rewrite(classes=[["a", "train", 10**15]]), "images.npy is damaged"),
        (lambda s: (s / "images.npy").write_bytes((s / "images.npy").read_bytes()[:-9]), "images.npy is damaged"),
        (lambda s: (s / "images.npy").write_bytes(b""), "images.npy is damaged"),
        (lambda s: np.save(s / "images.npy", np.zeros((3, 16, 16, 1), np.uint8)), "images.npy is damaged"),
    ],
)  # fmt: skip
def test_a_damaged_store_raises_an_error_that_says_what_is_wrong(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    store = write_blobs(tmp_path / "blobs", {"train": 2}, images=3)
    damage(store)
    with pytest.raises(gs.UserError, match=message):
        gs.load_dataset(store)
