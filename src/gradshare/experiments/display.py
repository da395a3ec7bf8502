"""The live display of several runs: the arms of a comparison, the cells of a grid."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from gradshare.experiments.grid import Cell, read_state
from gradshare.runs.display import REFRESH, View
from gradshare.runs.records import Status

AT_WORK: tuple[Status, ...] = ("running", "failed", "diverged")


class CellView(View):
    """Shows how far cells are; `only`: on a terminal, the status of those with a row in the table."""

    def __init__(self, cells: Sequence[Cell], only: Sequence[Status] = ()) -> None:
        super().__init__({cell.label: partial(read_state, cell) for cell in cells}, only)


def watch(cells: Sequence[Cell]) -> None:
    """Show all cells until every one is done, diverged or failed."""
    with CellView(cells) as view:
        while any(state.status not in ("done", "diverged", "failed") for state in view.states.values()):
            view.update(view.sources)
            time.sleep(REFRESH)
