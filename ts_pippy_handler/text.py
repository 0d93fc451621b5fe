"""Text in and out: encoding, chat templates, decoding token by token, stop strings.

Knows one request's text at a time; knows nothing of engines or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ts_pippy_handler.errors import CheckpointError, InvalidRequestError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)


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
            raise CheckpointError(f"{model_path}: the tokenizer cannot be read: {error}") from error
        return cls(loaded)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the special tokens the model expects."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a conversation, ending where the assistant speaks next.

        Raises:
            InvalidRequestError: If the checkpoint has no chat template, or it refuses the messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidRequestError(
                "messages: this model's tokenizer has no chat template (chat_template.jinja); send a 'prompt' instead"
            )
        try:
            encoded = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, return_dict=True
            )
        except Exception as error:
            raise InvalidRequestError(f"messages: the chat template refused them: {error}") from error
        ids: list[int] = encoded["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of new tokens, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


class StopChecker:
    """Finds the first stop string in a text that arrives token by token."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._token_ids: list[int] = []

    def add(self, token_id: int) -> bool:
        """Take the next token; return whether a stop string is complete now."""
        if not self._stop or self._tokenizer is None:
            return False
        self._token_ids.append(token_id)
        return self.cut(self._tokenizer.decode(self._token_ids)) is not None

    def cut(self, text: str) -> str | None:
        """Return ``text`` up to its first stop string, or None when it has none."""
        found = [text.index(stop) for stop in self._stop if stop in text]
        return text[: min(found)] if found else None
