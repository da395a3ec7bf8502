"""The one error that a user can mend, and the one warning."""

from __future__ import annotations

import warnings


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
        from gradshare.limits import printable  # which has the errors from here

        return f"gradshare: {printable(str(message))}\n"
    return _usual(message, category, filename, lineno, line)


_usual = warnings.formatwarning


TOO_LITTLE_MEMORY = "there is not enough memory for this: take fewer tasks, filters, steps, or a smaller eval_batch"


def out_of_memory(error: BaseException) -> bool:
    """Whether an error is that memory was asked for which is not there: of the machine, or of a GPU."""
    told = ("can't allocate memory", "out of memory", "not enough memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or any(words in str(error) for words in told)
