"""``ts-pippy generate``: the whole engine with real ranks, as a user starts it, against plain ``transformers``."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.command import generate, ts_pippy
from tests.models import WINDOW, Checkpoints, byte_tokenizer, copy_checkpoint
from tests.oracle import MIN_MARGIN, Reference, hf_generate, random_prompts, smallest_margin
from tests.processes import Footprint, wait_until
from tests.texts import word_texts
from tests.torchserve import BIN

NEW_TOKENS = 48
PROMPTS = random_prompts(32, 1, 400, 256, seed=1)
FEW = random_prompts(4, 3, 30, 256, seed=3)
IN_DEFAULT_RUN = {
    ("llama", 1),
    ("llama", 4),
    ("gpt2", 2),
    ("opt", 3),
    ("mistral", 2),
    ("qwen3", 3),
    ("gemma2", 4),
}


def matrix() -> list[Any]:
    """Every family at every number of stages; beyond the first choice they are slow."""
    cases = [(family, n) for family in ("llama", "gpt2", "opt", "mistral", "qwen3", "gemma2") for n in (1, 2, 3, 4)]
    return [pytest.param(*case, marks=[] if case in IN_DEFAULT_RUN else [pytest.mark.slow]) for case in cases]


def check(answers: Any, prompts: list[list[int]], references: list[Reference]) -> None:
    assert [answer["prompt_token_ids"] for answer in answers] == prompts
    assert smallest_margin(references) > MIN_MARGIN
    for answer, reference in zip(answers, references, strict=True):
        assert answer["token_ids"] == reference.token_ids
        assert answer["finish_reason"] == reference.finish_reason


@pytest.mark.parametrize(("family", "stages"), matrix())
def test_tokens_equal_transformers(checkpoints: Checkpoints, family: str, stages: int) -> None:
    model = checkpoints(family)
    answers = generate(model, stages, PROMPTS, "--max-new-tokens", NEW_TOKENS)
    check(answers, PROMPTS, hf_generate(model, PROMPTS, NEW_TOKENS))
    tokenizer = byte_tokenizer()
    for answer in answers:
        assert answer["text"] == tokenizer.decode(answer["token_ids"], skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_smollm2_tokens_equal_transformers(smollm2: Path, smollm2_expected: Any, stages: int) -> None:
    _, prompts, references = smollm2_expected
    answers = generate(smollm2, stages, prompts, "--max-new-tokens", NEW_TOKENS, "--ignore-eos")
    check(answers, prompts, references)


def test_the_real_model_continues_as_in_transformers(smollm2: Path) -> None:
    _, prompts = word_texts(smollm2, num=8, max_len=60, seed=9)
    answers = generate(smollm2, 2, prompts, "--max-new-tokens", 12, "--ignore-eos")
    check(answers, prompts, hf_generate(smollm2, prompts, 12, ignore_eos=True))


def test_references_end_both_ways(checkpoints: Checkpoints) -> None:
    references = hf_generate(checkpoints("llama"), PROMPTS, NEW_TOKENS)
    assert {reference.finish_reason for reference in references} == {"stop", "length"}


@pytest.mark.parametrize(
    "options",
    [{"head": "tied"}, {"head": "tied-present", "file_format": "bin"}, {"shard_bytes": None, "layers": 2}],
    ids=str,
)
def test_checkpoint_variants(checkpoints: Checkpoints, options: dict[str, Any]) -> None:
    model = checkpoints("llama", **options)
    answers = generate(model, 2, FEW, "--max-new-tokens", 12, "--ignore-eos")
    check(answers, FEW, hf_generate(model, FEW, 12, ignore_eos=True))


def test_text_in_text_out(checkpoints: Checkpoints) -> None:
    model = checkpoints("llama")
    texts = ["Hello, 漢字", "x"]
    flags = [part for text in texts for part in ("--prompt", text)]
    done = ts_pippy("generate", model, "--stages", 2, "--max-new-tokens", 9, "--dtype", "float32", "--json", *flags)
    prompts = [list(text.encode()) for text in texts]
    check(done.json(), prompts, hf_generate(model, prompts, 9))


def test_plain_output_is_the_text(checkpoints: Checkpoints) -> None:
    model = checkpoints("llama")
    done = ts_pippy("generate", model, "--stages", 1, "--max-new-tokens", 9, "--dtype", "float32", "--prompt", "Hello")
    [reference] = hf_generate(model, [list(b"Hello")], 9)
    assert done.status == 0, done.stderr
    assert byte_tokenizer().decode(reference.token_ids, skip_special_tokens=True) in done.stdout


def test_without_a_tokenizer_token_ids_work_and_text_is_null(checkpoints: Checkpoints) -> None:
    model = checkpoints("llama", tokenizer=False)
    answers = generate(model, 1, FEW, "--max-new-tokens", 6)
    check(answers, FEW, hf_generate(model, FEW, 6))
    assert {answer["text"] for answer in answers} == {None}
    done = ts_pippy("generate", model, "--stages", 1, "--max-new-tokens", 6, "--json", "--prompt", "Hello")
    assert "tokenizer" in done.error()


def test_stop_string_ends_the_text_before_it(checkpoints: Checkpoints) -> None:
    model = checkpoints("llama")
    [reference] = hf_generate(model, FEW[:1], NEW_TOKENS, ignore_eos=True)
    text = byte_tokenizer().decode(reference.token_ids, skip_special_tokens=True)
    stop = next(character for character in text[5:] if character.isascii() and character not in text[:5])
    options = ("--max-new-tokens", NEW_TOKENS, "--ignore-eos", "--stop", stop, "--stop", "not in it")
    [answer] = generate(model, 2, FEW[:1], *options)
    assert answer["text"] == text.partition(stop)[0]
    assert answer["finish_reason"] == "stop"
    assert answer["token_ids"] == reference.token_ids[: len(answer["token_ids"])]
    assert len(answer["token_ids"]) < NEW_TOKENS


def test_a_seed_decides_the_tokens_whatever_the_stages_and_the_batch(checkpoints: Checkpoints) -> None:
    model = checkpoints("llama")
    options = ("--max-new-tokens", 16, "--temperature", 2.5, "--seed", 7, "--ignore-eos")
    one = generate(model, 1, FEW, *options)
    two = generate(model, 2, FEW[::-1], *options)
    assert one == two[::-1]
    greedy = hf_generate(model, FEW, 16, ignore_eos=True)
    assert all(answer["token_ids"] != reference.token_ids for answer, reference in zip(one, greedy, strict=True))


def test_generation_up_to_the_end_of_the_window(checkpoints: Checkpoints) -> None:
    model = checkpoints("gpt2")
    prompts = random_prompts(2, WINDOW - 5, WINDOW - 3, 256, seed=5)
    answers = generate(model, 2, prompts, "--max-new-tokens", 3, "--ignore-eos")
    check(answers, prompts, hf_generate(model, prompts, 3, ignore_eos=True))


IDS = ("--input-ids", "[1, 2, 3]")
MISTAKES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "no stages": ((*IDS, "--stages", "0"), ["stages", "0"]),
    "more stages than layers": ((*IDS, "--stages", "6"), ["6", "5"]),
    "misspelt dtype": ((*IDS, "--dtype", "flaot32"), ["flaot32", "float32"]),
    "no new tokens": ((*IDS, "--max-new-tokens", "0"), ["max", "0"]),
    "more tokens than the window": ((*IDS, "--max-new-tokens", str(WINDOW - 2)), [str(WINDOW - 2), str(WINDOW)]),
    "broken JSON": (("--input-ids", "[1, 2"), ["input-ids", "[1, 2"]),
    "no token ids": (("--input-ids", "[]"), ["input-ids"]),
    "token id outside the vocabulary": (("--input-ids", "[1, 263]"), ["263", "262"]),
    "no prompt": ((), ["prompt"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_readable_line(checkpoints: Checkpoints, mistake: str) -> None:
    arguments, named = MISTAKES[mistake]
    stages = () if "--stages" in arguments else ("--stages", "1")
    error = ts_pippy("generate", checkpoints("llama"), "--json", *stages, *arguments, timeout_s=60).error()
    assert all(word in error for word in named), error


def test_a_missing_model_is_one_readable_line_and_debug_shows_more(tmp_path: Path) -> None:
    arguments = ("generate", tmp_path / "nowhere", "--stages", 2, *IDS)
    assert "nowhere" in ts_pippy(*arguments, timeout_s=60).error()
    done = ts_pippy(*arguments, "--debug", timeout_s=60)
    assert done.status != 0
    assert "Traceback" in done.stderr


DAMAGED = "model.layers.3.mlp.down_proj.weight"
"""A tensor that the last stage needs."""
DAMAGES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "missing": (lambda _: None, "is missing, although model.safetensors.index.json lists it"),
    "of another shape": (lambda tensor: tensor[:-1].clone(), "has shape"),
    "of numbers that are no weights": (lambda tensor: tensor.to(torch.int8), "is of dtype"),
}


def damage(model: Path, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Path:
    """Change a tensor of a checkpoint, or leave it out, and return its file."""
    file = next(file for file in model.glob("*.safetensors") if DAMAGED in load_file(file))
    tensors = load_file(file)
    changed = change(tensors.pop(DAMAGED))
    save_file(tensors | ({} if changed is None else {DAMAGED: changed}), file, metadata={"format": "pt"})
    return file


def without_traces(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a command that finds no trace which an earlier test has kept."""
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_tensor_is_one_readable_line_before_there_are_ranks(
    checkpoints: Checkpoints, tmp_path: Path, kind: str
) -> None:
    model = copy_checkpoint(checkpoints("llama"), tmp_path / "damaged")
    change, reason = DAMAGES[kind]
    file = damage(model, change)
    error = ts_pippy("generate", model, "--stages", 2, *IDS, timeout_s=60, environment=without_traces(tmp_path)).error()
    assert error.startswith(f"ts-pippy: error: {file}: tensor {DAMAGED!r} {reason}"), "not 'rank 1: …'"


