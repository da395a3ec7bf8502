"""Everyone's own images: `root/<split>/<class>/*`, or `root/<class>/*` with a split file or a seeded split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from gradshare.data import splits
from gradshare.data.catalogue import Progress
from gradshare.data.pixels import Transform, decode
from gradshare.data.planning import Paths, Place, import_planned, names_of, opened, plan_classes
from gradshare.data.sources import Source
from gradshare.data.store import Index
from gradshare.errors import UserError

IMAGES = (".jpg", ".jpeg", ".png", ".webp")
OTHER_IMAGES = (".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".jp2", ".ppm", ".pgm")
SPLIT_FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}

Content = TypeVar("Content")
ByClass = dict[tuple[str, str], list[Place]]  # (split, or "" where no folder says it; class) -> its images


def import_folder(
    path: Paths,
    folder: Path,
    transform: Transform = "resize",
    progress: Progress = None,
    *,
    split_file: Path | None = None,
    seed: int = 0,
    size: int = 84,
    channels: int = 3,
) -> Index:
    """Import class folders of one's own, from a folder or an archive of it.

    Args:
        path: a folder or an archive, or several that hold parts of one data set.
        folder: where the store will be.
        transform: `"crop"` or `"resize"`, to `size` x `size` pixels.
        progress: called with (images done, images in all).
        split_file: JSON `{"train": [...], "val": [...], "test": [...]}` with names of class folders; classes that it
            does not name are left out. Without it, and without split folders, classes are shared out by `seed`.
        seed: of that sharing out, 64 % train, 16 % val, 20 % test.
        channels: 3, or 1 for greyscale.
    """
    split = None if split_file is None else splits.read_split_file(split_file)
    with opened(path) as sources:
        _refuse_other_images(sources)
        found = find_classes(sources, split_folders=split is None)
        if split is not None and split_file is not None:
            by_class, note = _by_file(found, split, split_file), f"split file {split_file.name}"
        elif all(own for own, _ in found):
            by_class, note = found, "split by its folders"
        else:
            by_class, note = _by_seed(found, seed), f"seeded split 64/16/20 %, seed {seed}"
        decoder = partial(decode, transform=transform, size=size, channels=channels)
        image = (size, size, channels)
        plan = plan_classes(by_class)
        return import_planned(
            sources, plan, folder, decoder, image=image, transform=transform, note=note, progress=progress
        )


def _by_file(found: ByClass, split: splits.Split, file: Path) -> ByClass:
    named = splits.split_by_class(split, f"the split file {file}")
    unknown = sorted(set(named) - {name for _, name in found})
    if unknown:
        raise UserError(
            f"the split file {file} names {len(unknown)} classes that are not there: {splits.some(unknown)}"
        )
    return {(named[name], name): places for (_, name), places in found.items() if name in named}


def _by_seed(found: ByClass, seed: int) -> ByClass:
    split = splits.split_by_class(splits.seeded_split([name for _, name in found], seed), "the seeded split")
    return {(split[name], name): places for (_, name), places in found.items()}


def by_standard(
    found: Mapping[tuple[str, str], Content], name: str, title: str, what: str
) -> dict[tuple[str, str], Content]:
    """Give the classes that were found their standard split; every class must be there, and no other."""
    standard = splits.split_by_class(splits.standard_split(name), f"the standard split of {title}")
    classes, of = {each for _, each in found}, f"the standard split of {title}"
    splits.refuse_others(classes, standard, what, of)
    splits.require_all(classes, standard, what, of)
    for split, each in found:
        if split not in ("", standard[each]):
            raise UserError(
                f"class '{each}' is in a folder {split} of {what}, but in {standard[each]} of {of};"
                " import another split as a folder"
            )
    return {(standard[each], each): content for (_, each), content in found.items()}


def find_classes(sources: Sequence[Source], *, split_folders: bool = True, below: str | None = None) -> ByClass:
    """Find the images `.../<class>/*` or `.../<split>/<class>/*` of the sources, by their class folders.

    Args:
        split_folders: whether folders named train, val and test are splits.
        below: where there are images in `.../<below>/<class>/`, only those count.
    """
    found: ByClass = {}
    for number, source in enumerate(sources):
        names = [member.name for member in source.members() if member.name.lower().endswith(IMAGES)]
        if below is not None:
            names = [name for name in names if name.split("/")[-3:-2] == [below]] or names
        for (split, folder), own in _class_folders(names, source.name, split_folders).items():
            found.setdefault((split, folder), []).extend((number, each) for each in own)
    if not found:
        raise UserError(f"there are no JPEG, PNG or WebP images in {names_of(sources)}")
    if len({split == "" for split, _ in found}) > 1:
        raise UserError(f"some of {names_of(sources)} have folders train, val and test, and some have not")
    return found


def _class_folders(names: list[str], source: str, split_folders: bool) -> Mapping[tuple[str, str], list[str]]:
    folders: dict[tuple[str, str], list[str]] = {}
    roots: dict[str, str] = {}  # where the class or split folders are, with an image for example
    for name in names:
        base, _, folder = name.rpartition("/")[0].rpartition("/")
        root, _, last = base.rpartition("/")
        split = SPLIT_FOLDERS.get(last, "") if split_folders else ""
        roots.setdefault(f"{root}/*" if split else base, name)
        folders.setdefault((split, folder), []).append(name)
    if len(roots) > 1 or any(folder == "" for _, folder in folders):
        examples = " and ".join(f"'{name}'" for name in list(roots.values())[:2])
        raise UserError(
            f"{source} has images at {examples}, but they must all lie in <class>/ or all in <split>/<class>/ folders"
        )
    return folders


def _refuse_other_images(sources: Sequence[Source]) -> None:
    others = list(_other_images(sources))
    if others:
        raise UserError(
            f"{len(others)} images are not JPEG, PNG or WebP: {splits.some(others)}; convert them or take them away"
        )


def _other_images(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        yield from (member.name for member in source.members() if member.name.lower().endswith(OTHER_IMAGES))
