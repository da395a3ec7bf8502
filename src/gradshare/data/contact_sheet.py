"""A contact sheet: sampled tasks as a picture, to see what a run will see.

A task is one block. A class is one row: its support images, then its query images, and its name below.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont

from gradshare.data.dataset import Dataset
from gradshare.data.store import Image
from gradshare.method.episodes import Shape, task_key

CELL, LARGEST = 84, 168  # pixels; smaller images are enlarged to about the first, larger ones shrunk to the second
MARGIN, GAP, BETWEEN = 20, 2, 16  # pixels around all, between images, between support and query
LINE, HEADING = 18, 46  # height of the name of a class, and of the title of a task
PAPER, INK, QUIET, RULE = "#ffffff", "#1a1a1a", "#6b6b6b", "#d0d0d0"
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class Task(NamedTuple):
    """What a block of the sheet shows."""

    names: list[str]  # [ways]
    images: Image  # [ways, shots + queries, H, W, C]


def draw_tasks(dataset: Dataset, split: str, shape: Shape, tasks: int, seed: int) -> list[Task]:
    """The tasks that `dataset.sample` gives for the same key, with the names of their classes."""
    drawn, images = dataset.draw(split, shape, tasks, task_key(seed, split)), np.asarray(dataset.images)
    return [
        Task([dataset.index.classes[place].name for place in classes], images[rows])
        for classes, rows in zip(drawn.units, drawn.rows, strict=True)
    ]


def contact_sheet(dataset: Dataset, split: str, shape: Shape, tasks: int = 3, seed: int = 0) -> Pillow.Image:
    """Draw sampled tasks of a split: as many as `tasks` says, chosen by `seed`."""
    drawn = draw_tasks(dataset, split, shape, tasks, seed)  # first: raises an error for a shape that is too large
    height, width, _ = dataset.index.image
    layout = _Layout(shape, height, width)
    title = f"{dataset.name} · {split} · {shape.ways}-way {shape.shots}-shot"
    sheet = Pillow.new("RGB", (layout.width, layout.height(tasks)), PAPER)
    for number, task in enumerate(drawn):
        top = layout.task_top(number)
        _write_heading(sheet, layout, top, f"{title} · task {number + 1}")
        for way, (name, images) in enumerate(zip(task.names, task.images, strict=True)):
            _draw_row(sheet, layout, top + HEADING + way * layout.row, name, images)
    return sheet


class _Layout:
    """Positions on the sheet, in pixels."""

    def __init__(self, shape: Shape, height: int, width: int) -> None:
        self.shape = shape
        side = max(height, width)
        scale = LARGEST / side if side > LARGEST else max(1, CELL // side)
        self.cell = (max(1, round(width * scale)), max(1, round(height * scale)))
        self.row = self.cell[1] + LINE + 10
        self.width = max(self.left(shape.shots + shape.queries) - GAP + MARGIN, 320)

    def left(self, place: int) -> int:
        """Left edge of the image at a place of the row."""
        return MARGIN + place * (self.cell[0] + GAP) + (BETWEEN if place >= self.shape.shots else 0)

    def task_top(self, number: int) -> int:
        return MARGIN + number * (HEADING + self.shape.ways * self.row + MARGIN)

    def height(self, tasks: int) -> int:
        return self.task_top(tasks) - MARGIN


def _write_heading(sheet: Pillow.Image, layout: _Layout, top: int, title: str) -> None:
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, top), title, INK, _font(16, bold=True))
    for place, word in ((0, "support"), (layout.shape.shots, "query")):
        draw.text((layout.left(place), top + 26), word, QUIET, _font(12))


def _draw_row(sheet: Pillow.Image, layout: _Layout, top: int, name: str, images: Image) -> None:
    for place, image in enumerate(images):
        sheet.paste(_scaled(image, layout.cell), (layout.left(place), top))
    draw = ImageDraw.Draw(sheet)
    middle = layout.left(layout.shape.shots) - (BETWEEN + GAP) // 2
    draw.line((middle, top, middle, top + layout.cell[1] - 1), RULE)
    draw.text((MARGIN, top + layout.cell[1] + 2), _shortened(name, layout.width - 2 * MARGIN), QUIET, _font(12))


def _scaled(image: Image, cell: tuple[int, int]) -> Pillow.Image:
    grey, shrunk = image.shape[-1] == 1, image.shape[1] > cell[0]
    method = Pillow.Resampling.BILINEAR if shrunk else Pillow.Resampling.NEAREST
    return Pillow.fromarray(image[..., 0] if grey else image[..., :3]).resize(cell, method)


def _shortened(name: str, width: int) -> str:
    """As much of the name as fits."""
    font, name = _font(12), " ".join(name[:500].split())
    text = name
    while text and font.getlength(text) > width:
        name = name[:-1]
        text = name.rstrip() + "…"
    return text


@cache
def _font(size: int, bold: bool = False) -> Font:
    """DejaVu Sans, which has most scripts, from matplotlib's files; without matplotlib, Pillow's own font."""
    found = find_spec("matplotlib")
    if found is not None and found.origin is not None:
        path = Path(found.origin).parent / "mpl-data" / "fonts" / "ttf" / f"DejaVuSans{'-Bold' if bold else ''}.ttf"
        if path.is_file():
            return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)
    return ImageFont.load_default(size)
