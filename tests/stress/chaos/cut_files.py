"""Files with a line an epoch, cut anywhere: rebuilt from the checkpoint."""

from __future__ import annotations

import shutil

from .children import gradshare
from .damage import stopped
from .settings import Chaos


def cut(chaos: Chaos) -> None:
    """metrics.jsonl and timings.jsonl end in the middle of a line, or of a character, or are gone."""
    run = chaos.runs[1]
    unfinished = stopped(chaos, run)
    for origin, state in ((unfinished, "unfinished"), (run.whole, "finished")):
        for name in ("metrics.jsonl", "timings.jsonl"):
            size = (origin / name).stat().st_size
            for length in range(0, size, 17 if chaos.thorough else 199):
                with chaos.trying(f"{name} cut, {state} run", f"{run.name}, {length} of {size} bytes") as place:
                    shutil.copytree(origin, place / "run")
                    with (place / "run" / name).open("r+b") as file:
                        file.truncate(length)
                    reported = gradshare("report", place / "run") if length % 5 == 0 else None
                    if reported is not None:
                        reported.must_be_tidy()
                        reported.must(reported.code in (0, 2), "a report on a cut file failed")
                        for made in ("report.html", "table.md", "table.csv"):
                            (place / "run" / made).unlink(missing_ok=True)
                    run.finish(place / "run")