def test_a_damaged_file_is_one_readable_line_before_there_are_ranks(checkpoints: Checkpoints, tmp_path: Path) -> None:
    model = copy_checkpoint(checkpoints("llama"), tmp_path / "damaged")
    shard = sorted(model.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-100])
    error = ts_pippy("generate", model, "--stages", 2, *IDS, timeout_s=60, environment=without_traces(tmp_path)).error()
    assert error.startswith(f"ts-pippy: error: {shard}: unreadable or truncated: ")


def test_with_a_kept_trace_the_rank_that_needs_a_damaged_tensor_names_it(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    model = copy_checkpoint(checkpoints("llama"), tmp_path / "damaged")
    generate(model, 2, [[1, 2, 3]], "--max-new-tokens", 1)
    file = damage(model, DAMAGES["of another shape"][0])
    error = ts_pippy("generate", model, "--stages", 2, "--dtype", "float32", *IDS, timeout_s=60).error()
    assert f"rank 1: {file}: tensor {DAMAGED!r} has shape" in error


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)])
def test_no_rank_outlives_a_killed_command(checkpoints: Checkpoints, number: int, status: int) -> None:
    footprint = Footprint()
    # More work than is ever finished: the longest answers for many prompts.
    prompts = [part for _ in range(64) for part in ("--input-ids", "[1, 2, 3, 4]")]
    command: list[str | Path] = [BIN / "ts-pippy", "generate", checkpoints("llama"), "--stages", "3", "--ignore-eos"]
    command += ["--max-new-tokens", str(WINDOW - 4), *prompts]
    process = subprocess.Popen(
        command, env=footprint.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        assert wait_until(lambda: len(footprint.processes()) >= 3 or process.poll() is not None, 60)
        assert process.poll() is None, "ended before its ranks were seen"
        process.send_signal(number)
        assert process.wait(40) == status
        assert not footprint.leftovers(15.0)
    finally:
        footprint.erase()
        process.wait(10)


def test_a_reader_that_stops_reading_is_no_error(checkpoints: Checkpoints) -> None:
    command = [BIN / "ts-pippy", "generate", checkpoints("llama"), "--stages", "1", "--input-ids", "[1, 2]"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=writing, stderr=subprocess.PIPE, timeout=120)
    os.close(writing)
    assert done.stderr == b""
    assert done.returncode == 128 + signal.SIGPIPE
