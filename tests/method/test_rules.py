"""Rules: one function each, as values; `check_rule` accepts ours and says what is wrong with others."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import gradshare as gs
from gradshare.method.rules import NOTHING, InnerRule, InnerStep, Moved, Rule, stack_memory, sum_of_tasks
from gradshare.method.variants import ROWS, first_link, variant

OURS: list[Any] = [
    *(first_link(row.name, norm) for row in ROWS if row.rule for norm in ("global", "tensor")),
    gs.scale(0.1),
    gs.stop_gradient(),
    gs.rate_per_element(0.1),
    gs.rate_per_tensor_and_step(0.1),
    gs.chain(gs.GradientSharing(), gs.rate_per_element(0.1)),
]


@pytest.mark.parametrize("rule", OURS, ids=str)
def test_our_rules_are_sound_and_are_values(rule: Rule) -> None:
    gs.testing.check_rule(rule)
    copy = pickle.loads(pickle.dumps(rule))
    assert copy == rule and hash(copy) == hash(rule) and repr(copy) == repr(rule)


@pytest.mark.parametrize("rule", OURS, ids=str)
def test_a_weight_without_axes_moves_as_a_vector_of_one(rule: Rule) -> None:
    def moved(shape: tuple[int, ...]) -> list[torch.Tensor]:
        weights = {"scale": torch.full((2, *shape), 3.0), "w": torch.ones(2, 4)}
        learned, memory = rule.init({name: weight[0] for name, weight in weights.items()}, 2)
        at = InnerStep({"scale": weights["scale"] + 1, "w": weights["w"]}, weights, learned, memory)
        of_both = [rule.update(at._replace(total=total)).direction for total in (sum_of_tasks, None)]
        return [direction[name].flatten() for direction in of_both for name in weights]

    torch.testing.assert_close(moved(()), moved((1,)))


def own(update: Any, memory: Any = None, any_layout: bool = False) -> InnerRule:
    return InnerRule("own", lambda weights, steps: ({}, dict(memory or {})), update, any_layout)


def each(at: InnerStep, function: Any) -> dict[str, torch.Tensor]:
    return {name: function(gradient) for name, gradient in at.gradients.items()}


class Counting:
    name, count = "counting", 0

    def init(self, weights: Any, steps: int) -> Any:
        return {}, {}

    def update(self, at: InnerStep) -> Moved:
        self.count += 1
        return Moved(each(at, lambda g: g * self.count))


def in_place(at: InnerStep) -> Moved:
    for gradient in at.gradients.values():
        gradient *= 2
    return Moved(at.gradients)


UNSOUND: dict[str, tuple[Any, str]] = {
    "sums tasks itself": (
        own(lambda at: Moved(at.gradients if at.total is None else each(at, lambda g: g + g.sum(0)))),
        "at.total",
    ),
    "means over its own tasks": (
        own(lambda at: Moved(at.gradients if at.total is None else each(at, lambda g: g / 2 + g.mean(0) / 2))),
        "at.total",
    ),
    "another type": (own(lambda at: Moved(each(at, lambda g: g.float()))), "type"),
    "no tensor": (own(lambda at: Moved(dict.fromkeys(at.gradients, 0.1))), "not a tensor"),
    "not finite": (own(lambda at: Moved(each(at, lambda g: g / 0))), "not finite"),
    "a class": (gs.GradientSharing, "instance"),
    "sees others at test": (
        own(lambda at: Moved(at.gradients if at.total else each(at, lambda g: g - g.mean(0)))),
        "depends on another",
    ),
    "no task axis": (own(lambda at: Moved(each(at, lambda g: g[0]))), "shape"),
    "a name missing": (own(lambda at: Moved({})), "names of the gradients"),
    "no Moved": (own(lambda at: at.gradients), "gs.Moved"),
    "state on itself": (Counting(), "two calls"),
    "in place": (own(in_place), "in place"),
    "order of tasks": (
        own(lambda at: Moved(each(at, lambda g: g * torch.arange(len(g)).view(-1, *[1] * (g.dim() - 1))))),
        "order of the tasks",
    ),
    "memory of its own making": (own(lambda at: Moved(at.gradients, remember={"seen": torch.ones(())})), "init"),
    "memory of another shape": (
        own(lambda at: Moved(at.gradients, remember={"mean": torch.ones(7)}), {"mean": torch.zeros(3, 2)}),
        "shape",
    ),
    "not the same as one vector": (
        own(lambda at: Moved(each(at, lambda g: g / g[:, ...].flatten(1).norm(dim=1).view(-1, *[1] * (g.dim() - 1)))),
            any_layout=True),
        "any_layout",
    ),
    "no update": (object(), "has no `name`"),
}  # fmt: skip


@pytest.mark.parametrize("rule, word", UNSOUND.values(), ids=UNSOUND)
def test_check_rule_says_what_is_wrong(rule: Any, word: str) -> None:
    with pytest.raises(gs.UserError, match=word):
        gs.testing.check_rule(rule)


@pytest.mark.parametrize("field", ["together", "alone", "spread", "fused"])
def test_old_fields_raise_an_error_that_shows_the_new_form(field: str) -> None:
    with pytest.raises(gs.UserError, match=r"update\(at"):
        getattr(gs.GradientSharing().rule(), field)
    with pytest.raises(gs.UserError, match=r"update\(at"):
        gs.InnerRule("old", lambda weights, steps: ({}, {}), **{field: print})
    assert not hasattr(gs.scale(0.1), field)


def test_memory_stacks_rows_and_keeps_what_was_not_remembered() -> None:
    before = {"a": {"rows": torch.zeros(2, 3), "seen": torch.tensor(False)}, "b": {"kept": torch.ones(2)}}
    rows = [{"a": {"rows": torch.full((3,), float(k)), "seen": torch.tensor(True)}, "b": NOTHING} for k in range(2)]
    after = stack_memory(before, rows)
    assert after["a"]["rows"].tolist() == [[0, 0, 0], [1, 1, 1]] and after["a"]["seen"] and after["b"] is not before
    assert after["b"]["kept"] is before["b"]["kept"]


def test_a_value_per_step_stays_at_its_last_row() -> None:
    values = torch.tensor([1.0, 2.0])
    assert [InnerStep({}, {}, k=k).now(values).item() for k in range(4)] == [1, 2, 2, 2]


def test_names_rules_and_classes_make_the_same_learner() -> None:
    model = nn.Linear(3, 2)
    by_name, by_value = gs.maml(model, sharing="gate-only"), gs.maml(model, sharing=gs.GateOnly())
    assert by_name.rule == by_value.rule
    assert gs.maml(model, sharing="original").rule == gs.maml(model).rule
    for wrong in ("gate", gs.GateOnly, 3, "half-rate"):
        with pytest.raises(gs.UserError):
            gs.maml(model, sharing=wrong)  # type: ignore[arg-type]


def test_a_name_from_a_file_is_never_imported() -> None:
    assert variant("no_such_module:Rule").label == "no_such_module.Rule"
    with pytest.raises(gs.UserError, match="never imported"):
        first_link("no_such_module:Rule")
    with pytest.raises(gs.UserError, match="cannot be imported"):
        first_link("no_such_module:Rule", allowed=["no_such_module:Rule"])
