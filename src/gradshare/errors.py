"""The error that a user can mend, and the checks of values from outside that raise it. Imports nothing heavy."""

from __future__ import annotations

import numbers
import os
import warnings
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """Something the user can mend, in one sentence with the numbers. The command line prints it and exits with 2."""


class Unmet(UserError):
    """Processes that should work together did not find each other, so each of them says it."""


class DamageWarning(UserWarning):
    """Something in a run folder is damaged, and the run goes on without it."""


def say_warnings_plainly() -> None:
    """Have our warnings printed as the command line prints errors: one line, without a place in the code."""
    warnings.formatwarning = _formatted


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if issubclass(category, DamageWarning):
        return f"gradshare: {printable(str(message))}\n"
    return _usual(message, category, filename, lineno, line)


_usual = warnings.formatwarning


TOO_LITTLE_MEMORY = "there is not enough memory for this: take fewer tasks, filters, steps, or a smaller eval_batch"


def out_of_memory(error: BaseException) -> bool:
    """Whether an error is that memory was asked for which is not there: of the machine, or of a GPU."""
    told = ("can't allocate memory", "out of memory", "not enough memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or any(words in str(error) for words in told)


MOST = 10**9  # of anything that is counted
MOST_SEED = 2**63 - 1
MOST_THREADS = 1024  # more, and the process may end where it makes them


def check_range(name: str, value: float, lowest: float, highest: float = MOST) -> None:
    """Refuse a number outside of its range; NaN is outside of every range."""
    if not lowest <= value:
        raise UserError(f"{name} is {shown(value)}; it must be at least {lowest}")
    if value > highest:
        raise UserError(f"{name} is {shown(value)}; it must be at most {highest:.9g}")


def check_number(name: str, value: Any, lowest: float, highest: float = MOST) -> None:
    """Refuse what is no number, or one outside of its range."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise UserError(f"{name} is {shown(value)}; it must be a number")
    check_range(name, value, lowest, highest)  # type: ignore[arg-type]


def check_whole(name: str, value: Any, lowest: int, highest: int = MOST) -> None:
    """Refuse what is no whole number, or one outside of its range."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise UserError(f"{name} is {shown(value)}; it must be a whole number")
    check_range(name, int(value), lowest, highest)


def path_of(name: Any, what: str = "a folder") -> Path:
    """What was named by text or by a path."""
    if not isinstance(name, str | os.PathLike):
        raise UserError(f"{what} is named by text or a path, not {shown(name)}")
    return Path(name)


def shown(value: Any, longest: int = 60) -> str:
    """A value for a message: as Python writes it, cut where it is long.

    Example:
        >>> shown("a" * 100), shown(16**9999)
        ("'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…", 'a number of many digits')
    """
    try:
        text = repr(value)
    except ValueError:  # Python does not write numbers of more than 4,300 digits
        return "a number of many digits"
    return text if len(text) <= longest else f"{text[:longest]}…"


def printable(text: str) -> str:
    """Text in which every character shows itself: controls and marks that turn the direction of writing as \\u202e.

    Example:
        >>> print(printable("\\x1b[31m wren"))
        \\x1b[31m wren
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
