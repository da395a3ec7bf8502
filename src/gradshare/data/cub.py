"""CUB-200-2011: `CUB_200_2011.tgz` as published, a folder of the same, or an archive of class folders."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gradshare.data.catalogue import Progress
from gradshare.data.folder import by_standard, find_classes
from gradshare.data.pixels import Transform, decode
from gradshare.data.planning import Paths, import_planned, names_of, opened, plan_classes
from gradshare.data.store import Index

SIZE = 84


def import_cub(path: Paths, folder: Path, transform: Transform = "crop", progress: Progress = None) -> Index:
    """Import the 200 classes of CUB, with the standard split of 100, 50 and 50.

    Args:
        path: `CUB_200_2011.tgz`, or what it holds, or class folders `<class>/<image>` in a folder or an archive.
        folder: where the store will be.
        transform: `"crop"`, shorter side to 126 pixels and the centre 84 x 84, as Torchmeta; or `"resize"`, the whole
            image to 84 x 84, as the MAML++ loader.
        progress: called with (images done, images in all).
    """
    with opened(path) as sources:
        # The published archive has attributes and parts beside images/; its segmentations unpack beside it too.
        found = find_classes(sources, below="images")
        by_class = by_standard(found, "cub", "CUB", names_of(sources))
        return import_planned(
            sources,
            plan_classes(by_class),
            folder,
            partial(decode, transform=transform, size=SIZE, channels=3),
            image=(SIZE, SIZE, 3),
            transform=transform,
            note="standard split 100/50/50",
            progress=progress,
        )
