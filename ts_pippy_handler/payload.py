"""The body of an inference request, checked: what TorchServe hands to a handler becomes prompts and wishes.

Text, JSON and form bodies are understood; anything else, and any field we would not honour, is refused with a
sentence. Knows the shapes TorchServe uses for request data; does not import TorchServe, and knows no engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ts_pippy_handler.config import Float, Int
from ts_pippy_handler.errors import InvalidRequestError
from ts_pippy_handler.generator import Prompt, Wishes
from ts_pippy_handler.replies import Call, PlainFormat, TextFormat
from ts_pippy_handler.validation import describe_errors, show

_NUMBERS = {
    "max_new_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "min_tokens": int,
    "logprobs": int,
    "timeout": float,
}
"""Fields of a form that are numbers; a form carries text only."""
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}
MAX_PROMPTS = 256
_MAX_STOPS = 64
_MAX_STOP_TOKENS = 64
_MAX_BIASES = 300
MAX_LOGPROBS = 20

Shape = TypeVar("Shape", bound=BaseModel)
Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Int], Field(min_length=1)]
TokenIdText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,18})$")]
Bias = Annotated[Float, Field(ge=-100, le=100)]


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Text
    content: str


class SamplingFields(BaseModel):
    """What every kind of request may say about how tokens are chosen, and when to stop."""

    model_config = ConfigDict(extra="forbid", strict=True)

    temperature: Float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    """0 takes the most likely token."""
    top_p: Float | None = Field(None, gt=0, le=1)
    top_k: Int | None = Field(None, ge=0, lt=2**31)
    min_p: Float | None = Field(None, ge=0, le=1)
    repetition_penalty: Float | None = Field(None, gt=0, allow_inf_nan=False)
    presence_penalty: Float | None = Field(None, ge=-2, le=2)
    frequency_penalty: Float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[TokenIdText, Bias], Field(max_length=_MAX_BIASES)] | None = Field(
        None,
        description=f"an object of at most {_MAX_BIASES} numbers from -100 to 100, each under a token id such as '42'",
    )
    """Added to the logits of the named tokens."""
    seed: Int | None = Field(None, ge=0, lt=2**63)
    stop: Text | Annotated[list[Text], Field(max_length=_MAX_STOPS)] | None = Field(
        None, description=f"a text that is not empty, or a list of at most {_MAX_STOPS} of them"
    )
    stop_token_ids: Annotated[list[Int], Field(max_length=_MAX_STOP_TOKENS)] | None = Field(
        None, description=f"a list of at most {_MAX_STOP_TOKENS} token ids"
    )
    ignore_eos: bool | None = None
    timeout: Float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds after which the answer ends with what there is; at most the server's own limit."""
    min_tokens: Int | None = Field(None, ge=0)

    def sampling_wishes(
        self, *, max_new_tokens: int | None, logprobs: int | None, samples_by_default: bool = False
    ) -> Wishes:
        """Return how to continue.

        Args:
            max_new_tokens: New tokens, under whatever name they were asked for.
            logprobs: Alternatives to report for each token; None reports nothing.
            samples_by_default: Whether a request that names no temperature is sampled.
        """
        return Wishes(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            samples_by_default=samples_by_default,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple((int(token_id), bias) for token_id, bias in (self.logit_bias or {}).items()),
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            timeout_s=self.timeout,
            min_tokens=self.min_tokens,
            logprobs=logprobs,
        )


