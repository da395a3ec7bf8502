"""`gradshare data`: list, import, download, verify and show data sets. Heavy modules are imported by the commands."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cyclopts import App

from gradshare.cli.waiting import bar, stoppable
from gradshare.data.sources import BUILT_IN, DOWNLOADS, PUBLISHED, SOURCES, Downloadable, Kind, Transform, missing
from gradshare.errors import MOST, MOST_SEED, UserError, check_range, say
from gradshare.files import check_output
from gradshare.method import SPLITS

if TYPE_CHECKING:
    from gradshare.data.store import Index

MOST_TASKS = 100  # on a contact sheet
PNG = b"\x89PNG"  # first bytes of such a file

data_app = App(name="data", help="Data sets: which there are, how to get more, and how they look.")


@data_app.command(name="list")
def list_data() -> None:
    """List the data sets on this machine, the built-in ones, and how to get the published ones that are missing."""
    from gradshare.data.store import data_folder

    home = data_folder()
    say(f"data sets in {home}:")
    found = {path.parent.name for path in home.glob("*/index.json") if not path.parent.name.startswith(".")}
    for name in sorted(found | set(BUILT_IN)) + [kind for kind in PUBLISHED if kind not in found]:
        say(f"  {name:<16} {_describe(home / name) if name in found else _how_to_get(name, home)}")
    say("your own images: gradshare data import folder PATH")


def _describe(store: Path) -> str:
    from gradshare.data.store import read_index

    try:
        index = read_index(store)
    except UserError as error:
        return f"cannot be used: {error}"
    return f"{_size(index)}; classes: {_classes(index)}"


def _size(index: Index) -> str:
    height, width, channels = index.image
    return f"{index.images} images of {height}x{width}x{channels}"


def _classes(index: Index) -> str:
    counts = Counter(entry.split for entry in index.classes)
    return " ".join(f"{split} {counts[split]}" for split in SPLITS)


def _how_to_get(name: str, home: Path) -> str:
    from gradshare.data.download import import_command

    if name in BUILT_IN:
        return "built in; made on first use"
    folder = home / DOWNLOADS / name
    if all((folder / file.name).is_file() for file in SOURCES[name].files):
        return f"downloaded; to import it: {import_command(name, folder)}"
    return f"not here; to get it: gradshare data download {name}"


@data_app.command(name="import")
def import_data(
    kind: Kind,
    *paths: Path,
    transform: Transform | None = None,
    name: str | None = None,
    split_file: Path | None = None,
    seed: int = 0,
    size: int | None = None,
    replace: bool = False,
) -> None:
    """Make a data set from an archive or a folder of images.

    Parameters
    ----------
    kind
        cub, mini and omniglot have their standard splits; folder is images of your own, `root/SPLIT/CLASS/*` or
        `root/CLASS/*`.
    paths
        The archive as published, or a folder; several if the data set comes in several files.
    transform
        crop: shorter side to 1.5 times the size, then the centre (default for cub); resize: the whole image (for the
        others).
    name
        Name of the data set; by default the kind (for folder the name of the path), with the transform added if it is
        not the kind's default.
    split_file
        Only for folder: JSON, {"train": [classes], "val": [...], "test": [...]}.
    seed
        Only for folder, without splits of its own: which random split of the classes, 64/16/20 %.
    size
        Pixels a side of the images in the data set; by default 84, for omniglot 28.
    replace
        Replace a data set of that name, once the new one is complete.
    """
    from gradshare.data.sources import import_dataset

    started = time.monotonic()
    with stoppable("nothing is left of the import"), bar(f"importing {kind}", "images") as progress:
        index, target = import_dataset(kind, paths, transform, name, split_file, seed, size, replace, progress)
    seconds = time.monotonic() - started
    say(f"{target.name}: {_size(index)}; classes: {_classes(index)}; in {target}")
    say(f"{seconds:.1f} s, {index.images / seconds:.0f} images/s; to look at it: gradshare data show {target.name}")


@data_app.command
def download(kind: Downloadable, *, folder: Path | None = None) -> None:
    """Download a data set from where it is published; files that are complete are not downloaded again.

    Parameters
    ----------
    kind
        Which data set.
    folder
        Where to keep the archives; by default downloads/KIND in the folder that `gradshare data list` names.
    """
    from gradshare.data.download import fetch, import_command
    from gradshare.data.store import data_folder

    folder = folder or data_folder() / DOWNLOADS / kind
    say(SOURCES[kind].title)
    with stoppable("files that are complete are kept; the same command downloads the others"):
        for file in SOURCES[kind].files:
            with bar(f"downloading {file.name}", "bytes") as progress:
                fetched = fetch(kind, file, folder, progress)
            checked = "checked" if fetched.checked else "not checked: none is published"
            say(f"{fetched.path}: md5 {fetched.md5}, {checked}")
    say(f"next: {import_command(kind, folder)}")


@data_app.command
def verify(*names: str) -> None:
    """Read every image of a data set, and compare them with its index and its checksum.

    Parameters
    ----------
    names
        Names or folders of data sets.
    """
    from gradshare.data import store

    if not names:
        raise UserError("give the name of a data set: gradshare data verify NAME")
    for name in names:
        folder = store.find_store(name)
        if folder is None:
            raise missing(name)
        with bar(f"reading {name}", "images") as progress:
            index, sha256, blank = store.verify(folder, progress)
        _print_counts(index)
        say(f"  images.npy has sha256 {sha256}")
        if blank:
            classes = ", ".join(f"'{each}' ({count})" for each, count in list(blank.items())[:3])
            raise UserError(
                f"{sum(blank.values())} of {index.images} images of {name} are blank (zero everywhere), in"
                f" {len(blank)} classes: {classes}; check the source, and import it again"
            )
        say("  all images match the index; no image is blank")


@data_app.command
def show(
    name: str,
    *,
    split: Literal["train", "val", "test"] = "train",
    ways: int = 5,
    shots: int = 1,
    queries: int = 15,
    tasks: int = 3,
    seed: int = 0,
    classes: bool = False,
    out: Path | None = None,
) -> None:
    """Draw sampled tasks as a contact sheet, a PNG file, and count the classes.

    Parameters
    ----------
    name
        Name or folder of a data set.
    split
        Where the tasks come from.
    ways
        Classes of a task.
    shots
        Support images of a class.
    queries
        Query images of a class.
    tasks
        How many tasks.
    seed
        Which tasks.
    classes
        Also print every class with its number of images.
    out
        The PNG file; by default NAME-SPLIT.png in the current folder.
    """
    for option, value in {"ways": ways, "shots": shots, "queries": queries, "tasks": tasks}.items():
        check_range(option, value, 1, MOST_TASKS if option == "tasks" else MOST)
    check_range("seed", seed, 0, MOST_SEED)
    from gradshare.data.contact_sheet import contact_sheet
    from gradshare.data.dataset import load_dataset
    from gradshare.method.episodes import Shape

    with bar("building the data set, once", "images") as progress:
        dataset = load_dataset(name, progress=progress)
    _print_counts(dataset.index, classes)
    sheet = contact_sheet(dataset, split, Shape(ways, shots, queries), tasks, seed)
    out = out or Path(f"{Path(dataset.name).name}-{split}.png")
    check_output(out, PNG, "a picture of ours")
    out.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(out, format="PNG")
    say(f"contact sheet: {out}")


def _print_counts(index: Index, every_class: bool = False) -> None:
    say(f"{index.name}: {_size(index)}, {index.transform}, from {index.source}")
    for split in SPLITS:
        own = [entry for entry in index.classes if entry.split == split]
        counts = sorted({entry.images for entry in own} or {0})
        each = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
        images = sum(entry.images for entry in own)
        say(f"  {split:<5} {len(own):>5} classes {images:>7} images, {each} a class")
        for entry in own if every_class else ():
            say(f"    {entry.images:>6}  {entry.name}")
