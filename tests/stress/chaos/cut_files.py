"""Files with one line per epoch, cut anywhere: rebuilt from the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

from .children import gradshare
from .damage import stopped
from .settings import Chaos


def unfinished(chaos: Chaos, random: Random) -> Iterator[None]:
    return _cut(chaos, random, stopped(chaos, chaos.runs[1]), "unfinished")


def finished(chaos: Chaos, random: Random) -> Iterator[None]:
    return _cut(chaos, random, chaos.runs[1].whole, "finished")


def _cut(chaos: Chaos, random: Random, origin: Path, state: str) -> Iterator[None]:
    """metrics.jsonl and timings.jsonl end in the middle of a line, or of a character, or are empty."""
    run = chaos.runs[1]
    sizes = {name: (origin / name).stat().st_size for name in ("metrics.jsonl", "timings.jsonl")}
    cuts = [(name, length) for name, size in sizes.items() for length in range(0, size, 17)]
    for name, length in random.sample(cuts, len(cuts)):
        with chaos.trying(f"{name} cut, {state} run", f"{run.name}, {length} of {sizes[name]} bytes") as place:
            shutil.copytree(origin, place / "run")
            with (place / "run" / name).open("r+b") as file:
                file.truncate(length)
            if length % 5 == 0:
                _report(place / "run")
            run.finish(place / "run")
        yield


def _report(folder: Path) -> None:
    before = {*folder.iterdir()}
    reported = gradshare("report", folder)
    reported.must_be_tidy()
    reported.must(reported.code in (0, 2), "a report on a cut file failed")
    for made in {*folder.iterdir()} - before:
        made.unlink()
