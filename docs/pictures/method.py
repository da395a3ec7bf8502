"""Draw the method, docs/pictures/method.svg: python docs/pictures/method.py

The ink is the colour of the text around it where the picture stands in a page, and follows the reader's choice of
light or dark where it is a file of its own.
"""

from __future__ import annotations

from pathlib import Path

LANES = {"1": 120, "2": 190, "T": 280}  # task: y
STEPS = {"1": 270, "2": 470, "K": 740}  # inner step: x of the bar where tasks meet
NODES = (150, 370, 570, 640, 850)  # x of the weights of a task: before, between and after the steps
MEMORY = 366  # y
STYLE = """
  .method { color: #1b1f24 }
  @media (prefers-color-scheme: dark) { .method { color: #e4e7eb } }
  .method text { fill: currentColor; font: 16px system-ui, sans-serif; text-anchor: middle }
  .method .small { font-size: 14px; opacity: .75 }
  .method .left { text-anchor: start }
  .method path { fill: none; stroke: currentColor; stroke-width: 1.6; marker-end: url(#ink) }
  .method .share { stroke: #d55e00; stroke-width: 2.2; marker-end: url(#share) }
  .method .plain { marker-end: none }
  .method .bar { fill: #d55e00; fill-opacity: .13; stroke: #d55e00; stroke-width: 1.2 }
  .method .cell { fill: #d55e00; fill-opacity: .22; stroke: #d55e00; stroke-width: 1.6 }
  .method circle { fill: #0072b2 }
  .method .gradient { fill: #d55e00 }
  .method .ink { fill: currentColor }
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{words}</text>'


def line(*points: float, kind: str = "") -> str:
    pairs = " ".join(f"{x} {y}" for x, y in zip(points[::2], points[1::2], strict=True))
    return f'<path d="M{pairs}" class="{kind}"/>'


def node(x: float, y: float, kind: str = "", size: float = 6) -> str:
    return f'<circle cx="{x}" cy="{y}" r="{size}" class="{kind}"/>'


def head(name: str, fill: str) -> str:
    """The head of an arrow."""
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
        ' orient="auto-start-reverse">'
        f'<path d="M0 0L8 4 0 8z" style="fill:{fill};stroke:none;marker-end:none"/></marker>'
    )


def task(name: str, y: float) -> list[str]:
    """One task: from the shared start through its inner steps to its query loss."""
    drawn = [line(80, 190, NODES[0] - 10, y), line(NODES[-1] + 8, y, 938, 190)]
    for x, before, after in zip(
        STEPS.values(), (NODES[0], NODES[1], NODES[3]), (NODES[1], NODES[2], NODES[4]), strict=True
    ):
        drawn += [line(before + 8, y, x - 10, y), line(x + 10, y, after - 9, y, kind="share")]
    drawn += [node(x, y) for x in NODES] + [node(x, y, "gradient") for x in STEPS.values()]
    return [*drawn, text((NODES[2] + NODES[3]) / 2, y + 5, "⋯")]


def step(name: str, x: float) -> list[str]:
    """One inner step: the gradients of all tasks meet, and the running mean in the memory."""
    high, low = LANES["1"] - 28, LANES["T"] + 28
    return [
        text(x, high - 10, f"inner step {name}"),
        f'<rect x="{x - 24}" y="{high}" width="48" height="{low - high}" rx="14" class="bar"/>',
        line(x, LANES["1"], x, LANES["T"], kind="share plain"),
        line(x - 9, low + 2, x - 9, MEMORY - 22, kind="share"),
        line(x + 9, MEMORY - 20, x + 9, low + 4, kind="share"),
        f'<rect x="{x - 30}" y="{MEMORY - 18}" width="60" height="36" rx="8" class="cell"/>',
        text(x, MEMORY + 6, f"ĝ<tspan dy='4' font-size='11'>{name}</tspan>"),
    ]


def picture() -> str:
    left, first = NODES[0], LANES["1"]
    parts = [
        text(62, 160, "start w"),
        node(62, 190, "ink", 12),
        text(968, 160, "query loss"),
        node(954, 190, "ink", 12),
    ]
    parts += [one for name, x in STEPS.items() for one in step(name, x)]
    parts += [one for name, y in LANES.items() for one in task(name, y)]
    parts += [text(x, 240, "⋮") for x in (left, NODES[-1])]
    parts += [text(left - 4, y - 14, f"task {name}", "left") for name, y in LANES.items()]
    parts += [text(226, first - 10, "G[1]", "small"), text(320, first - 10, "D[1]", "small")]
    parts += ['<path d="M954 140V48H62V138"/>']
    parts += [
        text(508, 38, "outer step: the gradient through all of this moves w, and the gates m and λ of every inner step")
    ]
    parts += [text((STEPS["2"] + STEPS["K"]) / 2, MEMORY + 5, "⋯")]
    parts += [
        text(130, MEMORY - 3, "memory: it stays until", "small"),
        text(130, MEMORY + 15, "the next batch of tasks", "small"),
    ]
    parts += [
        text(890, MEMORY - 3, "ĝ: a running mean of", "small"),
        text(890, MEMORY + 15, "the tasks’ gradients", "small"),
    ]
    heads = head("ink", "currentColor") + head("share", "#d55e00")
    title = (
        "In each inner step all tasks meet in a running mean of gradients, and each moves by a mix of it and its own"
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1016 396" class="method"'
        f' role="img" aria-label="{title}">'
        f"<style>{STYLE}</style><defs>{heads}</defs>\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    (Path(__file__).parent / "method.svg").write_text(picture(), encoding="utf-8")
