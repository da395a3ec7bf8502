"""The registry of sharing variants: one row gives a variant to `sharing=`, `--arm`, presets, grids and reports.

A new variant is one file with a rule and one row here. A variant of your own needs no row: name it
`package.module:Class`, and it is imported where you name it. Imports nothing heavy.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Container
from importlib import import_module
from typing import Any, NamedTuple

from gradshare.errors import UserError, short_repr


class Variant(NamedTuple):
    """One arm of a comparison: which rule is the first link of the inner loop, and how reports show it."""

    name: str
    """What `--arm` takes."""
    rule: str
    """`package.module:Class` of the rule; empty: no first link, the original algorithm."""
    meaning: str
    """What it is, after "it is"."""
    colour: str = "#767b82"
    dashes: tuple[float, ...] = (3, 1.5)
    """Lengths of the line and of the gaps; empty: a full line."""
    keeps: str = ""
    """For a control: the part of the method that it keeps, after "the gain is there with"."""
    rate: float = 1.0
    """Factor on the inner rate."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further arguments of the class."""

    @property
    def control(self) -> bool:
        """Whether it may explain the gain of sharing; so may one that we know nothing of."""
        return bool(self.keeps) or self.name not in VARIANTS

    @property
    def label(self) -> str:
        """The name as part of a file's name."""
        return self.name.replace(":", ".")


SHARING = "gradshare.method.sharing:GradientSharing"
MIXING = "gradshare.method.mixing"
ROWS = (  # in the order of tables. Okabe and Ito's colours, which colour-blind readers can tell apart
    Variant("original", "", "the method without sharing", "#1b1f24", ()),
    Variant("shared", SHARING, "the method with gradient sharing", "#d55e00", ()),
    Variant("half-rate", "", "the original at half the inner rate", "#0072b2", (5, 2), "the smaller step", rate=0.5),
    Variant("quarter-rate", "", "the original at a quarter of the inner rate", "#8a5fbf", (2, 2), rate=0.25),
    Variant(
        "gate-only",
        "gradshare.method.controls:GateOnly",
        "the original with a learned factor on each inner step, nothing shared",
        "#009e73",
        (5, 2, 1, 2),
        "a learned step size",
    ),
    Variant(
        "batch-only",
        "gradshare.method.controls:BatchOnly",
        "sharing between concurrent tasks, without memory",
        "#cc79a7",
        (1.2, 1.4),
        "the concurrent tasks",
    ),
    Variant(
        "memory-only",
        "gradshare.method.controls:MemoryOnly",
        "sharing through the memory of earlier tasks alone",
        "#e69f00",
        (7, 2, 1, 2, 1, 2),
        "the memory of earlier tasks",
    ),
    Variant(
        "conditioned",
        SHARING,
        "sharing with a gate for each task, by how well its gradient agrees with the running mean",
        "#56b4e9",
        (9, 2),
        options=(("conditioned", True),),
    ),
    Variant(
        "tensor-gates",
        "gradshare.method.controls:TensorGates",
        "the original with a learned factor on each weight tensor and inner step, nothing shared",
        keeps="a learned step size for each tensor",
    ),
    Variant("shared-tensor-gates", f"{MIXING}:TensorGatedSharing", "sharing with a gate for each weight tensor"),
    Variant("additive", f"{MIXING}:Additive", "sharing that is added to the whole gradient of the task"),
    Variant("mean-length", f"{MIXING}:MeanSharing", "sharing of the mean gradient, with its length"),
    Variant("length-keeping", f"{MIXING}:LengthKeeping", "sharing of the direction, which keeps the gradient's length"),
    Variant("retrieval", f"{MIXING}:Retrieval", "sharing of those of the last four batches that agree with the task"),
    Variant("body-only", f"{MIXING}:body_sharing", "sharing of the body, and the head's own gradient"),
    Variant("not-first", f"{MIXING}:sharing_but", "sharing at all steps but the first", options=(("step", "first"),)),
    Variant("not-last", f"{MIXING}:sharing_but", "sharing at all steps but the last", options=(("step", "last"),)),
    Variant("equivariant", f"{MIXING}:equivariant_sharing", "sharing of the body from the second step on"),
)
VARIANTS = {row.name: row for row in ROWS}
CONTROLS = tuple(row.name for row in ROWS if row.keeps)
INNER = {  # what `inner=` and `--inner` take by name
    "momentum": "gradshare.method.inner_optimisers:Momentum",
    "adam": "gradshare.method.inner_optimisers:Adam",
    "head": "gradshare.method.inner_optimisers:HeadRate",
}
OWN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")  # package.module:Class


def variant(name: str) -> Variant:
    """The row of a name; one of your own, `package.module:Class`, gets a row without being imported.

    Example:
        >>> variant("half-rate").rate, variant("my_rules:Additive").control
        (0.5, True)
    """
    if name in VARIANTS:
        return VARIANTS[name]
    if isinstance(name, str) and OWN.fullmatch(name):
        return Variant(name, name, f"the rule {name}")
    known = f"one of {', '.join(VARIANTS)}, or package.module:Class"
    raise UserError(f"a way of sharing is {known}, not {short_repr(name)}")


def first_link(name: str, norm: str = "global", allowed: Container[str] = ()) -> Any:
    """The rule of a variant, as `sharing=` takes it; None for the original.

    Args:
        norm: passed to a class that takes it.
        allowed: names of your own that may be imported: those that the user gave, never those read from a file.
    """
    row = variant(name)
    if not row.rule:
        return None
    make = imported("arm", row.rule, (row.rule,) if name in VARIANTS else allowed)
    options = dict(row.options)
    if "norm" in inspect.signature(make).parameters:
        options["norm"] = norm
    return make(**options)


def parse_inner(name: str) -> tuple[str, tuple[float, ...]]:
    """The name and the number of a rule for `inner=`: `adam`, `momentum`, `momentum:0.9`, or `head:4`.

    Example:
        >>> parse_inner("momentum:0.5"), parse_inner("adam")
        (('momentum', (0.5,)), ('adam', ()))
    """
    if name in ("momentum", "adam"):
        return name, ()
    if isinstance(name, str) and (found := re.fullmatch(r"(momentum):(0(?:\.\d+)?)|(head):(\d+(?:\.\d+)?)", name)):
        kind, number = filter(None, found.groups())
        return kind, (float(number),)
    raise UserError(f"an inner optimiser is momentum:0.9, adam, head:4 or a rule, not {short_repr(name)}")


def inner_rule(name: str) -> Any:
    """The rule of a name for `inner=`."""
    chosen, numbers = parse_inner(name)
    module, _, attribute = INNER[chosen].partition(":")
    return getattr(import_module(module), attribute)(*numbers)


def imported(what: str, name: str, allowed: Container[str]) -> Any:
    """What `package.module:Class` names, imported.

    Args:
        what: the option that takes such a name, for messages: `"arm"`.
        allowed: names that may be imported, as `first_link` has it.
    """
    if name not in allowed:
        raise UserError(
            f"the {what} {name} is code of your own, and a name in a run folder is never imported:"
            f" give the {what} again (--{what} {name}), or hand over the learner"
        )
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"the {what} {name} cannot be imported: {error}") from None
