"""MiniImagenet, as whichever of its forms one has: see `import_mini_imagenet`."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gradshare.data import mini_arrays
from gradshare.data.catalogue import Progress
from gradshare.data.folder import IMAGES, ByClass, by_standard, find_classes
from gradshare.data.pixels import Transform, decode
from gradshare.data.planning import (
    Block,
    Paths,
    Place,
    file_name,
    import_blocks,
    import_planned,
    names_of,
    opened,
    plan_classes,
)
from gradshare.data.sources import Source
from gradshare.data.splits import some
from gradshare.data.store import Index
from gradshare.errors import UserError

SIZE = 84
PICKLE = re.compile(r"mini-imagenet-cache-(train|val(?=idation|\.)|test)(?:(?<=val)idation)?\.pkl")
HDF5 = re.compile(r"(train|val|test)_data\.hdf5")
LOOSE = re.compile(f"{PICKLE.pattern}|{HDF5.pattern}")
CSV = re.compile(r"(train|val|test)\.csv")

Blocks = Mapping[tuple[str, str], Block]


def import_mini_imagenet(
    path: Paths, folder: Path, transform: Transform = "resize", progress: Progress = None
) -> Index:
    """Import the 100 classes of MiniImagenet, with the split of Ravi & Larochelle, 64, 16 and 20.

    Args:
        path: a folder or an archive, or several that hold parts of it, with one of
            `mini-imagenet-cache-{train,val,test}.pkl`;
            `{train,val,test}_data.hdf5`, as Torchmeta writes them (needs `pip install gradshare[hdf5]`);
            `{train,val,test}.csv` by Ravi, and the images that they name;
            class folders `<split>/<wnid>/*` or `<wnid>/*`.
            The pickles and the HDF5 files may also be named one by one.
        folder: where the store will be.
        transform: `"resize"`, the whole image to 84 x 84, or `"crop"`; the arrays are 84 x 84 and stay as they are.
        progress: called with (images done, images in all).
    """
    with opened(path, loose=LOOSE) as sources:
        settings: dict[str, Any] = dict(image=(SIZE, SIZE, 3), progress=progress)
        note = "split of Ravi & Larochelle 64/16/20"
        for form, pattern, read in (
            ("pickles", PICKLE, mini_arrays.pickled),
            ("HDF5", HDF5, mini_arrays.hdf5),
        ):
            parts = _parts(sources, pattern)
            if parts:
                blocks = _standard(_join(sources, parts, read), sources)
                settings |= dict(transform="none, 84 x 84 as published", note=f"{form}, {note}")
                return import_blocks(sources, blocks, folder, **settings)
        tables = _parts(sources, CSV)
        found = _by_tables(sources, tables) if tables else find_classes(sources, below="images")
        plan = plan_classes(_standard(found, sources))
        decoder = partial(decode, transform=transform, size=SIZE, channels=3)
        return import_planned(sources, plan, folder, decoder, transform=transform, note=note, **settings)


def _standard(found: Any, sources: Sequence[Source]) -> Any:
    return by_standard(found, "mini", "MiniImagenet", names_of(sources))


def _parts(sources: Sequence[Source], pattern: re.Pattern[str]) -> dict[str, Place]:
    """The file of each split."""
    parts: dict[str, Place] = {}
    for number, source in enumerate(sources):
        for place in ((number, member.name) for member in source.members()):
            match = pattern.fullmatch(file_name(place))
            if match and parts.setdefault(match[1], place) != place:
                raise UserError(f"there are two {match[0]}: '{parts[match[1]][1]}' and '{place[1]}'")
    return parts


def _join(
    sources: Sequence[Source], parts: Mapping[str, Place], read: Callable[[Source, str], Mapping[str, Block]]
) -> Blocks:
    return {
        (split, name): block
        for split, (number, member) in parts.items()
        for name, block in read(sources[number], member).items()
    }


def _by_tables(sources: Sequence[Source], tables: Mapping[str, Place]) -> ByClass:
    """The images that the CSV files name, by the labels beside them."""
    images: dict[str, Place] = {}
    for number, source in enumerate(sources):
        for place in ((number, member.name) for member in source.members()):
            if place[1].lower().endswith(IMAGES) and images.setdefault(file_name(place), place) != place:
                raise UserError(f"there are two images {file_name(place)}, so the CSV files do not say which is meant")
    found: ByClass = {}
    for split, (number, member) in tables.items():
        rows = _read_table(sources[number], member)
        missing = [file for file, _ in rows if file not in images]
        if missing:
            raise UserError(
                f"{len(missing)} of the {len(rows)} images of {member} are not in {names_of(sources)}: {some(missing)}"
            )
        for file, label in rows:
            found.setdefault((split, label), []).append(images[file])
    return found


def _read_table(source: Source, member: str) -> list[tuple[str, str]]:
    """The rows of a CSV file with the header `filename,label`."""
    ((_, content),) = source.read([member])
    try:
        rows = list(csv.reader(content.decode("utf-8-sig").splitlines(), strict=True))
    except (csv.Error, ValueError) as error:
        raise UserError(f"{member} in {source.name} is not a CSV file: {error}") from None
    if not rows or rows[0] != ["filename", "label"] or any(len(row) != 2 for row in rows if row):
        raise UserError(f"{member} in {source.name} is not a CSV file with the columns filename,label")
    return [(row[0], row[1]) for row in rows[1:] if row]
