"""Sources of data sets: the table of them, and importing one into the data folder.

A new source is one module in this package with a function `find`, and one row in the table `SOURCES`.
This module imports nothing heavy: the module of a source is imported when it is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gradshare.errors import UserError, check_whole

if TYPE_CHECKING:
    from gradshare.data.store import Index, Progress

Transform = Literal["crop", "resize"]
SMALLEST, LARGEST = 4, 1024  # pixels a side that `size` may ask for
DOWNLOADS = "downloads"  # folder of downloaded archives, in the data folder


@dataclass(frozen=True)
class File:
    """A published file."""

    name: str
    address: str
    md5: str = ""  # "": none is published, so the one that the server announces is used


@dataclass(frozen=True)
class Source:
    """A kind of data set."""

    module: str  # in this package
    title: str
    transform: Transform | None = None  # the default; None: there is no choice
    own_split: bool = False  # the user may give a split
    files: tuple[File, ...] = ()  # what `gradshare data download` fetches
    page: str = ""  # where a person finds these files
    built_in: bool = False  # made on first use, without archives
    terms: str = ""  # of its images, in a sentence for the cards of models


_CUB = "https://data.caltech.edu/records/65de6-vp158"
_OMNIGLOT = "https://github.com/brendenlake/omniglot/raw/master/python/images"
_MINI = "https://zenodo.org/records/7978538/files/mini-imagenet-cache"

SOURCES = {
    "glyphs": Source("glyphs", "characters drawn from the fonts of matplotlib", built_in=True),
    "cub": Source(
        "cub",
        "CUB-200-2011, 11,788 photographs of 200 kinds of bird, 1.2 GB",
        transform="crop",
        files=(File("CUB_200_2011.tgz", f"{_CUB}/files/CUB_200_2011.tgz", "97eceeb196236b17998738112f37df78"),),
        page=f"{_CUB} (mirror: https://zenodo.org/records/8000562)",
        terms="CUB-200-2011 is for non-commercial research and education; its photographs belong to their owners.",
    ),
    "mini": Source(
        "mini_imagenet",
        "MiniImagenet, 60,000 photographs of 100 classes, for non-commercial research",
        transform="resize",
        files=(
            File("mini-imagenet-cache-train.pkl", f"{_MINI}-train.pkl"),
            File("mini-imagenet-cache-val.pkl", f"{_MINI}-validation.pkl"),
            File("mini-imagenet-cache-test.pkl", f"{_MINI}-test.pkl"),
        ),
        page="https://zenodo.org/records/7978538 (where -val is called -validation; or import mini-imagenet.tar.gz, md5"
        " b38f1eb4251fb9459ecc8e7febf9b2eb, from https://github.com/renmengye/few-shot-ssl-public)",
        terms="MiniImagenet comes from ImageNet, whose photographs are for non-commercial research and education.",
    ),
    "omniglot": Source(
        "omniglot",
        "Omniglot, 1,623 handwritten characters, 20 drawings each",
        files=(
            File("images_background.zip", f"{_OMNIGLOT}_background.zip", "68d2efa1b9178cc56df9314c21c6e718"),
            File("images_evaluation.zip", f"{_OMNIGLOT}_evaluation.zip", "6b91aef0f799c5bb55b94e3f2daec811"),
        ),
        page="https://github.com/brendenlake/omniglot, folder python",
        terms="Omniglot is under the MIT licence.",
    ),
    "folder": Source("folder", "your own images, in class folders", transform="resize", own_split=True),
}
BUILT_IN = tuple(name for name, source in SOURCES.items() if source.built_in)
PUBLISHED = tuple(name for name, source in SOURCES.items() if source.files)

if TYPE_CHECKING:
    Kind = str
    Downloadable = str
else:  # the command line takes its choices from here
    Kind = Literal[tuple(name for name in SOURCES if name not in BUILT_IN)]
    Downloadable = Literal[PUBLISHED]


@dataclass(frozen=True)
class Options:
    """How a source reads its archives."""

    transform: Transform = "resize"  # crop: the centre of the image; resize: all of it
    split_file: Path | None = None  # for a source with `own_split`: the classes of each split
    seed: int = 0  # for a source with `own_split`, without a split file: which random split
    size: int | None = None  # pixels a side; None: 84, or 28 for omniglot


def terms_of(name: str) -> str:
    """The terms of a published data set by the name of its store, such as `cub-resize`; "" if it is another one."""
    kind = name.partition("-")[0]
    return SOURCES[kind].terms if kind in PUBLISHED else ""


def missing(name: str) -> UserError:
    """The error for a data set that is not there; for a published one, such as `cub-resize`, with how to make it."""
    from gradshare.data.store import data_folder

    if Path(name).exists():
        return UserError(f"{name} is not a data set: it has no index.json")
    text = f"there is no data set '{name}': it is neither a folder, nor in {data_folder()}, nor built in (glyphs)"
    kind, _, transform = name.partition("-")
    if kind in PUBLISHED and transform in ("", "crop", "resize"):
        chosen = f" --transform {transform}" if transform else ""
        text += f"; to make it: gradshare data download {kind}, then gradshare data import {kind} PATH{chosen}"
    return UserError(text)


def import_dataset(
    kind: Kind,
    paths: Sequence[Path],
    transform: Transform | None,
    name: str | None,
    split_file: Path | None,
    seed: int,
    size: int | None,
    replace: bool,
    progress: Progress,
) -> tuple[Index, Path]:
    """Import a data set into the data folder, as `gradshare data import` says; returns its index and its folder."""
    from gradshare.data.sources.importing import build
    from gradshare.data.store import data_folder, is_store

    source = SOURCES[kind]
    if not paths:
        raise UserError(f"give the path of an archive or a folder: gradshare data import {kind} PATH")
    if not source.own_split and (split_file is not None or seed):
        raise UserError(f"{kind} has its standard split: --split-file and --seed are for gradshare data import folder")
    if source.transform is None and transform is not None:
        raise UserError(f"{kind} has only one transform: leave out --transform")
    target = data_folder() / _checked_name(name or _default_name(kind, paths, transform))
    if replace and target.exists() and not is_store(target):
        raise UserError(f"{target} is not a data set, so it is not replaced")
    if size is not None:
        check_whole("size", size, SMALLEST, LARGEST)
    options = Options(transform or source.transform or "resize", split_file, seed, size)
    return build(kind, paths, target, options, progress, replace), target


def _default_name(kind: Kind, paths: Sequence[Path], transform: Transform | None) -> str:
    name = kind
    if kind == "folder":
        own = os.path.basename(os.path.realpath(paths[0]))
        stem = re.sub(r"\.(zip|tgz|tar|tar\.\w+)$", "", own, flags=re.IGNORECASE)
        name = re.sub(r"[^\w.+-]+", "-", stem).strip("-.")
    return name if transform in (None, SOURCES[kind].transform) else f"{name}-{transform}"


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise UserError(f"a data set cannot have the name '{name}'; --name takes letters, digits and . _ + -")
    if name == DOWNLOADS or name in BUILT_IN:
        raise UserError(f"the name '{name}' is reserved; choose another --name")
    return name