class GenerationPayload(SamplingFields):
    """A request of the plain TorchServe contract."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)] | None = Field(
        None, description=f"a text that is not empty, or a list of 1 to {MAX_PROMPTS} of them"
    )
    """One text or several; several give a list of answers."""
    messages: Annotated[list[Message], Field(min_length=1)] | None = Field(
        None, description="a list of at least one {'role': text, 'content': text}"
    )
    """A conversation for the model's chat template, instead of a prompt."""
    input_ids: TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)] | None = Field(
        None, description=f"a list of at least one token id, or a list of 1 to {MAX_PROMPTS} of them"
    )
    """Token ids instead of text, for one prompt or several."""
    max_new_tokens: Int | None = Field(None, ge=1)
    logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """How many likely tokens to report beside each chosen one."""
    stream: bool | None = None
    """Whether the answer comes in pieces, one JSON object per line."""

    @model_validator(mode="after")
    def _one_source(self) -> GenerationPayload:
        given = [name for name in ("prompt", "messages", "input_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            seen = " and ".join(given) or "none of them"
            raise ValueError(f"exactly one of prompt, messages and input_ids is needed, got {seen}")
        return self

    @property
    def is_list(self) -> bool:
        """Whether several prompts were sent, so that a list of answers is due."""
        if self.input_ids is not None:
            return isinstance(self.input_ids[0], list)
        return isinstance(self.prompt, list)

    def prompts(self) -> list[Prompt]:
        """Return what to continue."""
        if self.messages is not None:
            return [Prompt(messages=[message.model_dump() for message in self.messages])]
        if self.input_ids is not None:
            rows = self.input_ids if self.is_list else [self.input_ids]
            return [Prompt(token_ids=row) for row in rows]  # type: ignore[arg-type]
        texts = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        return [Prompt(text=text) for text in texts]

    def wishes(self) -> Wishes:
        """Return how to continue."""
        return self.sampling_wishes(max_new_tokens=self.max_new_tokens, logprobs=self.logprobs)


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A checked request and the form its answer takes."""

    payload: GenerationPayload
    is_plain_text: bool
    """Whether the body was a bare prompt; then the answer is bare text too."""

    def call(self) -> Call:
        """Return what to run and how to answer."""
        payload = self.payload
        return Call(
            prompts=payload.prompts(),
            wishes=payload.wishes(),
            format=TextFormat() if self.is_plain_text else PlainFormat(is_list=payload.is_list),
            is_stream=bool(payload.stream),
        )


def parse_request(data: Mapping[str, Any], content_type: str | None = None) -> ParsedRequest:
    """Check one item of the list that TorchServe passes to ``handle``.

    Args:
        data: Body or form fields by name, values as bytes, text, or parsed JSON.
        content_type: The request's Content-Type header. Without one, a body that is a JSON object counts as JSON.

    Raises:
        InvalidRequestError: Saying what was seen and what is allowed.
    """
    if not data:
        hint = ""
        if "form-urlencoded" in (content_type or "").lower():  # what curl -d says it sends, whatever it sends
            hint = ". If it was JSON, it needs 'Content-Type: application/json'"
        raise InvalidRequestError(f"the body is empty; send a prompt as text, JSON or a form{hint}")
    for name in ("body", "data"):
        if set(data) == {name}:
            return _parse_body(data[name], content_type or "")
    return ParsedRequest(payload=check_fields(_form_fields(data)), is_plain_text=False)


def check_fields(fields: Any) -> GenerationPayload:
    """Check the fields of a request.

    Raises:
        InvalidRequestError: Naming each wrong field, the value seen and what is allowed.
    """
    if not isinstance(fields, Mapping):
        raise InvalidRequestError(f"the JSON body must be an object with a 'prompt', got {show(fields)}")
    return checked(GenerationPayload, fields)


def checked(shape: type[Shape], fields: Mapping[str, Any]) -> Shape:
    """Check the fields of a request of some shape.

    Raises:
        InvalidRequestError: Naming each wrong field, the value seen and what is allowed.
    """
    try:
        return shape.model_validate(dict(fields))
    except ValidationError as error:
        raise InvalidRequestError(describe_errors(error, shape, fields)) from None


def read_json(data: Mapping[str, Any]) -> Any:
    """Return the JSON value that one item of the list that TorchServe passes to ``handle`` holds.

    Raises:
        InvalidRequestError: If there is none.
    """
    if len(data) != 1 or not set(data) <= {"body", "data"}:
        raise InvalidRequestError("the body must be a JSON object; send it with 'Content-Type: application/json'")
    [body] = data.values()
    return _parse_json(bytes(body)) if isinstance(body, (bytes, bytearray)) else body


def _parse_body(body: Any, content_type: str) -> ParsedRequest:
    if isinstance(body, (bytes, bytearray)):
        if "json" in content_type.lower():
            return ParsedRequest(payload=check_fields(_parse_json(bytes(body))), is_plain_text=False)
        body = _decode(bytes(body), "the body")
        if not content_type and (fields := _json_object(body)) is not None:
            return ParsedRequest(payload=check_fields(fields), is_plain_text=False)
    if isinstance(body, str):
        if "json" in content_type.lower():
            raise InvalidRequestError(f"the JSON body must be an object with a 'prompt', got {show(body)}")
        if not body:
            raise InvalidRequestError("the body is empty; send a prompt as text, JSON or a form")
        return ParsedRequest(payload=check_fields({"prompt": body}), is_plain_text=True)
    return ParsedRequest(payload=check_fields(body), is_plain_text=False)


def _parse_json(body: bytes) -> Any:
    text = _decode(body, "the JSON body").removeprefix("\ufeff")  # which some editors put before UTF-8
    if not text.strip():
        raise InvalidRequestError("the body is empty; send a JSON object with a 'prompt'")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}, got {show(text)}") from None


def _json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is, if it is one: gRPC and ``curl -T`` do not say what they send."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _decode(body: bytes, what: str) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{what} is not valid UTF-8: byte {body[error.start]:#04x} at offset {error.start}"
        ) from None


def _form_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in data.items():
        text = _decode(bytes(value), f"form field {name!r}") if isinstance(value, (bytes, bytearray)) else value
        fields[name] = _number(name, text) if isinstance(text, str) else text
        if name.lstrip().startswith("{"):
            raise InvalidRequestError("the body looks like JSON sent as a form; add 'Content-Type: application/json'")
    for name in ("ignore_eos", "stream"):
        if isinstance(fields.get(name), str):
            fields[name] = _SWITCHES.get(fields[name].lower(), fields[name])
    return fields


def _number(name: str, text: str) -> Any:
    if name not in _NUMBERS or not re.fullmatch(r"[-+0-9.eEinfa]+", text):  # Python would also take 1_000
        return text
    try:
        return _NUMBERS[name](text)
    except ValueError:
        return text  # refused by the check, which names what was seen
