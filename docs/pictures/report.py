"""Photograph the report of the paper's experiments, docs/pictures/report.png: python -m docs.pictures.report

Needs Chromium. Writes the report to a folder of its own, so results/ stays as it is.
"""

from __future__ import annotations

import base64
import shutil
import tempfile
import time
from pathlib import Path

from gradshare.reports import write_report
from tests.support.browser import browser

HERE = Path(__file__).parent
POINT = """(() => { const plot = document.querySelectorAll('figure[data-panel] svg')[4].getBoundingClientRect();
  return [plot.x + 0.2 * plot.width, plot.y + 0.55 * plot.height]; })()"""  # CUB 5-shot, epoch 9


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(shutil.copytree(HERE.parents[1] / "results" / "paper", Path(scratch) / "paper"))
        write_report(runs)
        with browser(Path(scratch) / "profile") as page:
            page.call("Emulation.setDeviceMetricsOverride", width=1280, height=1010, deviceScaleFactor=1, mobile=False)
            page.call("Emulation.setScrollbarsHidden", hidden=True)
            page.open(runs / "report.html")
            page.pointer("mouseMoved", *page.value(POINT))
            time.sleep(0.2)  # until it is drawn
            photo = page.call("Page.captureScreenshot", format="png")["data"]
    (HERE / "report.png").write_bytes(base64.b64decode(photo))


if __name__ == "__main__":
    main()
