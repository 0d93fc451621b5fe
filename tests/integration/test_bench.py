"""``ts-pippy bench`` as a user runs it: real ranks, exact counts, and the tokens of ``ts-pippy generate``."""

from __future__ import annotations

import json
from pathlib import Path

from tests.command import ts_pippy
from tests.models import Checkpoints
from tests.oracle import hf_generate, random_prompts

HIDDEN = 64
PROMPTS = random_prompts(6, 3, 60, 256, seed=11)
NEW_TOKENS = 7


def test_every_figure_of_two_ranks(checkpoints: Checkpoints, tmp_path: Path) -> None:
    model, work, outputs = checkpoints("llama"), tmp_path / "work.json", tmp_path / "outputs.json"
    requests = [{"id": f"r{i}", "prompt_token_ids": p, "max_tokens": NEW_TOKENS} for i, p in enumerate(PROMPTS)]
    work.write_text(json.dumps({"requests": requests}))
    options = ("--stages", 2, "--dtype", "float32", "--workload", work, "--concurrency", 4)
    found = ts_pippy("bench", model, *options, "--save-outputs", outputs, "--json").json()

    num_prompt, num_output = sum(map(len, PROMPTS)), len(PROMPTS) * NEW_TOKENS
    assert (found["prompt_tokens"], found["output_tokens"], found["num_requests"]) == (num_prompt, num_output, 6)
    assert (found["num_short"], found["concurrency"]) == (0, 4)
    wall_s = found["wall_s"]
    assert abs(found["output_tokens_per_s"] * wall_s - num_output) < 0.1
    assert abs(found["total_tokens_per_s"] * wall_s - num_prompt - num_output) < 0.1
    assert found["load_s"] > 0
    for key in ("ttft_s", "inter_token_s"):
        assert 0 < found[key]["p50"] <= found[key]["p95"] < wall_s
    assert 0 < found["bookkeeping_share"] < 1

    first, last = found["stages"]
    assert (first["stage"], last["stage"]) == (0, 1)
    num_rows = num_prompt + num_output - len(PROMPTS)  # the last token of each request is not sent through again
    for stage in (first, last):
        assert stage["num_tokens"] == num_rows
        assert stage["num_batches"] == first["num_batches"] >= NEW_TOKENS
        assert 0 < stage["busy_share"] <= 1
        assert abs(stage["busy_share"] * wall_s - stage["compute_s"]) < 0.001
        assert stage["send_s"] > 0
        assert stage["hop"]["wait_and_receive_s"] > 0
        assert stage["hop"]["mean_wait_and_receive_s"] > 0
        assert stage["cpu_s"] > 0
        assert stage["peak_memory_bytes"] > 50e6
    assert (last["hop"]["from_stage"], first["hop"]["from_stage"]) == (0, 1)
    assert last["hop"]["bytes_received"] == num_rows * HIDDEN * 4
    assert first["hop"]["bytes_received"] == 8 * (num_output + first["num_batches"])
    assert found["peak_memory_bytes"] == first["peak_memory_bytes"] + last["peak_memory_bytes"]
    assert abs(found["cpu_s"] - first["cpu_s"] - last["cpu_s"]) < 0.001
    assert set(found) == {
        "output_tokens_per_s", "total_tokens_per_s", "ttft_s", "inter_token_s", "wall_s", "load_s", "num_requests",
        "num_short", "concurrency", "prompt_tokens", "output_tokens", "stages", "peak_memory_bytes", "cpu_s",
        "bookkeeping_share",
    }  # fmt: skip

    references = hf_generate(model, PROMPTS, NEW_TOKENS, ignore_eos=True)
    expected = {f"r{i}": reference.token_ids for i, reference in enumerate(references)}
    assert json.loads(outputs.read_text()) == expected


def test_a_request_that_does_not_fit_is_one_readable_line(checkpoints: Checkpoints, tmp_path: Path) -> None:
    work = tmp_path / "work.json"
    work.write_text(json.dumps({"requests": [{"prompt_token_ids": [1, 999], "max_tokens": 2}]}))
    error = ts_pippy("bench", checkpoints("llama"), "--stages", 1, "--workload", work).error()
    assert "work.json: requests[0]: token id 999 is not in the vocabulary" in error
