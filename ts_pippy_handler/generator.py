"""Prompts in, finished answers out: the tokenizer and the engine put together.

The handlers and the command line use this; it knows no HTTP and no TorchServe.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ts_pippy_handler.config import HandlerConfig
from ts_pippy_handler.engine import Engine
from ts_pippy_handler.errors import InvalidRequestError, PippyError
from ts_pippy_handler.request import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from ts_pippy_handler.text import StopChecker, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What to continue: exactly one of text, token ids, or a conversation."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, str]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """How to continue, as the client said it; None where it did not."""

    max_new_tokens: int | None = None
    temperature: float | None = None
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
    min_tokens: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A finished continuation."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    """New tokens, an end-of-sequence token included."""
    text: str | None
    """Their text without special tokens, cut before a stop string; None without a tokenizer."""
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    """One for each of ``token_ids``, when asked for."""


class Completion:
    """One prompt being continued. Filled on the engine's thread, read when ``done`` is set."""

    def __init__(self, prompt_token_ids: list[int], params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.done = threading.Event()
        self.number = -1
        """The engine's number of the request, once it has started."""
        self._tokenizer = tokenizer
        self._stops = StopChecker(tokenizer, params.stop)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish_reason: FinishReason | None = None
        self._error: Exception | None = None
        self._on_done: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when the completion has finished, on whatever thread that is."""
        with self._lock:
            if not self.done.is_set():
                self._on_done.append(callback)
                return
        callback()

    def take(self, event: TokenEvent) -> bool:
        """Take the next event; return whether a stop string ends the completion here."""
        if self.done.is_set():
            return False
        if event.token_id is not None:
            self._token_ids.append(event.token_id)
        if event.logprobs is not None:
            self._logprobs.append(event.logprobs)
        is_stopped = event.token_id is not None and self._stops.add(event.token_id)
        if is_stopped:
            self._finish(FinishReason.STOP, None)
        elif event.finish_reason is not None:
            self._finish(event.finish_reason, event.error)
        return is_stopped and event.finish_reason is None

    def answer(self) -> Answer:
        """Return the finished answer.

        Raises:
            PippyError: If the pipeline failed.
        """
        assert self._finish_reason is not None, "answer() was called before the completion is done"
        if self._error is not None:
            raise self._error
        text = None if self._tokenizer is None else self._tokenizer.decode(self._token_ids)
        if text is not None and (cut := self._stops.cut(text)) is not None:
            text = cut
        return Answer(
            prompt_token_ids=self.prompt_token_ids,
            token_ids=self._token_ids,
            text=text,
            finish_reason=self._finish_reason,
            logprobs=None if self.params.logprobs is None else self._logprobs,
        )

    def _finish(self, reason: FinishReason, error: Exception | None) -> None:
        with self._lock:
            self._finish_reason, self._error = reason, error
            self.done.set()
            callbacks, self._on_done = self._on_done, []
        for callback in callbacks:
            callback()


class Generator:
    """Continues prompts of one model."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, config: HandlerConfig) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._config = config

    def submit(self, prompt: Prompt, wishes: Wishes) -> Completion:
        """Start continuing a prompt; as :meth:`submit_all` for one."""
        return self.submit_all([prompt], wishes)[0]

    def submit_all(self, prompts: Sequence[Prompt], wishes: Wishes) -> list[Completion]:
        """Start continuing several prompts, all or none of them.

        Raises:
            InvalidRequestError: If one cannot be honoured; none is left running then.
            OverloadedError: If too many requests wait.
            PipelineError: If the pipeline is broken.
        """
        completions = [self._completion(prompt, wishes) for prompt in prompts]
        try:
            for completion in completions:
                self._start(completion)
        except PippyError:
            self.cancel(completions)
            raise
        return completions

    def cancel(self, completions: Sequence[Completion]) -> None:
        """End completions early; those that have finished stay as they are."""
        for completion in completions:
            if completion.number >= 0:
                self.engine.abort(completion.number)

    def _start(self, completion: Completion) -> None:
        def on_event(event: TokenEvent) -> None:
            if completion.take(event):
                self.engine.abort(completion.number)

        # The engine cannot answer before the number is known: it takes requests over under the lock held here.
        with self.engine.paused():
            completion.number = self.engine.submit(completion.prompt_token_ids, completion.params, on_event)

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

    def _encode(self, prompt: Prompt) -> list[int]:
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        if self.tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer; send token ids ('input_ids')")
        if prompt.messages is not None:
            return self.tokenizer.encode_chat(prompt.messages)
        if not prompt.text:
            raise InvalidRequestError("the prompt is empty, at least one character is needed")
        return self.tokenizer.encode(prompt.text)

    def _params(self, wishes: Wishes, num_prompt: int) -> SamplingParams:
        if wishes.stop and self.tokenizer is None:
            raise InvalidRequestError("stop: this model has no tokenizer, so stop strings cannot be found")
        seed = wishes.seed if wishes.seed is not None else self._config.manual_seed
        params = SamplingParams(
            max_new_tokens=wishes.max_new_tokens or self._config.max_new_tokens,
            temperature=wishes.temperature or 0.0,
            top_k=wishes.top_k or 0,
            top_p=1.0 if wishes.top_p is None else wishes.top_p,
            min_p=wishes.min_p or 0.0,
            repetition_penalty=1.0 if wishes.repetition_penalty is None else wishes.repetition_penalty,
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
