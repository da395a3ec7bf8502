"""Every pair of docs/from-learn2learn.md runs, and both sides compute the same."""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

PAGE = (Path(__file__).parents[2] / "docs" / "from-learn2learn.md").read_text(encoding="utf-8")
REAL = importlib.util.find_spec("learn2learn") is not None
Values = dict[str, Any]  # what a program leaves behind


class Section(list[str]):
    """The two programs of a pair; the first is empty where the page has none."""

    def __init__(self, text: str) -> None:
        super().__init__(
            "".join(re.findall(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL)) for kind in ("py", "python")
        )


SECTIONS = {text.partition("\n")[0]: Section(text) for text in PAGE.split("\n## ")[1:]}
SETUP = SECTIONS.pop("What all examples use")[1]
del SECTIONS["What is different"]


# learn2learn's documented behaviour, in so far as the page uses it, where the library itself is not installed


class StandIn:
    def __init__(self, module: nn.Module, lr: Any, first_order: bool = False, weights: Any = None) -> None:
        self.network, self.lr, self.first_order = module, lr, first_order
        self.weights: dict[str, Tensor] = weights or dict(module.named_parameters())

    def __call__(self, x: Tensor) -> Tensor:
        return functional_call(self.network, self.weights, x)

    @property
    def module(self) -> Callable[[Tensor], Tensor]:
        return self

    def parameters(self) -> list[Tensor]:
        return list(self.weights.values())

    def clone(self) -> Any:
        return type(self)(self.network, self.lr, self.first_order, {n: w.clone() for n, w in self.weights.items()})

    def adapt(self, loss: Tensor) -> None:
        gradients = torch.autograd.grad(loss, self.parameters(), create_graph=not self.first_order)
        self.update([-rate * gradient for rate, gradient in zip(self.rates(), gradients, strict=True)])

    def update(self, updates: list[Tensor]) -> None:
        self.weights = {n: w + u for (n, w), u in zip(self.weights.items(), updates, strict=True)}

    def rates(self) -> Any:
        return [self.lr] * len(self.weights)

    def state_dict(self) -> Values:
        return self.network.state_dict()

    def load_state_dict(self, saved: Values) -> None:
        self.network.load_state_dict(saved)


class StandInMetaSGD(StandIn):
    def __init__(self, module: nn.Module, lr: Any, *more: Any) -> None:
        rates = [nn.Parameter(torch.full_like(w, lr)) for w in module.parameters()] if isinstance(lr, float) else lr
        super().__init__(module, rates, *more)

    @property
    def lrs(self) -> list[Tensor]:
        return self.lr

    def rates(self) -> Any:
        return self.lr


STAND_IN = SimpleNamespace(
    algorithms=SimpleNamespace(MAML=StandIn, MetaSGD=StandInMetaSGD),
    update_module=lambda clone, updates: clone.update(updates),
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Values]]:
    """Run a program of the page, in float64."""
    monkeypatch.chdir(tmp_path)
    if not REAL:
        monkeypatch.setitem(sys.modules, "learn2learn", STAND_IN)  # type: ignore[arg-type]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)

    def run(program: str) -> Values:
        values: Values = {}
        with warnings.catch_warnings():
            if "import learn2learn" in program or "import higher" in program:
                warnings.simplefilter("ignore")  # theirs, of old forms of PyTorch and Gym
            exec(compile(SETUP + program, "page", "exec"), values)
        return values

    yield run
    torch.set_default_dtype(before)


def trained(values: Values) -> list[Tensor]:
    return [*values["model"].parameters()] if "state" not in values else [*values["state"].params.values()]


def gradients(values: Values) -> list[Tensor]:
    return [weight.grad for weight in trained(values)]


def with_rates(values: Values) -> list[Tensor]:
    rates = values["rates"]
    return [*gradients(values), *(rate.grad for rate in (rates.values() if isinstance(rates, dict) else rates))]


def shapes_of_a_task(values: Values) -> list[Tensor]:
    """Examples and labels are drawn at random: what a task consists of is the same."""
    parts = [values[f"one_{part}"] for part in ("support_x", "support_y", "query_x", "query_y")]
    counts = [values[f"one_{part}_y"].bincount() for part in ("support", "query")]
    return [*(torch.tensor(part.shape) for part in parts), *counts]


def outputs(values: Values) -> list[Tensor]:
    adapted = values["adapted"]
    return [adapted(values["query_x"][0]), *(adapted(one[None]) for one in values["query_x"][0][:2])]


COMPARED: dict[str, Callable[[Values], list[Tensor]]] = {
    "MAML": lambda values: [*gradients(values), *trained(values)],
    "First order": gradients,
    "Meta-SGD": with_rates,
    "ANIL": gradients,
    "Two losses": gradients,
    "An update of your own": gradients,
    "higher": gradients,
    "higher with momentum": gradients,
    "higher at test": lambda values: [values["logits"]],
    "Data": shapes_of_a_task,
    "Checkpoints": trained,
    "Evaluation": lambda values: [values["accuracy"]],
    "The adapted network": outputs,
}


def test_every_section_is_a_pair_and_is_compared() -> None:
    assert list(COMPARED) == list(SECTIONS) and all(theirs and ours for theirs, ours in SECTIONS.values())


@pytest.mark.parametrize("name", COMPARED)
def test_both_sides_compute_the_same(name: str, run: Callable[[str], Values]) -> None:
    if name == "higher" or name.startswith("higher "):
        pytest.importorskip("higher")
    theirs, ours = SECTIONS[name]
    found = COMPARED[name](run(ours))
    assert found
    if name == "Data" and not REAL:
        return  # its data tools are compiled; the stand-in has none
    expected = COMPARED[name](run(theirs))
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def test_the_table_has_what_the_programs_have() -> None:
    """Each piece of code in the table stands in a program of its section, on its own side."""
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    assert {re.findall(r"\[(.*?)\]", row[2])[0] for row in rows} == set(SECTIONS)
    for row in rows:
        programs = SECTIONS[re.findall(r"\[(.*?)\]", row[2])[0]]
        for cell, program in zip(row[:2], programs, strict=True):
            for code in re.findall(r"`(.*?)`", cell):
                for part in code.split("..."):
                    assert squeezed(part) in squeezed(program), (code, row)
