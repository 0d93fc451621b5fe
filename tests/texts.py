"""Prompts as text, of known and unequal lengths in tokens."""

from __future__ import annotations

import random
from pathlib import Path

from transformers import AutoTokenizer

_WORDS = (
    "the sea was calm and a small boat left harbour before anyone had counted its sails while far away somebody "
    "wrote down numbers that meant nothing to most people but everything to those who waited for rain in summer"
).split()


def byte_texts(num: int, min_len: int, max_len: int, seed: int) -> list[str]:
    """Return texts of unequal lengths in UTF-8 bytes, which are the tokens of the tiny models' tokenizer.

    The shortest and the longest allowed are among them.
    """
    generator = random.Random(seed)
    lengths = [min_len, max_len, *(generator.randint(min_len, max_len) for _ in range(num - 2))][:num]
    generator.shuffle(lengths)
    return [_byte_text(generator, length) for length in lengths]


def byte_tokens(text: str) -> list[int]:
    """Return the tokens of a text for the tiny models' tokenizer, from first principles."""
    return list(text.encode())


def word_texts(model_dir: Path, num: int, max_len: int, seed: int) -> tuple[list[str], list[list[int]]]:
    """Return English texts of 1 to about ``max_len`` tokens of a real tokenizer, and their tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    generator = random.Random(seed)
    texts = ["The", *(_words(generator, generator.randint(1, max_len - 40)) for _ in range(num - 2))]
    longest = _words(generator, max_len)
    while len(tokenizer(longest).input_ids) > max_len:
        longest = longest.rpartition(" ")[0]
    texts.append(longest)
    generator.shuffle(texts)
    return texts, [list(tokenizer(text).input_ids) for text in texts]


def _byte_text(generator: random.Random, num_bytes: int) -> str:
    text = ""
    while num_bytes:
        # Neither end is white space, which a server might strip.
        options = "xyz" if not text or num_bytes == 1 else "abc DE,.\n5é漢😀"
        character = generator.choice([c for c in options if len(c.encode()) <= num_bytes])
        text += character
        num_bytes -= len(character.encode())
    return text


def _words(generator: random.Random, num: int) -> str:
    return " ".join(generator.choices(_WORDS, k=num)).capitalize()
