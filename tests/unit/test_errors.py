"""Each error has its own status and code, and its text is the body."""

from __future__ import annotations

import pytest

from ts_pippy_handler import errors

TREE = {
    errors.PippyError: (Exception, 500, "internal"),
    errors.LoadError: (errors.PippyError, 500, "load_failed"),
    errors.ConfigError: (errors.LoadError, 500, "bad_config"),
    errors.CheckpointError: (errors.LoadError, 500, "bad_checkpoint"),
    errors.UnsupportedModelError: (errors.LoadError, 500, "unsupported_model"),
    errors.InvalidRequestError: (errors.PippyError, 400, "invalid_request"),
    errors.NotFoundError: (errors.PippyError, 404, "not_found"),
    errors.OverloadedError: (errors.PippyError, 429, "overloaded"),
    errors.DrainingError: (errors.PippyError, 503, "draining"),
    errors.ServerError: (errors.PippyError, 502, "server_failed"),
    errors.PipelineError: (errors.PippyError, 503, "pipeline_failed"),
    errors.RankLostError: (errors.PipelineError, 503, "pipeline_failed"),
}


def test_the_tree_is_complete() -> None:
    defined = {item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, Exception)}
    assert defined == set(TREE)
    assert len({code for _, _, code in TREE.values()}) == len(TREE) - 1, "a lost rank is one way for a pipeline to fail"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("went wrong", "went wrong"),
        ("field 'x':\n    must be a number\n\nSee the guide.\n", "field 'x': must be a number; See the guide."),
        ("", "ValueError"),
        ("x" * 400, "x" * 299 + "…"),
    ],
)
def test_the_text_of_other_libraries_is_one_line(text: str, line: str) -> None:
    assert errors.one_line(ValueError(text)) == line


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_status_code_and_body(kind: type[errors.PippyError]) -> None:
    base, status, code = TREE[kind]
    assert kind.__base__ is base
    assert kind.status == status
    assert kind("went wrong").as_dict() == {"error": {"code": code, "message": "went wrong"}}
    line = next(line for line in (errors.__doc__ or "").splitlines() if f"{kind.__name__} " in line)
    assert line.split()[line.split().index(kind.__name__) + 1 :][:2] == [str(status), code]


def test_a_message_that_is_sent_is_never_long() -> None:
    error = errors.InvalidRequestError("x" * 10_000_000)
    assert error.message == "x" * 999 + "…"
    assert error.as_dict()["error"]["message"] == error.message
