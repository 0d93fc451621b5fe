"""Turn pydantic's findings into sentences: where, what was seen, what is allowed, what was probably meant.

Knows nothing of which model is validated; ``config`` and ``payload`` share it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

_SHOWN_CHARS = 60


def show(value: object) -> str:
    """Return ``repr(value)`` cut to a length fit for an error message."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def nearest(name: object, allowed: Iterable[str]) -> str:
    """Return a clause naming the closest allowed name, or all of them when none is close."""
    names = sorted(allowed)
    matches = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    return f"did you mean {matches[0]!r}?" if matches else f"allowed: {', '.join(names)}"


def describe_errors(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """Return one readable line for all findings of a failed validation.

    Args:
        error: What pydantic raised.
        model: The model that was validated; gives the allowed names for unknown ones.
        prefix: Path put before each field, for instance ``"handler"``.
    """
    lines: list[str] = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in (prefix, *item["loc"][:1]) if part != "")
        line = f"{path}: {_describe(item, model)}"
        if line not in lines:
            lines.append(line)
    return "; ".join(lines)


def _describe(item: Mapping[str, Any], model: type[BaseModel]) -> str:
    if item["type"] == "extra_forbidden":
        clause = nearest(item["loc"][-1], model.model_fields)
        return f"unknown key (value {show(item['input'])}); {clause}"
    if item["type"] == "missing":
        return "missing, a value is required"
    message = item["msg"].removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}, got {show(item['input'])}"
