"""The error that a user can fix, the checks of values from outside that raise it, and text for people."""

from __future__ import annotations

import numbers
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """A problem that the user can fix, in one sentence. The command line prints it and exits with 2."""


class RendezvousFailed(UserError):
    """Processes that should work together did not find each other, so each of them prints it."""


class LineWarning(UserWarning):
    """A warning in one sentence. The command line prints it as a line."""


class DamageWarning(LineWarning):
    """Something in a run folder is damaged, and the run continues without it."""


def print_warnings_as_lines() -> None:
    """Print our warnings as the command line prints errors: one line, without a place in the code."""
    warnings.formatwarning = _format_warning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if issubclass(category, LineWarning):
        return f"gradshare: {printable(str(message))}\n"
    return _python_format(message, category, filename, lineno, line)


_python_format = warnings.formatwarning


TOO_LITTLE_MEMORY = "there is not enough memory for this: take fewer tasks, filters, steps, or a smaller eval_batch"


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the machine or a GPU has too little memory."""
    texts = ("can't allocate memory", "out of memory", "not enough memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


MOST = 10**9  # the largest count of anything
MOST_SEED = 2**63 - 1
MOST_THREADS = 1024  # a process may die while it starts more


def check_range(name: str, value: float, lowest: float, highest: float = MOST) -> None:
    """Raise an error for a number outside of its range; NaN is outside of every range."""
    if not lowest <= value:
        raise UserError(f"{name} is {short_repr(value)}; it must be at least {lowest}")
    if value > highest:
        raise UserError(f"{name} is {short_repr(value)}; it must be at most {highest:.9g}")


def check_number(name: str, value: Any, lowest: float, highest: float = MOST) -> None:
    """Raise an error for a value that is not a number, or is outside of its range."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise UserError(f"{name} is {short_repr(value)}; it must be a number")
    check_range(name, value, lowest, highest)  # type: ignore[arg-type]


def check_whole(name: str, value: Any, lowest: int, highest: int = MOST) -> None:
    """Raise an error for a value that is not a whole number, or is outside of its range."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise UserError(f"{name} is {short_repr(value)}; it must be a whole number")
    check_range(name, int(value), lowest, highest)


def has_methods(value: Any, names: Iterable[str]) -> bool:
    """Whether a value, which is no class, has methods of these names."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in names)


def path_of(name: Any, what: str = "a folder") -> Path:
    """The path that a user gave as text or as a path."""
    if not isinstance(name, str | os.PathLike):
        raise UserError(f"{what} is named by text or a path, not {short_repr(name)}")
    path = Path(os.fsdecode(name))
    if "\0" in str(path):
        raise UserError(f"{what} cannot have the character \\0 in its name: {short_repr(str(path))}")
    return path


def short_repr(value: Any, longest: int = 60) -> str:
    """A value for a message: as Python writes it, shortened if it is long.

    Example:
        >>> short_repr("a" * 100, longest=10)
        "'aaaaaaaaa…"
    """
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}…"


def printable(text: str) -> str:
    """Text whose control characters, and marks that change the direction of writing, are shown as \\u202e.

    Example:
        >>> print(printable("\\x1b[31m wren"))
        \\x1b[31m wren
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def say(line: str, error: bool = False) -> None:
    """Print a line, to stderr if it is an error.

    Everything here prints with this function: a name that a stranger chose may have signs in it that a terminal obeys.
    """
    print(printable(line), file=sys.stderr if error else sys.stdout, flush=True)
