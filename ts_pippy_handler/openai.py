"""OpenAI's requests, checked, become calls.

Under TorchServe the paths are ``/predictions/MODEL/VERSION/v1/...``. A parameter that would not be honoured is
refused by name, never ignored. Knows no engine and no TorchServe.

Source of the shapes: OpenAI's API reference, "Completions", "Chat" and "Models".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ts_pippy_handler.config import Int
from ts_pippy_handler.errors import InvalidRequestError, NotFoundError
from ts_pippy_handler.generator import Prompt, Wishes
from ts_pippy_handler.openai_formats import ChatFormat, CompletionFormat, OpenAIFormat
from ts_pippy_handler.payload import MAX_LOGPROBS, MAX_PROMPTS, SamplingFields, Text, TokenIds, checked, read_json
from ts_pippy_handler.replies import Call
from ts_pippy_handler.text import Tokenizer
from ts_pippy_handler.validation import show

_MAX_CHOICES = 128
_MAX_TOOLS = 128

_DEFAULT_TOKENS = 16  # of OpenAI's completions

_UNSUPPORTED = {
    "suffix": "text after the continuation",
    "functions": "function calling (tools are passed to the chat template)",
    "function_call": "function calling (tools are passed to the chat template)",
    "response_format": "constrained output",
    "audio": "audio",
    "modalities": "other modalities than text",
    "prediction": "predicted outputs",
    "reasoning_effort": "reasoning effort",
    "web_search_options": "web search",
    "verbosity": "verbosity",
    "service_tier": "a choice of service tiers",
}
"""Parameters of OpenAI's that clients send and that would change the answer."""
_HARMLESS_VALUES: dict[str, Sequence[Any]] = {
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
    "verbosity": ["medium"],
    "service_tier": ["auto", "default"],
}
"""Values of them that ask for what is done anyway."""


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class _Request(SamplingFields):
    """What completions and chats have in common. Beyond OpenAI's fields, those of other servers of this kind."""

    model: Text
    n: Int | None = Field(None, ge=1, le=_MAX_CHOICES)
    stream: bool | None = None
    stream_options: _Options | None = Field(None, description="an object with 'include_usage': true or false")
    user: str | None = None
    """Who asks. For the server's owner only; does not change the answer."""
    safety_identifier: str | None = None
    """As ``user``."""
    prompt_cache_key: str | None = None
    """As ``user``: shared prompts are found without it."""
    metadata: dict[str, str] | None = Field(None, description="an object of texts")
    """As ``user``."""
    store: bool | None = Field(None, description="false, since nothing is stored")

    @property
    def with_usage(self) -> bool:
        """Whether a stream shall tell the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


_Shape = TypeVar("_Shape", bound=_Request)


class CompletionRequest(_Request):
    """``POST v1/completions``."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    ) = Field(description=f"a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either; not empty")
    max_tokens: Int | None = Field(None, ge=1)
    logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    """Whether the text starts with the prompt."""
    best_of: Int | None = Field(None, ge=1, description="left out, or equal to n")

    def prompts(self) -> list[Prompt]:
        """Return what to continue."""
        given: Any = self.prompt
        if isinstance(given, str):
            return [Prompt(text=given)]
        if isinstance(given[0], int):
            return [Prompt(token_ids=given)]
        return [Prompt(text=each) if isinstance(each, str) else Prompt(token_ids=each) for each in given]


class ChatMessage(BaseModel):
    """One turn; further keys are the chat template's business."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Text
    content: str | list[dict[str, Any]] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the turn with its content as one text, as chat templates expect it.

        Raises:
            InvalidRequestError: If a part of the content is no text.
        """
        turn = self.model_dump(exclude_unset=True)
        if isinstance(self.content, list):
            for part in self.content:
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise InvalidRequestError(
                        f"messages: content parts must be {{'type': 'text', 'text': …}}, got {show(part)}"
                    )
            turn["content"] = "".join(part["text"] for part in self.content)
        return turn


class ChatRequest(_Request):
    """``POST v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)] = Field(
        description="a list of at least one {'role': text, 'content': text}"
    )
    max_tokens: Int | None = Field(None, ge=1)
    max_completion_tokens: Int | None = Field(None, ge=1)
    """The newer name of ``max_tokens``."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=_MAX_TOOLS)] | None = Field(
        None, description=f"a list of at most {_MAX_TOOLS} objects"
    )
    """Passed to the chat template; calls come back as text."""
    logprobs: bool | None = None
    top_logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: str | None = Field(None, description="'auto' or 'none'")
    parallel_tool_calls: bool | None = None

    def prompts(self) -> list[Prompt]:
        """Return what to continue."""
        tools = None if self.tool_choice == "none" else self.tools
        return [Prompt(messages=[message.for_template() for message in self.messages], tools=tools)]


