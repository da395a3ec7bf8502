"""A contact sheet: sampled tasks as a picture, to see what a run will see.

A task is one block. A class is one row: its support images, then its query images, and its name below.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import matplotlib
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


def contact_sheet(dataset: Dataset, split: str, shape: Shape, tasks: int = 3, seed: int = 0) -> Pillow.Image:
    """Draw the tasks that `dataset.sample` gives for the key of `seed`."""
    drawn = dataset.draw(split, shape, tasks, task_key(seed, split))  # first: raises an error for too large a shape
    height, width, _ = dataset.index.image
    layout = _Layout(shape, height, width)
    title = f"{dataset.name} · {split} · {shape.ways}-way {shape.shots}-shot"
    sheet = Pillow.new("RGB", (layout.width, layout.height(tasks)), PAPER)
    for number, (classes, rows) in enumerate(zip(drawn.units, drawn.rows, strict=True)):
        top = layout.task_top(number)
        _write_heading(sheet, layout, top, f"{title} · task {number + 1}")
        for way, (place, own) in enumerate(zip(classes, rows, strict=True)):
            name, images = dataset.index.classes[place].name, np.asarray(dataset.images[own])
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
    draw.text((MARGIN, top + layout.cell[1] + 2), " ".join(name.split()), QUIET, _font(12))


def _scaled(image: Image, cell: tuple[int, int]) -> Pillow.Image:
    grey, shrunk = image.shape[-1] == 1, image.shape[1] > cell[0]
    method = Pillow.Resampling.BILINEAR if shrunk else Pillow.Resampling.NEAREST
    return Pillow.fromarray(image[..., 0] if grey else image[..., :3]).resize(cell, method)


@cache
def _font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which has most scripts, from matplotlib's files."""
    path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"DejaVuSans{'-Bold' if bold else ''}.ttf")
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)
