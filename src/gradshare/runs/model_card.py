"""Model cards: the README.md of a model to pass on, with the fields that the Hugging Face hub reads at its top."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from gradshare.errors import printable

USAGE = """import gradshare as gs

learner, state = gs.from_pretrained({arguments})
fast = learner.adapt(state, support_x, support_y)  # [tasks, examples, ...], [tasks, examples]
outputs = learner.predict(fast, query_x)  # [tasks, examples, ...]
"""
NOTE = "± is a 95 % interval over tasks for one training run. It says nothing about another seed."
NO_CODE = (
    "This folder holds numbers and no code: gradshare reads `config.json` and `model.safetensors`, checks their"
    " SHA-256, and runs nothing."
)


@dataclass(frozen=True)
class Score:
    """A mean over tasks."""

    split: str
    tasks: int
    accuracy: float | None
    loss: float | None
    interval: float | None  # half the width of the 95 % interval over tasks: of the accuracy, else of the loss

    @property
    def metric(self) -> str:
        return "loss" if self.accuracy is None else "accuracy"

    @property
    def value(self) -> float | None:
        return self.loss if self.accuracy is None else self.accuracy

    def __str__(self) -> str:
        if self.value is None:
            return "not finite"
        form = ".4g" if self.accuracy is None else ".2%"
        return f"{self.value:{form}}" + ("" if self.interval is None else f" ± {self.interval:{form}}")


@dataclass(frozen=True)
class Card:
    """What a model card says."""

    license: str  # as the hub names it: mit, cc-by-4.0, ..., unknown
    dataset: str  # its name; "" where it is not told
    about: list[str]  # sentences
    scores: list[Score]
    options: dict[str, Any] = field(default_factory=dict)

    def text(self, name: str, own: bool) -> str:
        """The whole README.md.

        Args:
            own: whether the module is the author's own, and so not described by the folder.
        """
        usage = USAGE.format(arguments='"FOLDER", learner' if own else '"FOLDER"')
        parts = [
            f"# {_plain(name)}",
            "\n".join(self.about),
            f"Data: {_code(self.dataset) if self.dataset else 'not told'}.",
            *([_table(["split", "", "mean", "tasks"], map(_row, self.scores)), NOTE] if self.scores else []),
            f"```python\n{usage}```",
            NO_CODE,
        ]
        if self.options:
            rows = [[_plain(option), _code(str(value))] for option, value in self.options.items()]
            parts += ["## Options", _table(["option", "value"], rows)]
        return f"---\n{self._front(name)}---\n\n" + "\n\n".join(parts) + "\n"

    def _front(self, name: str) -> str:
        """YAML, of which JSON is a part: no name can be more than a name there."""
        lines = [f"license: {json.dumps(self.license)}", "library_name: gradshare"]
        lines += ["tags:", "- meta-learning", "- few-shot-learning", "- gradient-sharing"]
        if self.dataset:
            lines += ["datasets:", f"- {json.dumps(self.dataset)}"]
        results = [self._result(score) for score in self.scores if score.value is not None]
        if results:
            metrics = dict.fromkeys(score.metric for score in self.scores)
            lines += ["metrics:", *(f"- {metric}" for metric in metrics)]
            lines += [f"model-index: {json.dumps([{'name': name, 'results': results}])}"]
        return "\n".join(lines) + "\n"

    def _result(self, score: Score) -> dict[str, Any]:
        data = self.dataset or "not told"
        interval = "" if score.interval is None else f", 95 % interval ± {score.interval:.4f}"
        return {
            "task": {"type": "image-classification" if score.accuracy is not None else "other"},
            "dataset": {"type": data, "name": data, "split": score.split},
            "metrics": [
                {
                    "type": score.metric,
                    "value": score.value,
                    "name": f"mean {score.metric} of {score.tasks} tasks{interval}",
                }
            ],
        }


def _row(score: Score) -> list[str]:
    return [score.split, score.metric, str(score), str(score.tasks)]


def _table(columns: list[str], rows: Any) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Text that is no markup."""
    return "".join(f"\\{sign}" if sign in "\\`*_{}[]<>#|!&~" else sign for sign in printable(" ".join(text.split())))


def _code(text: str) -> str:
    return f"`{printable(' '.join(text.split())).replace('`', chr(39)).replace('|', '¦')}`"
