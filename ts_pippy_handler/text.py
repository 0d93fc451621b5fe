"""Text in and out: encoding, chat templates, decoding token by token, stop strings.

Knows one request's text at a time; knows nothing of engines or HTTP.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ts_pippy_handler.errors import CheckpointError, InvalidRequestError, one_line
from ts_pippy_handler.model_config import read_config

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)


HALF_CHARACTER = "\ufffd"
"""What the bytes of an unfinished character decode to."""


_CHARS_PER_TOKEN = 16
"""Four times what is usual: the beginning of a text that is encoded first, in characters for each token that fits."""


_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A checkpoint's tokenizer, with errors a client can act on."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, model_path: str, *, trust_remote_code: bool = False) -> Tokenizer | None:
        """Load the tokenizer of a checkpoint directory; None when it ships none.

        Raises:
            CheckpointError: If tokenizer files are there but unreadable.
        """
        from transformers import AutoTokenizer  # transformers takes a second to import

        if not any((Path(model_path) / name).is_file() for name in _TOKENIZER_FILES):
            return None
        try:
            loaded = AutoTokenizer.from_pretrained(
                model_path, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:
            # It reads the model's configuration too, and a mistake there is none of the tokenizer's.
            if (Path(model_path) / "config.json").is_file():
                read_config(model_path, trust_remote_code=trust_remote_code)
            raise CheckpointError(f"{model_path}: the tokenizer cannot be read: {one_line(error)}") from error
        _check_chat_templates(loaded, Path(model_path))
        return cls(loaded)

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Return the token ids of a prompt, with the special tokens the model expects.

        Args:
            text: The prompt.
            limit: Tokens a prompt may have; a text that is far too long is refused before it is encoded as a whole.

        Raises:
            InvalidRequestError: If the text cannot be written as UTF-8, or is far too long.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the prompt is no text: what stands at offset {error.start} has no place in UTF-8"
            ) from None
        self._check_length(text, limit, "the prompt")
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def _check_length(self, text: str, limit: int | None, what: str) -> None:
        """Refuse a text of which a small part has more tokens than fit: the rest need not be encoded to know.

        How many characters a token may stand for is not in the vocabulary: normalisers drop some, and unknown or blank
        ones in any number may become a single token. So a beginning is encoded, then a longer one. Twice the limit
        leaves room for what follows a beginning to change how its last characters are encoded.

        Raises:
            InvalidRequestError: With the characters seen and the limit.
        """
        size = _CHARS_PER_TOKEN * (limit or len(text))
        while size < len(text):
            if len(self._tokenizer(text[:size], add_special_tokens=False)["input_ids"]) > 2 * (limit or 0):
                raise InvalidRequestError(
                    f"{what} has {len(text)} characters, of which the first {size} alone are more than twice the "
                    f"{limit} tokens that fit; shorten it"
                )
            size *= 4

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, ending where the assistant speaks next.

        Args:
            messages: Turns as the chat template expects them, with ``role`` and ``content`` at least.
            tools: Descriptions of functions the model may call, for the template.
            limit: As for :meth:`encode`.

        Raises:
            InvalidRequestError: If the checkpoint has no chat template, it refuses the messages, or they are far too
                long.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidRequestError(
                "messages: this model's tokenizer has no chat template (chat_template.jinja); send a 'prompt' instead"
            )
        written = json.dumps([messages, tools], ensure_ascii=False, default=str)
        if surrogate := _SURROGATE.search(written):
            raise InvalidRequestError(f"messages: {surrogate[0]!r} in them is no text: it has no place in UTF-8")
        if len(written) > _CHARS_PER_TOKEN * (limit or len(written)):  # as rendered: a template may leave much out
            self._check_length(self._apply_template(messages, tools, tokenize=False), limit, "messages: what they say")
        encoded = self._apply_template(messages, tools, return_dict=True)
        ids: list[int] = encoded["input_ids"]
        return ids

    def _apply_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, **options: bool
    ) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=True,
                **options,
            )
        except Exception as error:
            raise InvalidRequestError(f"messages: the chat template refused them: {one_line(error)}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of new tokens, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, special ones included; bytes of half a character show as U+FFFD."""
        text: str = self._tokenizer.decode([token_id])
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token that holds part of a character; None if the tokenizer does not tell."""
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if found := re.fullmatch(r"<0x([0-9A-F]{2})>", name or ""):
            return bytes.fromhex(found[1])
        values = _byte_values()
        return bytes(values[each] for each in name) if name and all(each in values for each in name) else None


def _check_chat_templates(tokenizer: Any, directory: Path) -> None:
    """Compile the chat templates; what one says of a conversation is between it and the client.

    Raises:
        CheckpointError: If one is not well-formed, naming the line.
    """
    from jinja2 import TemplateSyntaxError  # comes with torch; only chat templates need it

    templates = getattr(tokenizer, "chat_template", None) or {}
    for name, template in ({"": templates} if isinstance(templates, str) else dict(templates)).items():
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], chat_template=template, tokenize=False)
        except TemplateSyntaxError as error:
            is_file = (directory / "chat_template.jinja").is_file()
            place = "chat_template.jinja" if is_file else "tokenizer_config.json: chat_template"
            raise CheckpointError(
                f"{directory}/{place}: {f'{name}, ' if name else ''}line {error.lineno}: {one_line(error)}"
            ) from error
        except Exception as error:  # noqa: BLE001 - many templates refuse some conversations, and may refuse this one
            logger.info("the chat template refuses a trivial conversation: %s", one_line(error))


@functools.cache
def _byte_values() -> dict[str, int]:
    """Return the byte that each character stands for in the tokens of byte-level tokenizers."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # takes a second to import

    return {character: byte for byte, character in bytes_to_unicode().items()}


