"""Imports a data set by its kind into the data folder: which importer, which name, and what becomes of an old one.

Imports nothing heavy; each kind's module is imported when it is asked for.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gradshare.errors import UserError

if TYPE_CHECKING:
    from gradshare.data.catalogue import Progress
    from gradshare.data.store import Index

Kind = Literal["cub", "mini", "omniglot", "folder"]
Transform = Literal["crop", "resize"]
DEFAULT_TRANSFORM: dict[Kind, Transform] = {"cub": "crop", "mini": "resize", "folder": "resize"}
DOWNLOADS = "downloads"  # below the data folder: archives, by kind


def import_dataset(
    kind: Kind,
    paths: Sequence[Path],
    transform: Transform | None = None,
    name: str | None = None,
    *,
    split_file: Path | None = None,
    seed: int = 0,
    replace: bool = False,
    progress: Progress = None,
) -> tuple[Index, Path]:
    """Import archives or folders as a data set in the data folder; gives its index and where it is.

    Args:
        kind: `"cub"`, `"mini"`, `"omniglot"` or `"folder"`.
        paths: the archive or the folder, or several that make up one data set.
        transform: `"crop"` or `"resize"`; by default the kind's own.
        name: of the data set; by default the kind (for a folder its own name), and a transform that is not the default.
        split_file: for a folder, the classes of each split.
        seed: for a folder without splits, which random split.
        replace: whether a data set of that name makes way, once the new one is complete.
        progress: called with (images done, images in all).
    """
    from gradshare.data.catalogue import data_folder

    importer = _importer(kind, paths, transform, split_file, seed)
    target = data_folder() / _checked_name(name or _default_name(kind, paths, transform))
    if target.exists() and not replace:
        raise UserError(f"{target} is there already; --replace replaces it, --name gives the new one another name")
    return _replacing(target, lambda folder: importer(folder, progress)), target


def how_to_make(name: str) -> str:
    """The commands that make a known data set of that name, `cub` or `cub-resize`; "" if it is not a known one."""
    kind, _, transform = name.partition("-")
    if kind not in ("cub", "mini", "omniglot") or transform not in ("", "crop", "resize"):
        return ""
    chosen = f" --transform {transform}" if transform else ""
    return f"gradshare data download {kind}, then gradshare data import {kind} PATH{chosen}"


def _importer(
    kind: Kind, paths: Sequence[Path], transform: Transform | None, split_file: Path | None, seed: int
) -> Callable[[Path, Progress], Index]:
    """The importer of a kind, with everything but where to and what to show."""
    if not paths:
        raise UserError(f"say what to import: gradshare data import {kind} PATH")
    if kind != "folder" and (split_file is not None or seed):
        raise UserError(f"{kind} has its standard split: --split-file and --seed are for gradshare data import folder")
    if kind == "omniglot":
        if transform is not None:
            raise UserError("omniglot has one transform, 28 x 28 by the mean of areas: leave out --transform")
        from gradshare.data.omniglot import import_omniglot

        return lambda folder, progress: import_omniglot(paths, folder, progress=progress)
    chosen = transform or DEFAULT_TRANSFORM[kind]
    if kind == "folder":
        from gradshare.data.folder import import_folder

        return lambda folder, progress: import_folder(paths, folder, chosen, progress, split_file=split_file, seed=seed)
    from gradshare.data.cub import import_cub
    from gradshare.data.mini_imagenet import import_mini_imagenet

    importer = import_cub if kind == "cub" else import_mini_imagenet
    return lambda folder, progress: importer(paths, folder, chosen, progress)


def _default_name(kind: Kind, paths: Sequence[Path], transform: Transform | None) -> str:
    if kind == "folder":
        own = os.path.basename(os.path.realpath(paths[0]))
        stem = re.sub(r"\.(zip|tgz|tar|tar\.\w+)$", "", own, flags=re.IGNORECASE)
        name = re.sub(r"[^\w.+-]+", "-", stem).strip("-.")
    else:
        name = kind
    return name if transform in (None, DEFAULT_TRANSFORM.get(kind)) else f"{name}-{transform}"


def _checked_name(name: str) -> str:
    from gradshare.data.catalogue import BUILTIN

    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise UserError(f"a data set cannot be called '{name}'; choose --name of letters, digits and . _ + -")
    if name == DOWNLOADS or name in BUILTIN:
        raise UserError(f"'{name}' means something else here; choose another --name")
    return name


def _replacing(target: Path, build: Callable[[Path], Index]) -> Index:
    """Build a store; one that is there already makes way only when the new one is complete."""
    if not target.exists():
        return build(target)
    if not (target / "index.json").is_file():
        raise UserError(f"{target} is not a data set, so it is not replaced")
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        new, old = Path(temporary) / target.name, Path(temporary) / f"{target.name}.old"
        index = build(new)
        try:
            target.rename(old)
            new.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
    return index
