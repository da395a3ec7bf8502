"""The one error that a user can mend."""


class UserError(ValueError):
    """Something the user can mend, in one sentence with the numbers. The command line prints it and exits with 2."""
