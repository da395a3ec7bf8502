"""From the members of archives and folders to the rows of a store.

An importer looks at names first and plans which image goes to which row; then the sources are read once, in the order
in which they are stored, and every image is decoded and written to its row. Memory stays constant.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from gradshare.data.catalogue import Progress
from gradshare.data.entries import FILE, Entry
from gradshare.data.sources import Source, open_source
from gradshare.data.splits import some
from gradshare.data.store import ClassEntry, Image, Index, building, read_index
from gradshare.errors import UserError
from gradshare.method import SPLITS

Paths = Path | Sequence[Path]
Place = tuple[int, str]  # which of the sources, and the member's name in it
Decoder = Callable[[bytes, str], Image]  # content and name of a member -> [height, width, channels]

MIN_IMAGES = 2  # in a class: one to learn from, one to ask about; a run checks its own shots and queries
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".npz")
WORKERS = min(4, os.cpu_count() or 1)  # decoding is most of the work, and Pillow lets go of the interpreter meanwhile
IN_FLIGHT, BYTES_IN_FLIGHT = 32, 16 * 2**20  # at most so many images, or so many compressed bytes, wait to be written
PROGRESS_EVERY = 50  # images
NOTHING = re.compile("(?!)")


class Plan(NamedTuple):
    classes: list[ClassEntry]  # train, val, test; by name within each
    rows: dict[Place, int]  # images of a class by their file names


def plan_classes(by_class: Mapping[tuple[str, str], Collection[Place]]) -> Plan:
    """Give every image its row, from the images of each (split, class)."""
    order = sorted(by_class, key=_rank)
    check_disjoint(order)
    classes: list[ClassEntry] = []
    rows: dict[Place, int] = {}
    for split, name in order:
        places = sorted(by_class[split, name], key=lambda place: (file_name(place), place))
        _check_class(name, [file_name(place) for place in places])
        shared = [place[1] for place in places if place in rows]
        if shared:
            raise UserError(f"class '{name}' shares {len(shared)} images with another class: {some(shared)}")
        rows.update(zip(places, range(len(rows), len(rows) + len(places)), strict=True))
        classes.append(ClassEntry(name, split, len(places)))
    return Plan(classes, rows)


def check_disjoint(keys: Iterable[tuple[str, str]]) -> None:
    """Refuse a class that stands in two splits."""
    seen: dict[str, str] = {}
    for split, name in keys:
        if seen.setdefault(name, split) != split:
            raise UserError(f"class '{name}' is in both {seen[name]} and {split}; splits must not share classes")


def file_name(place: Place) -> str:
    return place[1].rpartition("/")[2]


def _check_class(name: str, files: list[str]) -> None:
    check_count(name, len(files))
    twice = [a for a, b in pairwise(files) if a == b]
    if twice:
        raise UserError(f"class '{name}' has {len(twice)} images twice: {some(twice)}")


def check_count(name: str, images: int) -> None:
    """Refuse a class from which no task can be made."""
    if images < MIN_IMAGES:
        raise UserError(f"class '{name}' has {images} image{'s' * (images != 1)}; a class needs at least {MIN_IMAGES}")


def import_planned(
    sources: Sequence[Source],
    plan: Plan,
    folder: Path,
    decoder: Decoder,
    *,
    image: tuple[int, int, int],  # height, width, channels
    transform: str,
    note: str,
    progress: Progress = None,
) -> Index:
    """Decode the planned members of the sources into a store at `folder`."""
    check_vacant(folder)
    index = Index(folder.name, image, plan.classes, transform, describe(sources, note), checksum(sources))
    with closing(decoded(sources, plan.rows, decoder)) as rows:
        return write_rows(folder, index, rows, progress)


class Block(NamedTuple):
    """The images of a class that a source holds as an array."""

    images: int
    load: Callable[[], Image]  # [images, height, width, channels]


def import_blocks(
    sources: Sequence[Source],
    blocks: Mapping[tuple[str, str], Block],  # by split and class
    folder: Path,
    *,
    image: tuple[int, int, int],
    transform: str,
    note: str,
    progress: Progress = None,
) -> Index:
    """Write arrays into a store at `folder`, one class at a time."""
    check_vacant(folder)
    order = sorted(blocks, key=_rank)
    check_disjoint(order)
    for split, name in order:
        check_count(name, blocks[split, name].images)
    classes = [ClassEntry(name, split, blocks[split, name].images) for split, name in order]
    index = Index(folder.name, image, classes, transform, describe(sources, note), checksum(sources))
    return write_rows(folder, index, enumerate(each for key in order for each in blocks[key].load()), progress)


def _rank(key: tuple[str, str]) -> tuple[int, str]:
    return SPLITS.index(key[0]), key[1]


def write_rows(folder: Path, index: Index, rows: Iterable[tuple[int, Image]], progress: Progress = None) -> Index:
    """Build a store from (row, image) pairs in any order; a full disk or the like is the documented error."""
    with _disk_errors(folder, index):
        _check_space(folder, index)
        with building(folder, index) as store:
            for done, (row, image) in enumerate(rows, 1):
                store.put(row, image)
                if progress is not None and (done % PROGRESS_EVERY == 0 or done == index.images):
                    progress(done, index.images)
    built = read_index(folder)
    if built._replace(images_sha256="") != index:
        raise UserError(f"another import finished {folder} first, from other data; choose another name")
    return built


def decoded(
    sources: Sequence[Source], rows: Mapping[Place, int], decoder: Decoder
) -> Generator[tuple[int, Image], None, None]:
    """Read the sources and decode in a few threads, with a bound on what waits; in the order of the sources."""
    waiting: deque[tuple[int, int, Future[Image]]] = deque()  # row, compressed bytes, image
    held = 0
    pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="decode")
    try:
        for number, source in enumerate(sources):
            own = {name: row for (own, name), row in rows.items() if own == number}
            for name, content in source.read(own) if own else ():
                while waiting and (len(waiting) >= IN_FLIGHT or held + len(content) > BYTES_IN_FLIGHT):
                    row, size, image = waiting.popleft()
                    held -= size
                    yield row, image.result()
                held += len(content)
                waiting.append((own[name], len(content), pool.submit(decoder, content, name)))
        for row, _, image in waiting:
            yield row, image.result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def opened(paths: Paths, loose: re.Pattern[str] = NOTHING) -> Iterator[list[Source]]:
    """Open an archive or a folder, or several, or the archives that lie in a folder.

    loose: files by these names are also taken, each as a source with one member.
    """
    with ExitStack() as stack:
        yield [
            stack.enter_context(_open_file(path) if loose.fullmatch(path.name) else open_source(path))
            for path in resolve(paths)
        ]


def _open_file(path: Path) -> Source:
    return Source(path, lambda: iter([Entry(path.name, path.stat().st_size, FILE, lambda: path.open("rb"))]))


def resolve(paths: Paths) -> list[Path]:
    """The archives and folders to read: a folder that holds archives and no folders stands for its archives."""
    given = [paths] if isinstance(paths, Path) else list(paths)
    if not given:
        raise UserError("name at least one archive or folder to import")
    resolved = [each for path in given for each in (_archives_in(path) or [path])]
    twice = [str(path) for path in resolved if resolved.count(path) > 1]
    if twice:
        raise UserError(f"{twice[0]} is given twice")
    return resolved


def _archives_in(path: Path) -> list[Path]:
    try:
        inside = sorted(child for child in path.iterdir() if not child.name.startswith("."))
    except OSError:  # not a folder, or not to be read: what opens it says so
        return []
    if any(child.is_dir() for child in inside):
        return []
    return [child for child in inside if child.name.lower().endswith(ARCHIVES)]


def describe(sources: Sequence[Source], note: str) -> str:
    """What a store was made from, for its index: the names of the files, never where they lay."""
    return f"{names_of(sources)}; {note}"


def names_of(sources: Sequence[Source]) -> str:
    return ", ".join(source.name for source in sources)


def checksum(sources: Sequence[Source]) -> str:
    """SHA-256 of the one source, or of the line-by-line list of the checksums of several."""
    each = [source.sha256() for source in sources]
    return each[0] if len(each) == 1 else sha256("\n".join(each).encode()).hexdigest()


def check_vacant(folder: Path) -> None:
    """Refuse to import over what is there, before any work is done."""
    if folder.exists():
        raise UserError(f"{folder} is there already; choose another name, or take it away first")


def _check_space(folder: Path, index: Index) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder.parent).free < _bytes(index):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _bytes(index: Index) -> int:
    return index.images * math.prod(index.image)


@contextmanager
def _disk_errors(folder: Path, index: Index) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need = f"the images of {index.name} take {_bytes(index) / 2**20:.0f} MiB"
            raise UserError(f"the disk of {folder.parent} is full: {need}; nothing was kept") from None
        raise UserError(f"importing {index.name} into {folder.parent} failed: {error}; nothing was kept") from None
