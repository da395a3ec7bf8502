"""The arms of a comparison: their order, and what each one is in words."""

from __future__ import annotations

from typing import NamedTuple


class Arm(NamedTuple):
    meaning: str
    """What the arm is, after "it is"."""
    source: str = ""
    """For a control: the part of the method that it keeps, after "the gain is there with"."""


ARMS = {
    "original": Arm("the method without sharing"),
    "shared": Arm("the method with gradient sharing"),
    "half-rate": Arm("the original at half the inner rate", "the smaller step"),
    "gate-only": Arm("the original with a learned factor on each inner step, nothing shared", "a learned step size"),
    "batch-only": Arm("sharing between concurrent tasks, without memory", "the concurrent tasks"),
    "memory-only": Arm("sharing through the memory of earlier tasks alone", "the memory of earlier tasks"),
}


def arm_rank(arm: str) -> int:
    """The original first, then sharing, then the controls, then arms unknown to us."""
    return list(ARMS).index(arm) if arm in ARMS else len(ARMS)
