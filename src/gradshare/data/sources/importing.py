"""What the sources share: from the files of archives to the rows of a store.

The module of a source has one function, `find(archives, options)`. It looks at the names of the files, or opens
arrays, and returns a `Found`: the classes, and a generator of images. `build` then writes the store: it reads the
archives once, in stored order, and decodes in a few threads. Memory does not grow with the archives.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

from gradshare.data import splits
from gradshare.data.archive import SUFFIXES, Archive, open_archive
from gradshare.data.sources import SOURCES, Options
from gradshare.data.sources.pixels import decode
from gradshare.data.store import ClassEntry, Image, Index, Progress, building, read_index
from gradshare.errors import UserError
from gradshare.method import SPLITS

Archives = Sequence[Archive]
Place = tuple[int, str]  # which of the archives, and the name of the member in it
ByClass = dict[tuple[str, str], list[Place]]  # (split, or "" where no folder tells it; class) -> its images
Decoder = Callable[[bytes, str], Image]  # content and name of a member -> [height, width, channels]
Rows = Generator[tuple[int, Image], None, None]  # images with their rows, in any order
Content = TypeVar("Content")

IMAGES = (".jpg", ".jpeg", ".png", ".webp")
SPLIT_FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
SIZE = 84  # pixels a side, where the user does not say
MIN_IMAGES = 2  # in a class: one for the support set, one for the query set
WORKERS = min(4, os.cpu_count() or 1)  # decoding is most of the work, and Pillow releases the interpreter's lock
IN_FLIGHT, BYTES_IN_FLIGHT = 32, 16 << 20  # images, and their compressed bytes, that may wait to be written
PROGRESS_EVERY = 50  # images


class Found(NamedTuple):
    """What a source found in its archives."""

    classes: tuple[ClassEntry, ...]  # train, val, test; by name within each
    rows: Rows
    image: tuple[int, int, int]  # height, width, channels
    transform: str  # what is done to the images, for the index
    note: str  # how the classes were split, for the index


class Block(NamedTuple):
    """The images of a class that an archive holds as an array."""

    images: int
    load: Callable[[], Iterable[Image]]  # -> [images, height, width, channels]


def build(
    kind: str,
    paths: Sequence[Path],
    folder: Path,
    options: Options = Options(),
    progress: Progress = None,
    replacing: bool = False,
) -> Index:
    """Build the store `folder` from archives or folders.

    Args:
        kind: a key of `SOURCES`.
        paths: archives or folders; none for a source that is built in. A folder of archives stands for them.
        folder: where the store will be.
        progress: called with (images done, images in all).
        replacing: take the place of the store that may be there, once the new one is complete.
    """
    if folder.exists() and not replacing:
        raise UserError(f"{folder} exists; --replace replaces it, --name gives the new data set another name")
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\b")  # of odd but readable images; also in the threads below
        resolved = [each for path in paths for each in (_archives_in(path) or [path])]
        archives = [stack.enter_context(open_archive(path)) for path in resolved]
        found = import_module(f"{__package__}.{SOURCES[kind].module}").find(archives, options)
        source = f"{names_of(archives)}; {found.note}" if archives else found.note
        index = Index(folder.name, found.image, found.classes, found.transform, source, _checksum(archives))
        with closing(found.rows) as rows:
            return _write(folder, index, rows, progress, replacing)


def _archives_in(path: Path) -> list[Path]:
    """The archives of a folder that holds archives and no folders."""
    try:
        inside = sorted(child for child in path.iterdir() if not child.name.startswith("."))
    except OSError:  # not a folder, or not readable: opening it says so
        return []
    if any(child.is_dir() for child in inside):
        return []
    return [child for child in inside if child.name.lower().endswith(SUFFIXES)]


def names_of(archives: Archives) -> str:
    return ", ".join(archive.name for archive in archives)


def _checksum(archives: Archives) -> str:
    """SHA-256 of the one archive, or of the list of the checksums of several."""
    each = [archive.sha256() for archive in archives]
    return each[0] if len(each) == 1 else hashlib.sha256("\n".join(each).encode()).hexdigest() if each else ""


def _write(folder: Path, index: Index, rows: Rows, progress: Progress, replacing: bool) -> Index:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder.parent).free < index.bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with building(folder, index, replacing) as store:
            for done, (row, image) in enumerate(rows, 1):
                store.put(row, image)
                if progress is not None and (done % PROGRESS_EVERY == 0 or done == index.images):
                    progress(done, index.images)
    except OSError as error:
        size = f"its images take {index.bytes / 2**20:.0f} MiB"
        raise UserError(f"cannot write {index.name} to {folder.parent}: {error}; {size}; nothing was kept") from None
    built = read_index(folder)
    if replace(built, images_sha256="") != index:
        raise UserError(f"another import finished {folder} first, from other data; choose another name")
    return built


# Finding the classes


def find_classes(archives: Archives, *, split_folders: bool = True, below: str = "") -> ByClass:
    """Find the images `.../<class>/*` or `.../<split>/<class>/*`, by their class folders.

    Args:
        split_folders: whether folders named train, val and test are splits.
        below: if there are images in `.../<below>/<class>/`, only those count.
    """
    found: ByClass = {}
    for number, archive in enumerate(archives):
        names = [member.name for member in archive.members() if member.name.lower().endswith(IMAGES)]
        if below:
            names = [name for name in names if name.split("/")[-3:-2] == [below]] or names
        for key, own in _class_folders(names, archive.name, split_folders).items():
            found.setdefault(key, []).extend((number, name) for name in own)
    if not found:
        raise UserError(f"there are no JPEG, PNG or WebP images in {names_of(archives)}")
    if len({split == "" for split, _ in found}) > 1:
        raise UserError(f"some of {names_of(archives)} have folders train, val and test, and some do not")
    return found


def _class_folders(names: list[str], archive: str, split_folders: bool) -> dict[tuple[str, str], list[str]]:
    folders: dict[tuple[str, str], list[str]] = {}
    roots: dict[str, str] = {}  # where the class or split folders are -> an image there
    for name in names:
        base, _, folder = name.rpartition("/")[0].rpartition("/")
        root, _, last = base.rpartition("/")
        split = SPLIT_FOLDERS.get(last, "") if split_folders else ""
        roots.setdefault(f"{root}/*" if split else base, name)
        folders.setdefault((split, folder), []).append(name)
    if len(roots) > 1 or any(folder == "" for _, folder in folders):
        examples = " and ".join(f"'{name}'" for name in list(roots.values())[:2])
        raise UserError(
            f"{archive} has images at {examples}, but they must all be in <class>/ or all in <split>/<class>/ folders"
        )
    return folders


def by_standard(
    found: Mapping[tuple[str, str], Content], name: str, archives: Archives
) -> dict[tuple[str, str], Content]:
    """Give the classes their standard split. All of its classes must be there, and no others."""
    standard, where, of = splits.standard_split(name).by_class(), names_of(archives), f"the standard split of {name}"
    names = {each for _, each in found}
    if others := sorted(names - set(standard)):
        some = splits.some(others)
        raise UserError(f"{len(others)} classes of {where} are not in {of}: {some}; import them as a folder")
    if missing := sorted(set(standard) - names):
        some = splits.some(missing)
        raise UserError(f"{len(missing)} of the {len(standard)} classes of {of} are not in {where}: {some}")
    for split, each in found:
        if split not in ("", standard[each]):
            raise UserError(
                f"class '{each}' is in a folder {split} of {where}, but in {standard[each]} of {of};"
                " import another split as a folder"
            )
    return {(standard[each], each): content for (_, each), content in found.items()}


def file_name(place: Place) -> str:
    return place[1].rpartition("/")[2]


# From classes to images


def from_photos(archives: Archives, by_class: ByClass, options: Options, note: str) -> Found:
    """Image files, brought to one size."""
    size = options.size or SIZE
    decoder = partial(decode, transform=options.transform, size=size)
    return from_files(archives, by_class, decoder, (size, size, 3), options.transform, note)


def from_files(
    archives: Archives,
    by_class: ByClass,
    decoder: Decoder,
    image: tuple[int, int, int],
    transform: str,
    note: str,
) -> Found:
    """Image files; those of a class are ordered by their file names."""
    rows: dict[Place, int] = {}
    for split, name in _ordered(by_class):
        places = sorted(by_class[split, name], key=lambda place: (file_name(place), place))
        twice = [file_name(a) for a, b in pairwise(places) if file_name(a) == file_name(b)]
        if twice:
            raise UserError(f"class '{name}' has {len(twice)} images twice: {splits.some(twice)}")
        shared = [place[1] for place in places if place in rows]
        if shared:
            raise UserError(f"class '{name}' shares {len(shared)} images with another class: {splits.some(shared)}")
        rows.update(zip(places, range(len(rows), len(rows) + len(places)), strict=True))
    classes = _entries({key: len(places) for key, places in by_class.items()})
    return Found(classes, decoded(archives, rows, decoder), image, transform, note)


def from_arrays(
    blocks: Mapping[tuple[str, str], Block],  # by split and class
    image: tuple[int, int, int],
    transform: str,
    note: str,
) -> Found:
    """Images that are arrays already; one class is in memory at a time."""
    rows = (row for row in enumerate(each for key in _ordered(blocks) for each in blocks[key].load()))
    return Found(_entries({key: block.images for key, block in blocks.items()}), rows, image, transform, note)


def _ordered(keys: Mapping[tuple[str, str], object]) -> list[tuple[str, str]]:
    return sorted(keys, key=lambda key: (SPLITS.index(key[0]), key[1]))


def _entries(counts: Mapping[tuple[str, str], int]) -> tuple[ClassEntry, ...]:
    seen: dict[str, str] = {}
    for split, name in _ordered(counts):
        if seen.setdefault(name, split) != split:
            raise UserError(f"class '{name}' is in both {seen[name]} and {split}; splits must not share classes")
        if counts[split, name] < MIN_IMAGES:
            raise UserError(f"class '{name}' has {counts[split, name]} images; a class needs at least {MIN_IMAGES}")
    return tuple(ClassEntry(name, split, counts[split, name]) for split, name in _ordered(counts))


def decoded(archives: Archives, rows: Mapping[Place, int], decoder: Decoder) -> Rows:
    """Read the archives and decode in a few threads; what waits to be written is bounded."""
    waiting: deque[tuple[int, int, Future[Image]]] = deque()  # row, compressed bytes, image
    held = 0
    pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="decode")
    try:
        for row, name, content in _contents(archives, rows):
            while waiting and (len(waiting) >= IN_FLIGHT or held + len(content) > BYTES_IN_FLIGHT):
                first, size, image = waiting.popleft()
                held -= size
                yield first, image.result()
            held += len(content)
            waiting.append((row, len(content), pool.submit(decoder, content, name)))
        for row, _, image in waiting:
            yield row, image.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _contents(archives: Archives, rows: Mapping[Place, int]) -> Iterator[tuple[int, str, bytes]]:
    for number, archive in enumerate(archives):
        own = {name: row for (which, name), row in rows.items() if which == number}
        for name, content in archive.read(own):
            yield own[name], name, content
