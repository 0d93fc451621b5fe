"""Prompts in, finished answers out: the tokenizer and the engine put together.

The handlers and the command line use this; it knows no HTTP and no TorchServe.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ts_pippy_handler.completion import Completion
from ts_pippy_handler.config import HandlerConfig
from ts_pippy_handler.engine import Engine
from ts_pippy_handler.errors import InvalidRequestError, PippyError
from ts_pippy_handler.generation_defaults import read_defaults
from ts_pippy_handler.request import FinishReason, SamplingParams, TokenEvent
from ts_pippy_handler.text import Tokenizer
from ts_pippy_handler.unexpected import unexpected


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What to continue: exactly one of text, token ids, or a conversation."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions the model may call, for the chat template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """How to continue, as the client said it; None where it did not."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    samples_by_default: bool = False
    """Whether no temperature means the model's own, else 1; otherwise it means the most likely token."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    timeout_s: float | None = None
    min_tokens: int | None = None
    logprobs: int | None = None


class Generator:
    """Continues prompts of one model."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, config: HandlerConfig) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._config = config
        self._defaults = read_defaults(config.model_path)

    @property
    def max_response_size(self) -> int:
        """Bytes that can be sent at once."""
        return self._config.max_response_size

    def submit(self, prompt: Prompt, wishes: Wishes) -> Completion:
        """Start continuing a prompt; as :meth:`submit_all` for one."""
        return self.submit_all([prompt], wishes)[0]

    def submit_all(self, prompts: Sequence[Prompt], wishes: Wishes, *, num_choices: int = 1) -> list[Completion]:
        """Start continuing several prompts, all or none of them.

        Args:
            prompts: What to continue.
            wishes: How, the same for all of them.
            num_choices: Continuations of each prompt, each drawn with a seed of its own: the first with the seed that
                was asked for, the next with the one after it, and so on.

        Returns:
            The choices of the first prompt, then those of the second, and so on.

        Raises:
            InvalidRequestError: If one cannot be honoured; none is left running then.
            OverloadedError: If too many requests wait.
            PipelineError: If the pipeline is broken.
        """
        self._check_limits(wishes, num_choices)
        # Before the prompts are encoded: a refusal has to cost next to nothing when there are many.
        self.engine.check_room(len(prompts) * num_choices)
        completions = [
            completion
            for prompt in prompts
            for completion in self._choices(self._completion(prompt, wishes), num_choices)
        ]
        try:
            for completion in completions:
                self._start(completion, wishes.timeout_s)
        except PippyError:
            self.cancel(completions)
            raise
        return completions

    def cancel(self, completions: Sequence[Completion]) -> None:
        """End completions early; those that have finished stay as they are."""
        for completion in completions:
            if completion.number >= 0:
                self.engine.abort(completion.number)

    def _check_limits(self, wishes: Wishes, num_choices: int) -> None:
        if len(wishes.stop) > self._config.max_stop_strings:
            raise InvalidRequestError(
                f"stop: {len(wishes.stop)} strings, but this model takes at most {self._config.max_stop_strings} "
                "(handler.max_stop_strings)"
            )
        if num_choices > self._config.max_choices:
            raise InvalidRequestError(
                f"n: {num_choices} choices, but this model gives at most {self._config.max_choices} "
                "(handler.max_choices)"
            )

    def _start(self, completion: Completion, timeout_s: float | None) -> None:
        def on_event(event: TokenEvent) -> None:
            try:
                ends_here = completion.take(event)
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends this request and no other
                completion.take(TokenEvent(token_id=None, finish_reason=FinishReason.ERROR, error=unexpected(error)))
                ends_here = True
            if ends_here:
                self.engine.abort(completion.number)

        # The engine cannot answer before the number is known: it takes requests over under the lock held here.
        with self.engine.paused():
            completion.number = self.engine.submit(
                completion.prompt_token_ids,
                completion.params,
                on_event,
                timeout_s=min((limit for limit in (timeout_s, self._config.request_timeout) if limit), default=None),
            )

    def _completion(self, prompt: Prompt, wishes: Wishes) -> Completion:
        token_ids = self._encode(prompt)
        limit = self._config.max_length
        if limit is not None and len(token_ids) > limit:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens, but this model takes at most {limit} (handler.max_length)"
            )
        params = self._params(wishes, len(token_ids))
        self.engine.check(token_ids, params)
        return Completion(token_ids, params, self.tokenizer)

    def _choices(self, first: Completion, num_choices: int) -> list[Completion]:
        others = (replace(first.params, seed=(first.params.seed + number) % 2**63) for number in range(1, num_choices))
        return [first, *(Completion(first.prompt_token_ids, params, self.tokenizer) for params in others)]

    def _encode(self, prompt: Prompt) -> list[int]:
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        if self.tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer; send token ids")
        limit = min(self.engine.max_len, self._config.max_length or self.engine.max_len)
        if prompt.messages is not None:
            return self.tokenizer.encode_chat(prompt.messages, prompt.tools, limit)
        if not prompt.text:
            raise InvalidRequestError("the prompt is empty, at least one character is needed")
        return self.tokenizer.encode(prompt.text, limit)

    def _params(self, wishes: Wishes, num_prompt: int) -> SamplingParams:
        if wishes.stop and self.tokenizer is None:
            raise InvalidRequestError("stop: this model has no tokenizer, so stop strings cannot be found")
        seed = wishes.seed if wishes.seed is not None else self._config.manual_seed
        defaults = self._defaults
        temperature = wishes.temperature
        if temperature is None:
            temperature = _first(defaults.temperature, 1.0) if wishes.samples_by_default else 0.0
        params = SamplingParams(
            max_new_tokens=wishes.max_new_tokens or self._config.max_new_tokens,
            temperature=temperature,
            top_k=_first(wishes.top_k, defaults.num_likeliest, 0),
            top_p=_first(wishes.top_p, defaults.top_p, 1.0),
            min_p=_first(wishes.min_p, defaults.min_p, 0.0),
            repetition_penalty=_first(wishes.repetition_penalty, defaults.repetition_penalty, 1.0),
            presence_penalty=wishes.presence_penalty or 0.0,
            frequency_penalty=wishes.frequency_penalty or 0.0,
            logit_bias=wishes.logit_bias,
            seed=secrets.randbits(62) if seed is None else seed,
            stop=wishes.stop,
            stop_token_ids=wishes.stop_token_ids,
            ignore_eos=wishes.ignore_eos,
            min_tokens=wishes.min_tokens or 0,
            logprobs=wishes.logprobs,
        )
        if wishes.max_new_tokens is None:  # the default must not turn a long prompt into an error
            room = self.engine.max_len - num_prompt
            params = replace(params, max_new_tokens=max(1, min(params.max_new_tokens, room)))
        return params


_Value = TypeVar("_Value", int, float)


def _first(*values: _Value | None) -> _Value:
    """Return the first value that is there."""
    return next(value for value in values if value is not None)
