"""The package's errors, and the one place that words them.

Owns the three error classes and the helpers that say field, value, choices and what to do. Imports nothing of
the package.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable

__all__ = [
    "OffloadConfigError",
    "OffloadError",
    "OffloadStateError",
    "describe",
    "field_path",
    "not_one_of",
    "quoted",
    "unknown_field",
    "wrong_type",
]


class OffloadError(Exception):
    """Base of every error that this package raises on purpose."""


class OffloadConfigError(OffloadError, ValueError):
    """What was asked for, or declared, cannot be done: the message says which field, and what to do."""


class OffloadStateError(OffloadError, RuntimeError):
    """A valid call that the present state does not allow, such as `.to("cuda")` while offload is on."""


_MAX_SHOWN = 80  # characters of a value or a name that a message repeats

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _MAX_SHOWN
_repr.maxlist = _repr.maxtuple = _repr.maxdict = 8


def describe(field: str, value: object) -> str:
    """Return `field=value` with a value that is cut to a readable length.

    Args:
        field (`str`): Path of the field, such as `layer_options.dit.resident_layers`.
        value (`object`): The value. A `repr` that raises is replaced by the name of the type.
    """
    return f"{field}={_shown(value)}"


def field_path(parent: str, name: object) -> str:
    """Return the path of field `name` of `parent`; a name that could not be read there is put in brackets."""
    if isinstance(name, str) and name.isidentifier() and len(name) <= _MAX_SHOWN:
        return f"{parent}.{name}" if parent else name
    return f"{parent}[{_shown(name)}]"


def quoted(names: Iterable[str]) -> str:
    """Return names as they are written in Python, joined by commas: `'dit', 'vae'`."""
    return ", ".join(repr(name) for name in names)


def not_one_of(field: str, value: object, choices: Iterable[str], *, advice: str | None = None) -> OffloadConfigError:
    """Make the error for a value outside a closed set of names.

    Args:
        field (`str`): Path of the field.
        value (`object`): What was given. The choice that is spelled most like it is suggested.
        choices (`Iterable[str]`): What could have been given.
        advice (`str`, *optional*): A sentence on what to do, added at the end.

    Returns:
        [`OffloadConfigError`]: To be raised by the caller.
    """
    return _refusal(f"{describe(field, value)} is not one of", value, choices, advice)


def unknown_field(
    parent: str, name: object, value: object, choices: Iterable[str], *, advice: str | None = None
) -> OffloadConfigError:
    """Make the error for a field, or a key, outside a closed set of names.

    Args:
        parent (`str`): Path of the mapping that the field is in; `""` for the outermost.
        name (`object`): The field. The choice that is spelled most like it is suggested.
        value (`object`): What the field holds.
        choices (`Iterable[str]`): The fields that could have been given.
        advice (`str`, *optional*): A sentence on what to do, added at the end.

    Returns:
        [`OffloadConfigError`]: To be raised by the caller.
    """
    subject = f"{describe(field_path(parent, name), value)}: {_shown(name)} is not one of"
    return _refusal(subject, name, choices, advice)


def wrong_type(field: str, value: object, expected: str) -> OffloadConfigError:
    """Make the error for a value of the wrong type.

    Args:
        field (`str`): Path of the field.
        value (`object`): What was given.
        expected (`str`): What belongs there, with its article: `"true or false"`, `"a list of names"`.

    Returns:
        [`OffloadConfigError`]: To be raised by the caller.
    """
    kind = "" if value is None else f" is of type {type(value).__name__}"
    return OffloadConfigError(f"{describe(field, value)}{kind}; it must be {expected}.")


def _refusal(subject: str, given: object, choices: Iterable[str], advice: str | None) -> OffloadConfigError:
    choices = tuple(choices)
    message = f"{subject}: {quoted(choices)}."
    close = difflib.get_close_matches(given[:_MAX_SHOWN], choices, n=1) if isinstance(given, str) else []
    if close:
        message += f" Did you mean {close[0]!r}?"
    if advice:
        message += f" {advice}"
    return OffloadConfigError(message)


def _shown(value: object) -> str:
    try:
        return _repr.repr(value)
    except Exception:  # such as an int beyond Python's limit of printable digits
        return f"<{type(value).__name__}>"
