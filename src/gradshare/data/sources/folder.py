"""A user's own images: `root/<split>/<class>/*`, or `root/<class>/*` with a split file or a seeded split."""

from __future__ import annotations

from pathlib import Path

from gradshare.data import splits
from gradshare.data.sources import Options
from gradshare.data.sources.importing import Archives, ByClass, Found, find_classes, from_photos
from gradshare.errors import UserError

OTHER_IMAGES = (".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".jp2", ".ppm", ".pgm")


def find(archives: Archives, options: Options) -> Found:
    """Find the class folders; a split file leaves out the classes that it does not name."""
    _check_formats(archives)
    found = find_classes(archives, split_folders=options.split_file is None)
    if options.split_file is not None:
        by_class, note = _by_file(found, options.split_file), f"split file {options.split_file.name}"
    elif all(split for split, _ in found):
        by_class, note = found, "split by its folders"
    else:
        split = splits.seeded_split([name for _, name in found], options.seed).by_class()
        by_class = {(split[name], name): places for (_, name), places in found.items()}
        note = f"seeded split 64/16/20 %, seed {options.seed}"
    return from_photos(archives, by_class, options, note)


def _by_file(found: ByClass, file: Path) -> ByClass:
    split = splits.read_split_file(file).by_class()
    unknown = sorted(set(split) - {name for _, name in found})
    if unknown:
        raise UserError(f"the split file {file} names {len(unknown)} unknown classes: {splits.some(unknown)}")
    return {(split[name], name): places for (_, name), places in found.items() if name in split}


def _check_formats(archives: Archives) -> None:
    names = [member.name for archive in archives for member in archive.members()]
    others = [name for name in names if name.lower().endswith(OTHER_IMAGES)]
    if others:
        raise UserError(
            f"{len(others)} images are not JPEG, PNG or WebP: {splits.some(others)}; convert or remove them"
        )
