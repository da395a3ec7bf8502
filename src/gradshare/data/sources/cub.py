"""CUB-200-2011: `CUB_200_2011.tgz` as published, a folder of its content, or an archive of class folders.

The transform "crop" is Torchmeta's: shorter side to 126 pixels, then the centre 84 x 84. "resize" is the one of the
MAML++ code.
"""

from __future__ import annotations

from gradshare.data.sources import Options
from gradshare.data.sources.importing import Archives, Found, by_standard, find_classes, from_photos


def find(archives: Archives, options: Options) -> Found:
    """Find the 200 classes, with the standard split of 100, 50 and 50."""
    found = find_classes(archives, below="images")  # the published archive also has segmentations of the same names
    return from_photos(archives, by_standard(found, "cub", archives), options, "standard split 100/50/50")
