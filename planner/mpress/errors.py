"""What we say when we refuse: what, where, why, and what to do.

Exit codes are part of the interface: 1 = no plan exists, 2 = the input is wrong or cannot be traced,
3 = a plan broke a rule (our bug), 130 = interrupted before any plan was found.
"""

from __future__ import annotations


class MpressError(Exception):
    """A refusal in the user's words.

    `code` is stable (listed in docs/errors.md), `message` a sentence, `where` names file:line, module path,
    flag or key, `hint` says what to do next.
    """

    exit_code = 2

    def __init__(self, code: str, message: str, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.where = where
        self.hint = hint


class InputError(MpressError):
    """The model file, a flag or a profile is wrong, or the model cannot be traced (exit 2)."""


class InfeasibleError(MpressError):
    """No plan exists under this machine and recipe (exit 1).  missing_bytes: what the worst stage is short of, 0 if that is not known."""

    exit_code = 1

    def __init__(self, code: str, message: str, where: str = "", hint: str = "", missing_bytes: int = 0) -> None:
        super().__init__(code, message, where, hint)
        self.missing_bytes = missing_bytes


class BrokenPlanError(MpressError):
    """A plan violates a rule of the machine; it is never emitted (exit 3)."""

    exit_code = 3