def parse_completion(body: Mapping[str, Any], request_id: str, tokenizer: Tokenizer | None) -> Call:
    """Check the body of ``v1/completions``.

    Raises:
        InvalidRequestError: Naming each parameter that is wrong or would not be honoured.
    """
    request = _validate(CompletionRequest, body)
    choices = request.n or 1
    if request.best_of is not None and request.best_of != choices:
        raise InvalidRequestError(f"best_of: must be left out or equal to n ({choices}), got {request.best_of}")
    if request.echo and request.logprobs is not None:
        raise InvalidRequestError("echo: cannot be had together with logprobs; leave one of them out")
    wishes = request.sampling_wishes(
        max_new_tokens=request.max_tokens or _DEFAULT_TOKENS, logprobs=request.logprobs, samples_by_default=True
    )
    form = CompletionFormat(
        request_id,
        request.model,
        choices,
        tokenizer,
        with_usage=request.with_usage,
        with_prompt=bool(request.echo),
    )
    return _call(request, request.prompts(), wishes, form)


def parse_chat(body: Mapping[str, Any], request_id: str, tokenizer: Tokenizer | None) -> Call:
    """Check the body of ``v1/chat/completions``.

    Raises:
        InvalidRequestError: Naming each parameter that is wrong or would not be honoured.
    """
    request = _validate(ChatRequest, body)
    if request.tool_choice not in (None, "auto", "none"):
        raise InvalidRequestError(f"tool_choice: must be 'auto' or 'none', got {show(request.tool_choice)}")
    if None not in (request.max_tokens, request.max_completion_tokens):
        raise InvalidRequestError("max_tokens and max_completion_tokens are the same; send one of them")
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs: needs 'logprobs': true")
    wishes = request.sampling_wishes(
        max_new_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        samples_by_default=True,
    )
    form = ChatFormat(request_id, request.model, request.n or 1, tokenizer, with_usage=request.with_usage)
    return _call(request, request.prompts(), wishes, form)


def models(names: Sequence[str], created: int) -> dict[str, Any]:
    """Return the body of ``v1/models``."""
    return {"object": "list", "data": [model(name, created) for name in names]}


def model(name: str, created: int) -> dict[str, Any]:
    """Return the body of ``v1/models/NAME``."""
    return {"id": name, "object": "model", "created": created, "owned_by": "ts_pippy_handler"}


def check_model(asked: str, served: str) -> None:
    """Check the model a client asks for.

    Raises:
        NotFoundError: If it is another one than this handler serves.
    """
    if asked != served:
        raise NotFoundError(f"model: {show(asked)} is not served here, only {served!r} is")


def cancelled_id(body: Mapping[str, Any]) -> str:
    """Return the request that a body of ``v1/cancel`` names: ``x-request-id`` of its response, or its answer's ``id``.

    Raises:
        InvalidRequestError: If it names none.
    """
    fields = read_json(body)
    name = fields.get("id") if isinstance(fields, Mapping) and set(fields) == {"id"} else None
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"the body must be {{'id': the id of a request}}, got {show(fields)}")
    return name.removeprefix("chatcmpl-").removeprefix("cmpl-")


def _validate(shape: type[_Shape], body: Mapping[str, Any]) -> _Shape:
    fields = read_json(body)
    if not isinstance(fields, Mapping):
        raise InvalidRequestError(f"the body must be a JSON object, got {show(fields)}")
    given = {str(name): value for name, value in fields.items()}
    for name, meaning in _UNSUPPORTED.items():
        value = given.pop(name, None)
        if value is not None and value not in _HARMLESS_VALUES.get(name, ()):
            raise InvalidRequestError(f"{name}: {meaning} is not supported, got {show(value)}; leave it out")
    request = checked(shape, given)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options: needs 'stream': true")
    if request.store:
        raise InvalidRequestError("store: nothing is stored here; leave it out")
    return request


def _call(request: _Request, prompts: list[Prompt], wishes: Wishes, form: OpenAIFormat) -> Call:
    return Call(
        prompts=prompts,
        wishes=wishes,
        format=form,
        model=request.model,
        num_choices=request.n or 1,
        is_stream=bool(request.stream),
    )
