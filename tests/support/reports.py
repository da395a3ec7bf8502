"""Run folders made by hand, so that every number of a report can be checked on paper."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from gradshare.files import sha256

Curve = list[float | None]
ORIGINAL: Curve = [0.20, 0.30, 0.40, 0.50, 0.60, 0.60]
SHARED: Curve = [0.22, 0.45, 0.60, 0.65, 0.65, 0.62]
HALF_RATE: Curve = [0.20, 0.38, 0.57, 0.64, 0.66, 0.63]
SETTINGS = {
    **{"version": 1, "method": "maml", "dataset": "glyphs", "ways": 5, "shots": 1, "queries": 15, "tasks": 5},
    **{"steps": 2, "inner_lr": 0.4, "outer_lr": 0.001, "epochs": 6, "iterations": 40, "seed": 0},
}
HOSTILE = [
    *("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "'><svg/onload=alert(1)>", "</script><b>x"),
    *("</style></title></svg>", "<!--", "-->]]>", "{{7*7}}${7*7}", "&lt;b&gt;&amp;", "\u202egnp.exe", "java\tscript:x"),
    *("line\nbreak\r\x00\x1b[31m\x07", "=1+1", "@SUM(1)", "-2+3", "+1", "| a | b |", "[2ex]", "*", "`x` [x](http://x)"),
    *("\\input{x}%$#_&~^{}", "%s%n{0}", "![x](http://x)", "\ud800", "' onmouseover='x", "\u2028\u2066x", "tab\there"),
]
PAPER = {"dataset": "cub", "shots": 5, "inner_lr": 0.1, "steps": 5}


def make_run(
    folder: Path,
    arm: str,
    accuracies: Curve,
    *,
    losses: Curve | None = None,
    epochs: list[int] | None = None,
    interval: float | None = 0.02,
    gate: list[float] | None = None,
    finished: bool = True,
    test: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A run folder; every epoch takes 10 s of training, and the half-rate control has half the inner rate."""
    rate = {"inner_lr": 0.2} if arm == "half-rate" else {}
    folder.mkdir(parents=True)
    epochs = epochs or list(range(1, len(accuracies) + 1))
    (folder / "config.json").write_text(json.dumps({"arm": arm, **SETTINGS, **rate, **config}))
    values = {"train_loss": 1.0, "val_interval": interval, "m": gate, "lam": gate}
    lines = [
        {"epoch": epoch, "val_accuracy": accuracy, "val_loss": loss, **values}
        for epoch, accuracy, loss in zip(epochs, accuracies, losses or [1.0] * len(accuracies), strict=True)
    ]
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "timings.jsonl", [{"epoch": e, "train_seconds": 10.0, "val_seconds": 3.0} for e in epochs])
    if finished:
        finish(folder, test)
    return folder


def finish(folder: Path, test: dict[str, Any] | None = None) -> None:
    """The result and DONE, as training writes them."""
    (folder / "summary.json").write_text(json.dumps({"best_epoch": 1, "test": test}))
    names = ("config.json", "metrics.jsonl", "summary.json")
    (folder / "DONE").write_text("".join(f"{sha256((folder / name).read_bytes())}  {name}\n" for name in names))


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def outcome(best: float | None, ensemble: float | None, interval: float = 0.01) -> dict[str, Any]:
    return {
        "tasks": 600,
        "best": {"epoch": 4, "accuracy": best, "interval": interval, "loss": 0.9},
        "ensemble": {"epochs": [4, 5], "accuracy": ensemble, "interval": interval, "loss": 0.8},
    }


def make_trio(folder: Path) -> Path:
    """Sharing is ahead of the original; the half-rate control does nearly as well."""
    make_run(folder / "half-rate", "half-rate", HALF_RATE)
    make_run(folder / "shared", "shared", SHARED, gate=[0.4, 0.2], test=outcome(0.64, 0.66))
    make_run(folder / "original", "original", ORIGINAL, test=outcome(0.58, 0.59))
    return folder


def make_seeds(folder: Path) -> Path:
    """CUB at 5 shots, both arms with two seeds: sharing leads by 10 and by 20 points in each of four epochs."""
    for seed, lead in ((0, 0.1), (1, 0.2)):
        base = [0.30, 0.40, 0.50, 0.50]
        test = outcome(0.5, 0.80 + seed / 50)
        make_run(folder / "original" / f"seed-{seed}", "original", list(base), seed=seed, test=test, **PAPER)
        led: Curve = [value + lead for value in base]
        make_run(folder / "shared" / f"seed-{seed}", "shared", led, seed=seed, gate=[0.4], test=test, **PAPER)
    return folder


def make_grid(folder: Path) -> Path:
    """Two data sets, three arms with different pace, two seeds, and runs that came to nothing."""
    paces = {"original": 8, "shared": 4, "half-rate": 6}
    for data, top in (("cub", 0.8), ("mini", 0.6)):
        for arm, pace in paces.items():
            for seed in (0, 1):
                epochs = range(1, 13)
                curve: Curve = [round(0.2 + (top - 0.2) * (1 - math.exp(-e / pace)) + seed / 100, 4) for e in epochs]
                make_run(
                    folder / f"{data}-{arm}" / f"seed-{seed}",
                    arm,
                    curve,
                    gate=[0.45, 0.4] if arm == "shared" else None,
                    test=outcome(top, top + pace / 1000 + seed / 50),
                    **{**PAPER, "dataset": data, "inner_lr": 0.05 if arm == "half-rate" else 0.1, "seed": seed},
                )
    make_run(folder / "late" / "seed-0", "shared", [0.2, 0.3], finished=False, **{**PAPER, "inner_lr": 1.0})
    make_run(folder / "lost" / "seed-0", "original", [0.2], finished=False, **{**PAPER, "inner_lr": 1.0})
    note = folder / ".grid" / "lost" / "seed-0.failure.txt"
    note.parent.mkdir(parents=True)
    note.write_text("out of memory\ntraceback\n")
    return folder


def make_many(folder: Path, experiments: int, epochs: int = 20) -> Path:
    """Experiments of two arms, at different inner rates."""
    for number in range(experiments):
        for arm, pace in (("original", 8), ("shared", 4 + number % 7)):
            curve: Curve = [0.2 + 0.5 * (1 - math.exp(-epoch / pace)) for epoch in range(1, epochs + 1)]
            gate = [0.4, 0.42, 0.44, 0.46, 0.5] if arm == "shared" else None
            options = {"inner_lr": round(0.01 * (number + 1), 2), "steps": 5}
            place = folder / f"experiment-{number:03d}" / arm
            make_run(place, arm, curve, gate=gate, test=outcome(0.6, 0.61), interval=0.01, **options)
    return folder


def make_hostile(folder: Path) -> Path:
    """An experiment for each hostile name, which everything in it has; three are data sets, with their own figures."""
    for number, name in enumerate(HOSTILE):
        plain = re.sub(r"[/\0\ud800]", "_", name)
        place = folder / f"{number} {plain}"
        for arm in ("original", name):
            options = {"dataset": HOSTILE[number % 3], "method": name, name: name, "precision": [name]}
            make_run(place / ("o" if arm == "original" else "s"), arm, [0.2, 0.3 + number / 100], gate=[0.5], **options)
        note = folder / ".grid" / place.name / "s.failure.txt"
        note.parent.mkdir(parents=True)
        note.write_bytes(name.encode(errors="replace"))
        (place / "s" / "DONE").unlink()
    return folder
