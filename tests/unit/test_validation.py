"""Findings of a validation become one line a user can act on."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ts_pippy_handler.validation import describe_errors, nearest, show


class Example(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    count: int = Field(1, ge=1, lt=10)
    ratio: float | None = Field(None, gt=0, le=1)
    name: str = "x"
    flag: bool = False
    items: list[int] = Field([], description="a list of whole numbers")
    either: str | Annotated[list[str], Field(max_length=2)] = Field("x", description="a text or two")

    @model_validator(mode="after")
    def _not_seven(self) -> Example:
        if self.count == 7:
            raise ValueError("seven is not wanted")
        return self


def described(values: dict[str, object], prefix: str = "") -> str:
    with pytest.raises(ValidationError) as caught:
        Example.model_validate(values)
    return describe_errors(caught.value, Example, values, prefix)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"count": 0}, "count: must be a whole number, at least 1 and below 10, got 0"),
        ({"count": 10}, "count: must be a whole number, at least 1 and below 10, got 10"),
        ({"count": "3"}, "count: must be a whole number, at least 1 and below 10, got '3'"),
        ({"ratio": 0}, "ratio: must be a number, above 0 and at most 1, got 0"),
        ({"ratio": "x"}, "ratio: must be a number, above 0 and at most 1, got 'x'"),
        ({"name": 5}, "name: must be a text, got 5"),
        ({"flag": "yes"}, "flag: must be true or false, got 'yes'"),
        ({"items": [1, "a", 3]}, "items: must be a list of whole numbers, got [1, 'a', 3]"),
        ({"either": 5}, "either: must be a text or two, got 5"),
        ({"either": ["a", "b", "c"]}, "either: must be a text or two, got ['a', 'b', 'c']"),
        ({"naem": 5}, "naem: unknown key (value 5); did you mean 'name'?"),
        ({"count": 7}, "seven is not wanted"),
    ],
)
def test_one_line_for_each_finding(values: dict[str, object], line: str) -> None:
    assert described(values) == line


def test_the_prefix_comes_first_and_findings_are_joined() -> None:
    line = described({"count": "a", "flag": 3}, "block")
    assert line.startswith("block.count: must be a whole number")
    assert line.endswith("; block.flag: must be true or false, got 3")


def test_a_missing_value() -> None:
    class Needs(BaseModel):
        wanted: int

    with pytest.raises(ValidationError) as caught:
        Needs.model_validate({})
    assert describe_errors(caught.value, Needs, {}) == "wanted: missing, a value is required"


def test_long_values_are_cut() -> None:
    assert show("ab") == "'ab'"
    shown = show("a" * 500)
    assert shown.endswith("…")
    assert len(shown) <= 201


def test_the_nearest_name() -> None:
    assert nearest("chunk", ["chunks", "split"]) == "did you mean 'chunks'?"
    assert nearest("qqq", ["split", "chunks"]) == "allowed: chunks, split"
    assert nearest(5, ["b", "a"]) == "allowed: a, b"


def test_what_a_client_wrote_does_not_come_back_in_full() -> None:
    line = described({f"field{number}": 1 for number in range(10_000)})
    assert line.startswith("field0: unknown key (value 1); allowed: ")
    assert line.endswith("; and more")
    assert len(line) < 2_000
    assert len(described({"x" * 1_000_000: "y" * 1_000_000})) < 1_000
