"""Every causal architecture of transformers is exact or refused with a reason; the table in the docs says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.architectures import NEW_TOKENS, PROMPTS, VARIANTS, all_names, judge, write_checkpoint
from tests.command import generate

TABLE = Path(__file__).parents[2] / "docs" / "architectures.md"
IN_DEFAULT_RUN = {"bloom", "deepseek_v3", "falcon (ALiBi)", "gpt_neo", "gpt_neox", "gpt_oss", "mixtral", "bart"}
"""One for each way a model can be unusual."""
SLOW = {
    *(
        "cohere",
        "falcon (new decoder)",
        "gemma3_text",
        "glm4",
        "gpt_bigcode",
        "gptj",
        "granite",
        "llama4_text",
        "mamba",
        "minimax_m2",
    ),
    *("mpt", "olmo2", "opt (norm after, projected)", "phi", "phi3", "qwen2_moe", "qwen3_moe", "smollm3", "stablelm"),
    *("openai-gpt", "starcoder2", "whisper", "xglm"),
}


def documented() -> dict[str, str]:
    """Return the table of the docs: name and what it says of it."""
    rows = [line.split("|")[1:3] for line in TABLE.read_text("utf-8").splitlines() if line.startswith("| `")]
    return {name.strip().strip("`"): status.strip() for name, status in rows}


def cases() -> list[Any]:
    def marks(name: str) -> list[pytest.MarkDecorator]:
        if name in IN_DEFAULT_RUN:
            return []
        return [pytest.mark.slow] if name in SLOW else [pytest.mark.slow, pytest.mark.walk]

    return [pytest.param(name, marks=marks(name)) for name in all_names()]


@pytest.mark.parametrize("name", cases())
def test_exact_or_refused_as_the_docs_say(tmp_path: Path, name: str) -> None:
    verdict = judge(name, tmp_path)
    assert verdict.status in ("exact", "refused", "no reference"), verdict
    assert verdict.status == documented()[name], verdict


def test_the_docs_name_every_architecture() -> None:
    table = documented()
    assert sorted(table) == all_names()
    assert sum(status == "exact" for name, status in table.items() if name not in VARIANTS) >= 30


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox", "bloom"])
def test_over_ranks(tmp_path: Path, name: str) -> None:
    """What conversions, experts and slopes become on their way to another process is the same."""
    directory, references = write_checkpoint(name, tmp_path)
    answers = generate(directory, 2, PROMPTS, "--max-new-tokens", NEW_TOKENS, "--ignore-eos")
    assert [answer["token_ids"] for answer in answers] == [reference.token_ids for reference in references]
