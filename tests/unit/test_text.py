"""Encoding, chat templates, decoding, and stop strings that arrive in pieces."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.models import BOS_ID, EOS_ID, byte_tokenizer
from ts_pippy_handler.errors import CheckpointError, InvalidRequestError
from ts_pippy_handler.text import TextStream, Tokenizer

EMOJI = "a🎉é世b"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


def test_bytes_there_and_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(EMOJI)
    assert ids == list(EMOJI.encode())
    assert tokenizer.decode(ids) == EMOJI


def test_a_tokenizer_with_a_start_token() -> None:
    assert Tokenizer(byte_tokenizer(bos=True)).encode("hi") == [BOS_ID, *b"hi"]


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*b"hi", EOS_ID]) == "hi"


def test_half_an_emoji_decodes_to_a_replacement(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(list("🎉".encode())[:2]) == "\ufffd"


def test_half_a_surrogate_pair_is_no_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"^the prompt is no text: what stands at offset 1 has"):
        tokenizer.encode("a\ud800")


@pytest.mark.parametrize(
    ("messages", "tools"),
    [([{"role": "user", "content": "a\ud800"}], None), ([{"role": "user", "content": "a"}], [{"name": "\udfff"}])],
)
def test_half_a_surrogate_pair_in_a_conversation(tokenizer: Tokenizer, messages: Any, tools: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^messages: '.*' in them is no text: it has no place in UTF-8$"):
        tokenizer.encode_chat(messages, tools)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("<0xE2>", b"\xe2"), ("Ã", b"\xc3"), ("Ġa", b" a"), ("▁a", None), ("", None), (None, None)],
)
def test_the_bytes_of_a_token(name: str | None, expected: bytes | None) -> None:
    class Names:
        def convert_ids_to_tokens(self, token_id: int) -> str | None:
            return name

    assert Tokenizer(Names()).token_bytes(7) == expected


def test_a_conversation_ends_where_the_assistant_speaks(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    said = byte_tokenizer().decode(ids)
    assert said == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


class Counting:
    """A tokenizer that takes ``chars`` characters for a token, and remembers how much text it was given."""

    chat_template = "x"

    def __init__(self, chars: int) -> None:
        self.chars = chars
        self.seen: list[int] = []

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        self.seen.append(len(text))
        return {"input_ids": [0] * (len(text) // self.chars)}


def test_a_text_that_is_far_too_long_is_not_encoded() -> None:
    core = Counting(4)
    message = "^the prompt has 6000000 characters, of which the first 1600 alone are more than twice the 100 tokens"
    with pytest.raises(InvalidRequestError, match=message):
        Tokenizer(core).encode("a" * 6_000_000, 100)
    assert core.seen == [1600]


def test_a_conversation_that_is_far_too_long() -> None:
    messages = [{"role": "user", "content": "a" * 2000}] * 9
    core = byte_tokenizer()
    with pytest.raises(InvalidRequestError, match=r"^messages: what they say has 18\d+ characters, of which the first"):
        Tokenizer(core).encode_chat(messages, limit=100)
    core.chat_template = "{{ messages[0].role }}"  # leaves out what is long
    assert Tokenizer(core).encode_chat(messages, limit=100) == list(b"user")


@pytest.mark.parametrize(("chars", "seen"), [(20, [1600, 6400]), (1000, [1600, 6400, 25_600, 102_400, 200_000])])
def test_a_tokenizer_of_long_tokens_is_given_more(chars: int, seen: list[int]) -> None:
    core = Counting(chars)
    with contextlib.suppress(InvalidRequestError):
        assert len(Tokenizer(core).encode("a" * 200_000, 100)) == 200
    assert core.seen == seen


def test_a_text_that_may_fit_is_encoded_once() -> None:
    core = Counting(4)
    assert len(Tokenizer(core).encode("a" * 1600, 100)) == 400
    assert core.seen == [1600]


def test_no_chat_template() -> None:
    message = (
        r"^messages: this model's tokenizer has no chat template \(chat_template.jinja\); send a 'prompt' instead$"
    )
    with pytest.raises(InvalidRequestError, match=message):
        Tokenizer(byte_tokenizer(chat_template=False)).encode_chat([{"role": "user", "content": "x"}])


def test_a_chat_template_that_refuses() -> None:
    core = byte_tokenizer()
    core.chat_template = "{{ raise_exception('only users may speak') }}"
    with pytest.raises(InvalidRequestError, match=r"^messages: the chat template refused them: only users may speak$"):
        Tokenizer(core).encode_chat([{"role": "system", "content": "x"}])


def test_loading_from_a_checkpoint(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = Tokenizer.load(str(tmp_path))
    assert loaded is not None
    assert loaded.encode(EMOJI) == list(EMOJI.encode())


def test_a_checkpoint_without_a_tokenizer(model_dir: Path) -> None:
    assert Tokenizer.load(str(model_dir)) is None


def test_a_damaged_tokenizer_is_named(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").write_text("{ not json")
    (model_dir / "config.json").unlink()
    with pytest.raises(CheckpointError, match=f"^{model_dir}: the tokenizer cannot be read: "):
        Tokenizer.load(str(model_dir))


def test_a_tokenizer_of_which_half_is_missing_is_told_in_one_line(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: the tokenizer cannot be read: [^\n]+$"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{# fine so far #}\n{% for message in messages %}", "line 2: .*end of template"),
        ("{{ messages | nofilter }}", "line 1: No filter named 'nofilter'"),
    ],
)
def test_a_chat_template_that_is_not_well_formed(tmp_path: Path, template: str, reason: str, in_file: bool) -> None:
    core = byte_tokenizer()
    core.chat_template = template
    core.save_pretrained(tmp_path, save_jinja_files=in_file)
    place = "chat_template.jinja" if in_file else "tokenizer_config.json: chat_template"
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/{place}: {reason}[^\n]*$"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("template", ["{{ raise_exception('never') }}", "{{ messages[7].content.nothing }}"])
def test_a_chat_template_that_refuses_what_is_trivial_loads(tmp_path: Path, template: str) -> None:
    core = byte_tokenizer()
    core.chat_template = template
    core.save_pretrained(tmp_path)
    assert Tokenizer.load(str(tmp_path)) is not None


def feed(stream: TextStream, text: str) -> int | None:
    """Return after how many tokens a stop string is complete."""
    for count, byte in enumerate(text.encode(), 1):
        stream.add(byte)
        if stream.is_stopped:
            return count
    return None


@pytest.mark.parametrize(
    ("stop", "text", "at", "left"),
    [
        (("end",), "the end is", 7, "the "),
        (("END", " is"), "the end is", 10, "the end"),
        (("b", "ab"), "xxab", 4, "xx"),
        (("🎉",), "a🎉b", 5, "a"),
        (("é世",), EMOJI, 10, "a🎉"),
        (("nowhere",), "the end", None, "the end"),
        ((), "the end", None, "the end"),
    ],
)
def test_stop_strings(tokenizer: Tokenizer, stop: tuple[str, ...], text: str, at: int | None, left: str) -> None:
    stream = TextStream(tokenizer, stop)
    assert feed(stream, text) == at
    assert stream.whole() == left


def test_the_replacement_of_half_an_emoji_is_no_stop(tokenizer: Tokenizer) -> None:
    assert feed(TextStream(tokenizer, ("!",)), "🎉🎉!") == 9


def test_no_piece_ends_in_half_a_character(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    pieces = []
    for byte in "é漢👩‍👩‍👧x".encode():
        stream.add(byte)
        pieces.append(stream.take())
    assert "".join(pieces) == "é漢👩‍👩‍👧x"
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.finish() == ""


def test_an_unfinished_character_comes_out_once_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    for byte in b"ab" + "🎉".encode()[:2]:
        stream.add(byte)
    assert stream.take() == "ab"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_what_may_begin_a_stop_string_waits(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ("END", "NOW"))
    pieces = []
    for byte in b"aENxEENDz":
        stream.add(byte)
        pieces.append(stream.take())
    assert pieces == ["a", "", "", "ENx", "", "E", "", "", ""]
    assert stream.is_stopped
    assert stream.finish() == ""
    assert stream.whole() == "aENxE"


def test_what_might_have_begun_a_stop_string_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ("END",))
    for byte in b"EN":
        stream.add(byte)
    assert stream.take() == ""
    assert stream.finish() == "EN"


def test_special_tokens_in_between(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    for token in [*b"a", EOS_ID, EOS_ID, *b"b", EOS_ID, *"é".encode()]:
        stream.add(token)
    assert stream.take() == "abé"
