"""Turn pydantic's findings into sentences: where, what was seen, what is allowed, what was probably meant.

Knows nothing of which model is validated; ``config`` and ``payload`` share it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_SHOWN_CHARS = 200
_SHOWN_FINDINGS = 8


def show(value: object) -> str:
    """Return ``repr(value)`` cut to a length fit for an error message."""
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def nearest(name: object, allowed: Iterable[str]) -> str:
    """Return a clause naming the closest allowed name, or all of them when none is close."""
    names = sorted(allowed)
    matches = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    return f"did you mean {matches[0]!r}?" if matches else f"allowed: {', '.join(names)}"


def describe_errors(error: ValidationError, model: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> str:
    """Return one readable line for all findings of a failed validation.

    Args:
        error: What pydantic raised.
        model: The model that was validated; gives the allowed names for unknown ones.
        values: What was validated.
        prefix: Path put before each field, for instance ``"handler"``.
    """
    lines: dict[str, str] = {}
    rest = ""
    for item in error.errors(include_url=False):
        path = _cut(".".join(str(part) for part in (prefix, *item["loc"][:1]) if part != ""))
        if len(lines) == _SHOWN_FINDINGS and path not in lines:
            rest = "; and more"
            break
        # A field that may be several things has a finding for each; one sentence says it all.
        lines.setdefault(path, _describe(item, model, values))
    return "; ".join(f"{path}: {line}" if path else line for path, line in lines.items()) + rest


def _describe(item: Mapping[str, Any], model: type[BaseModel], values: Mapping[str, Any]) -> str:
    location = item["loc"]
    field = model.model_fields.get(str(location[0])) if location else None
    if item["type"] == "extra_forbidden" and len(location) == 1:
        return f"unknown key (value {show(item['input'])}); {nearest(location[-1], model.model_fields)}"
    if item["type"] == "missing" and len(location) == 1:
        return "missing, a value is required"
    message = item["msg"].removeprefix("Value error, ")
    if field is None:
        return f"{message}, got {show(item['input'])}" if location else message
    if item["type"] == "value_error" and not _kinds(field.annotation) & {int, float}:
        return f"{message}, got {show(item['input'])}"
    # The whole value: the findings inside a list depend on which of its allowed forms was tried.
    return f"must be {_allowed(field)}, got {show(values.get(str(location[0])))}"


_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _kinds(annotation: object) -> set[object]:
    """Return the plain types inside an annotation such as ``Annotated[int, ...] | None``."""
    inner = get_args(annotation)
    return set().union(*map(_kinds, inner)) if inner else {annotation} & set(_KINDS)


def _allowed(field: FieldInfo) -> str:
    """Say what a field accepts: its own description, or its kind and bounds."""
    if field.description:
        return field.description
    kinds = " or ".join(text for kind, text in _KINDS.items() if kind in _kinds(field.annotation))
    bounds = [
        f"{word} {getattr(bound, name)}"
        for bound in field.metadata
        for name, word in _BOUNDS.items()
        if hasattr(bound, name)
    ]
    return ", ".join(part for part in (kinds, " and ".join(bounds)) if part)
