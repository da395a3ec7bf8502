"""Files that a user names for our results: nothing of anybody else's is written over. Imports nothing heavy."""

from __future__ import annotations

import os
from pathlib import Path

from gradshare.errors import UserError


def check_output(path: Path, beginning: bytes, kind: str) -> None:
    """Refuse to write over anything but an earlier file of the same kind, told by its first bytes."""
    if not os.path.lexists(path):
        return
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(beginning)) == beginning:
                return
    raise UserError(f"{path} is there already, and it is not {kind}: choose another name")
