"""Text, JSON and form bodies become prompts and wishes; everything else is refused with a sentence."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ts_pippy_handler.errors import InvalidRequestError
from ts_pippy_handler.generator import Prompt, Wishes
from ts_pippy_handler.payload import ParsedRequest, check_fields, parse_request
from ts_pippy_handler.request import SampledRow

JSON = "application/json"
EMPTY = "the body is empty; send a prompt as text, JSON or a form"


def refused(data: dict[str, Any], content_type: str | None, *parts: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_request(data, content_type)
    message = str(caught.value)
    for part in parts:
        assert part in message
    assert len(message) < 600
    assert "\n" not in message


def fields(**given: Any) -> dict[str, Any]:
    """The three ways in which the same fields arrive."""
    return {"prompt": "x", **given}


@pytest.mark.parametrize("name", ["data", "body"])
@pytest.mark.parametrize("body", [b"Once upon", bytearray(b"Once upon"), "Once upon"])
@pytest.mark.parametrize("content_type", ["text/plain", None, "text/plain; charset=utf-8"])
def test_a_text_body_is_the_prompt(name: str, body: Any, content_type: str | None) -> None:
    parsed = parse_request({name: body}, content_type)
    assert parsed.payload.prompts() == [Prompt(text="Once upon")]
    assert parsed.payload.wishes() == Wishes()
    assert parsed.is_plain_text


def test_a_text_body_may_hold_anything_even_json() -> None:
    text = '{"prompt": "x"} 🎉\n'
    parsed = parse_request({"body": text.encode()}, "text/plain")
    assert parsed.payload.prompts() == [Prompt(text=text)]


@pytest.mark.parametrize("name", ["data", "body"])
def test_a_json_object_of_no_type_is_json(name: str) -> None:
    parsed = parse_request({name: b' {"prompt": "x", "max_new_tokens": 3}\n'})
    assert (parsed.payload.prompt, parsed.payload.max_new_tokens, parsed.is_plain_text) == ("x", 3, False)
    refused({name: b'{"prmpt": "x"}'}, None, "prmpt: unknown key")


@pytest.mark.parametrize("text", ['{"prompt": ', "{}}", "[1, 2]", '"a"', "{" * 100_000])
def test_a_text_of_no_type_that_is_no_json_object_is_the_prompt(text: str) -> None:
    assert parse_request({"data": text.encode()}).payload.prompts() == [Prompt(text=text)]


def test_json_that_came_as_an_empty_form_gets_a_hint() -> None:
    refused({}, "application/x-www-form-urlencoded", "If it was JSON, it needs 'Content-Type: application/json'")
    refused({}, "text/plain", "the body is empty")


@pytest.mark.parametrize("text", ["1_0", "٣", "0x10", ""])
def test_numbers_in_forms_are_plain_decimals(text: str) -> None:
    refused({"prompt": b"x", "max_new_tokens": text.encode()}, None, "max_new_tokens: must be a whole number")


ALL = {
    "max_new_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "presence_penalty": -2,
    "frequency_penalty": 0.5,
    "seed": 7,
    "stop": "end",
    "ignore_eos": True,
    "min_tokens": 2,
    "logprobs": 0,
}
WANTED = Wishes(
    max_new_tokens=5,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    repetition_penalty=1.5,
    presence_penalty=-2.0,
    frequency_penalty=0.5,
    seed=7,
    stop=("end",),
    ignore_eos=True,
    min_tokens=2,
    logprobs=0,
)


def all_ways() -> list[tuple[dict[str, Any], str | None]]:
    form = {name: str(value).encode() for name, value in fields(**ALL).items()}
    return [
        ({"body": fields(**ALL)}, JSON),
        ({"data": fields(**ALL)}, None),
        ({"body": json.dumps(fields(**ALL)).encode()}, "Application/JSON; charset=utf-8"),
        (form, "application/x-www-form-urlencoded"),
        ({name: value.decode() for name, value in form.items()}, None),
        ({name: bytearray(value) for name, value in form.items()}, "multipart/form-data; boundary=x"),
    ]


@pytest.mark.parametrize(("data", "content_type"), all_ways())
def test_fields_mean_the_same_in_json_and_forms(data: dict[str, Any], content_type: str | None) -> None:
    parsed = parse_request(data, content_type)
    assert parsed.payload.prompts() == [Prompt(text="x")]
    assert parsed.payload.wishes() == WANTED
    assert not parsed.payload.is_list
    assert not parsed.is_plain_text


@pytest.mark.parametrize(
    ("sent", "prompts", "is_list"),
    [
        ({"prompt": ["a", "b"]}, [Prompt(text="a"), Prompt(text="b")], True),
        ({"prompt": ["a"]}, [Prompt(text="a")], True),
        ({"input_ids": [1, 2]}, [Prompt(token_ids=[1, 2])], False),
        ({"input_ids": [[1, 2], [3]]}, [Prompt(token_ids=[1, 2]), Prompt(token_ids=[3])], True),
        (
            {"messages": [{"role": "user", "content": ""}]},
            [Prompt(messages=[{"role": "user", "content": ""}])],
            False,
        ),
    ],
)
def test_kinds_of_prompts(sent: dict[str, Any], prompts: list[Prompt], is_list: bool) -> None:
    payload = parse_request({"body": sent}, JSON).payload
    assert payload.prompts() == prompts
    assert payload.is_list is is_list


@pytest.mark.parametrize(("stop", "wanted"), [("a", ("a",)), (["a", "b"], ("a", "b")), ([], ()), (None, ())], ids=repr)
def test_stop_strings(stop: Any, wanted: tuple[str, ...]) -> None:
    assert check_fields(fields(stop=stop)).wishes().stop == wanted


def test_tokens_that_are_named() -> None:
    wishes = check_fields(fields(logit_bias={"0": -100, "42": 1.5}, stop_token_ids=[7, 0])).wishes()
    assert wishes.logit_bias == ((0, -100.0), (42, 1.5))
    assert wishes.stop_token_ids == (7, 0)
    nothing = check_fields(fields(logit_bias=None, stop_token_ids=None, logprobs=None, min_p=None)).wishes()
    assert nothing == check_fields(fields(logit_bias={}, stop_token_ids=[])).wishes() == Wishes()
    assert len(check_fields(fields(logit_bias={str(i): 0 for i in range(300)})).wishes().logit_bias) == 300


def test_null_leaves_a_switch_off() -> None:
    assert not check_fields(fields(ignore_eos=None)).wishes().ignore_eos
    assert not check_fields(fields(stream=None)).stream


def test_zero_and_null_are_kept_apart() -> None:
    wishes = check_fields(fields(temperature=0, top_k=0, seed=0, max_new_tokens=None)).wishes()
    assert (wishes.temperature, wishes.top_k, wishes.seed, wishes.max_new_tokens) == (0.0, 0, 0, None)


@pytest.mark.parametrize(
    ("data", "content_type", "parts"),
    [
        ({}, None, [EMPTY]),
        ({"body": b""}, "text/plain", [EMPTY]),
        ({"body": ""}, None, [EMPTY]),
        ({"body": b""}, JSON, ["the body is empty; send a JSON object with a 'prompt'"]),
        ({"body": b"  \n"}, JSON, ["the body is empty; send a JSON object with a 'prompt'"]),
        ({"body": b"good \xff"}, None, ["the body is not valid UTF-8: byte 0xff at offset 5"]),
        ({"body": b'{"\xfe'}, JSON, ["the JSON body is not valid UTF-8: byte 0xfe at offset 2"]),
        ({"body": b'{"prompt": '}, JSON, ["the body is not valid JSON: Expecting value", "got '{\"prompt\": '"]),
        ({"body": b"[" * 100_000}, JSON, ["the body is not valid JSON: "]),
        ({"body": b'{"seed": ' + b"9" * 5000 + b"}"}, JSON, ["the body is not valid JSON: "]),
        ({"body": b"[1]"}, JSON, ["the JSON body must be an object with a 'prompt', got [1]"]),
        ({"body": b"null"}, JSON, ["the JSON body must be an object with a 'prompt', got None"]),
        ({"body": ["x"]}, JSON, ["the JSON body must be an object with a 'prompt', got ['x']"]),
        ({"body": "x"}, JSON, ["the JSON body must be an object with a 'prompt', got 'x'"]),
        ({"prompt": b"x", "seed": b"\xff"}, None, ["form field 'seed' is not valid UTF-8: byte 0xff at offset 0"]),
        ({'{"prompt": "x"}': b""}, None, ["looks like JSON sent as a form; add 'Content-Type: application/json'"]),
        ({"prompt": b"x", "max_new_tokens": b"many"}, None, ["max_new_tokens: must be a whole number", "got 'many'"]),
        ({"prompt": b"x", "ignore_eos": b"perhaps"}, None, ["ignore_eos: must be true or false, got 'perhaps'"]),
        ({"prompt": b"x", "temperature": b"nan"}, None, ["temperature: must be a number", "got nan"]),
        ({"prompt": b"x", "max_tokens": b"3"}, None, ["max_tokens: unknown key", "did you mean 'max_new_tokens'?"]),
    ],
)
def test_bodies_that_make_no_sense(data: dict[str, Any], content_type: str | None, parts: list[str]) -> None:
    refused(data, content_type, *parts)


PROMPT = "prompt: must be a text that is not empty, or a list of 1 to 256 of them"
STOP = "stop: must be a text that is not empty, or a list of at most 64 of them"
IDS = "input_ids: must be a list of at least one token id, or a list of 1 to 256 of them"
MESSAGES = "messages: must be a list of at least one {'role': text, 'content': text}"
ONE = "exactly one of prompt, messages and input_ids is needed"
MESSAGE = {"role": "user", "content": "x"}
BIAS = "logit_bias: must be an object of at most 300 numbers from -100 to 100, each under a token id such as '42'"
STOP_TOKENS = "stop_token_ids: must be a list of at most 64 token ids"


@pytest.mark.parametrize(
    ("sent", "parts"),
    [
        ({}, [f"{ONE}, got none of them"]),
        ({"prompt": None}, [f"{ONE}, got none of them"]),
        ({"prompt": "x", "messages": [MESSAGE]}, [f"{ONE}, got prompt and messages"]),
        ({"prompt": "x", "input_ids": [1]}, [f"{ONE}, got prompt and input_ids"]),
        ({"prompt": ""}, [PROMPT, "got ''"]),
        ({"prompt": []}, [PROMPT, "got []"]),
        ({"prompt": 5}, [PROMPT, "got 5"]),
        ({"prompt": {"text": "x"}}, [PROMPT, "got {'text': 'x'}"]),
        ({"prompt": ["a", ""]}, [PROMPT, "got ['a', '']"]),
        ({"prompt": ["a"] * 257}, [PROMPT]),
        ({"prompt": "\ud800"}, [PROMPT, r"got '\ud800'"]),
        ({"messages": []}, [MESSAGES, "got []"]),
        ({"messages": "hello"}, [MESSAGES, "got 'hello'"]),
        ({"messages": [{"role": "user"}]}, [MESSAGES]),
        ({"messages": [{"role": "", "content": "x"}]}, [MESSAGES]),
        ({"messages": [{**MESSAGE, "name": "y"}]}, [MESSAGES]),
        ({"messages": [{"role": "user", "content": 5}]}, [MESSAGES, "5"]),
        ({"input_ids": []}, [IDS, "got []"]),
        ({"input_ids": [1, True]}, [IDS]),
        ({"input_ids": [[1], []]}, [IDS]),
        ({"input_ids": [1.5]}, [IDS]),
        ({"input_ids": "1,2"}, [IDS, "got '1,2'"]),
        ({"max_new_tokens": 0}, ["max_new_tokens: must be a whole number", "at least 1, got 0"]),
        ({"max_new_tokens": True}, ["max_new_tokens: must be a whole number", "got True"]),
        ({"max_new_tokens": "5"}, ["max_new_tokens: must be a whole number", "got '5'"]),
        ({"max_new_tokens": 2.5}, ["max_new_tokens: must be a whole number", "got 2.5"]),
        ({"temperature": -0.5}, ["temperature: must be a number", "at least 0 and at most 100", "got -0.5"]),
        ({"temperature": float("inf")}, ["temperature: must be a number", "got inf"]),
        ({"temperature": True}, ["temperature: must be a number", "got True"]),
        ({"top_p": 0}, ["top_p: must be a number", "above 0 and at most 1", "got 0"]),
        ({"top_p": float("nan")}, ["top_p: must be a number", "got nan"]),
        ({"top_p": 1.5}, ["top_p: must be a number", "got 1.5"]),
        ({"top_k": -1}, ["top_k: must be a whole number", "at least 0", "got -1"]),
        ({"seed": -1}, ["seed: must be a whole number", "at least 0 and below", "got -1"]),
        ({"seed": 2**63}, ["seed: must be a whole number", f"got {2**63}"]),
        ({"stop": ""}, [STOP, "got ''"]),
        ({"stop": 5}, [STOP, "got 5"]),
        ({"stop": ["a", ""]}, [STOP]),
        ({"stop": ["a"] * 65}, [STOP]),
        ({"min_p": 1.5}, ["min_p: must be a number, at least 0 and at most 1, got 1.5"]),
        ({"min_p": float("nan")}, ["min_p: must be a number", "got nan"]),
        ({"repetition_penalty": 0}, ["repetition_penalty: must be a number, above 0, got 0"]),
        ({"repetition_penalty": float("inf")}, ["repetition_penalty: must be a number", "got inf"]),
        ({"presence_penalty": 2.1}, ["presence_penalty: must be a number, at least -2 and at most 2, got 2.1"]),
        ({"frequency_penalty": -3}, ["frequency_penalty: must be a number, at least -2 and at most 2, got -3"]),
        ({"logit_bias": {"5": 101}}, [BIAS, "got {'5': 101}"]),
        ({"logit_bias": {"5": True}}, [BIAS]),
        ({"logit_bias": {"5": float("nan")}}, [BIAS]),
        ({"logit_bias": {"a": 1}}, [BIAS, "got {'a': 1}"]),
        ({"logit_bias": {"-1": 1}}, [BIAS]),
        ({"logit_bias": {"05": 1}}, [BIAS]),
        ({"logit_bias": {"5\n": 1}}, [BIAS]),
        ({"logit_bias": {"9" * 5000: 1}}, [BIAS]),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, [BIAS]),
        ({"logit_bias": [[5, 1]]}, [BIAS, "got [[5, 1]]"]),
        ({"stop_token_ids": 5}, [STOP_TOKENS, "got 5"]),
        ({"stop_token_ids": ["5"]}, [STOP_TOKENS]),
        ({"stop_token_ids": [1] * 65}, [STOP_TOKENS]),
        ({"min_tokens": -1}, ["min_tokens: must be a whole number, at least 0, got -1"]),
        ({"logprobs": 21}, ["logprobs: must be a whole number, at least 0 and at most 20, got 21"]),
        ({"logprobs": True}, ["logprobs: must be a whole number", "got True"]),
        ({"ignore_eos": 1}, ["ignore_eos: must be true or false, got 1"]),
        ({"stream": 1}, ["stream: must be true or false, got 1"]),
        ({"strem": True}, ["strem: unknown key (value True); did you mean 'stream'?"]),
        ({"max_tokens": 3}, ["max_tokens: unknown key (value 3); did you mean 'max_new_tokens'?"]),
        ({"seed": -1, "top_k": "x"}, ["seed: must be", "top_k: must be"]),
    ],
    ids=repr,
)
def test_fields_that_cannot_be_honoured(sent: dict[str, Any], parts: list[str]) -> None:
    has_source = sent == {} or {"prompt", "messages", "input_ids"} & set(sent)
    refused({"body": sent if has_source else {"prompt": "x", **sent}}, JSON, *parts)


@pytest.mark.parametrize("name", ["top_k", "seed", "max_new_tokens"])
def test_every_number_that_is_accepted_can_cross_between_ranks(name: str) -> None:
    for value in (2**31, 2**63 - 1, 2**64 - 1, 10**30):
        try:
            wishes = check_fields(fields(**{name: value})).wishes()
        except InvalidRequestError as error:
            assert f"{name}: must be a whole number" in str(error)  # noqa: PT017 - either answer is right
        else:
            if name != "max_new_tokens":  # checked against the window before it goes anywhere
                row = SampledRow(0, 1, 1.0, wishes.top_k or 0, 1.0, wishes.seed or 0)
                assert msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=SampledRow) == row


def test_the_result_is_what_a_handler_needs() -> None:
    parsed = parse_request({"body": b"x"})
    assert parsed == ParsedRequest(payload=check_fields({"prompt": "x"}), is_plain_text=True)


def test_a_byte_order_mark_before_json_is_no_error() -> None:
    assert parse_request({"body": b'\xef\xbb\xbf{"prompt": "x"}'}, "application/json").payload.prompt == "x"
