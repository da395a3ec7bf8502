"""Which data sets there are, and where they are kept. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gradshare.data.store import ClassEntry, Index, building
from gradshare.errors import UserError

Progress = Callable[[int, int], None] | None


def data_folder() -> Path:
    """Where data sets are kept: `GRADSHARE_DATA`, or the platform's cache folder."""
    chosen = os.environ.get("GRADSHARE_DATA")
    if chosen:
        return Path(chosen)
    from platformdirs import user_cache_path

    return user_cache_path("gradshare")


def build_glyphs(folder: Path, progress: Progress) -> None:
    """Render the embedded data set."""
    try:
        from gradshare.data import glyphs
    except ImportError as error:
        raise UserError(f"the glyphs data set is drawn with matplotlib and Pillow; install them ({error})") from error

    classes = [
        ClassEntry(name, split, glyphs.IMAGES_PER_CLASS)
        for split, names in glyphs.class_names().items()
        for name in names
    ]
    index = Index("glyphs", glyphs.IMAGE_SHAPE, classes, "rendered", "fonts shipped with matplotlib")
    with building(folder, index) as store:
        for number, glyph in enumerate(glyphs.render()):
            for place, image in enumerate(glyph.images):
                store.put(number * glyphs.IMAGES_PER_CLASS + place, image)
            if progress is not None:
                progress(number + 1, len(classes))


BUILTIN: dict[str, Callable[[Path, Progress], None]] = {"glyphs": build_glyphs}