class TextStream:
    """The text of one answer, growing token by token: never half a character, never past a stop string.

    The newest tokens are decoded together with a few before them, since what a token reads as can depend on its
    neighbours. Written here because ``tokenizers``' own ``DecodeStream`` knows fast tokenizers only, and has no way to
    give out an unfinished character at the end.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._longest_stop = max((len(each) for each in stop), default=0)
        self._token_ids: list[int] = []
        self._context = 0  # tokens before this one no longer influence the next ones
        self._decoded = 0  # tokens before this one are in ``_text``
        self._text = ""
        self._num_taken = 0
        self.is_stopped = False
        """Whether a stop string is complete; later tokens are not looked at."""

    def add(self, token_id: int) -> None:
        """Append the next token."""
        if self.is_stopped:
            return
        self._token_ids.append(token_id)
        piece = self._undecoded()
        if piece.endswith(HALF_CHARACTER):
            return
        if piece:
            self._append(piece)
            self._context = self._decoded
        self._decoded = len(self._token_ids)

    def take(self) -> str:
        """Return the text that is certain by now and was not returned before; what may begin a stop string waits."""
        end = len(self._text)
        if not self.is_stopped:
            end -= self._num_held()
        start, self._num_taken = self._num_taken, max(end, self._num_taken)
        return self._text[start:end]

    def finish(self) -> str:
        """Return the rest of the text; an unfinished character shows as U+FFFD."""
        if not self.is_stopped:
            self._append(self._undecoded())
            self._context = self._decoded = len(self._token_ids)
        start, self._num_taken = self._num_taken, len(self._text)
        return self._text[start:]

    def whole(self) -> str:
        """Return the text so far from its beginning, an unfinished character included."""
        self.finish()
        return self._text

    def _undecoded(self) -> str:
        """Return what the tokens that are not in the text yet read as, behind those before them."""
        before = self._tokenizer.decode(self._token_ids[self._context : self._decoded])
        return self._tokenizer.decode(self._token_ids[self._context :])[len(before) :]

    def _append(self, piece: str) -> None:
        searched = max(0, len(self._text) - self._longest_stop + 1)
        self._text += piece
        found = [at for stop in self._stop if (at := self._text.find(stop, searched)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.is_stopped = True

    def _num_held(self) -> int:
        """Return how many characters at the end of the text may be the beginning of a stop string."""
        longest = min(self._longest_stop - 1, len(self._text))
        for num in range(longest, 0, -1):
            if any(stop.startswith(self._text[-num:]) for stop in self._stop):
                return num
        return 0
