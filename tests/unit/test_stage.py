"""Stages run one after the other give the logits of the unsplit model, whatever the batches look like."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import FAMILIES, VOCAB, WINDOW, Checkpoints, copy_checkpoint, rewrite_weights
from tests.unit.pipelines import CPU, Pipeline, batch_of, eager, eager_logits, traced
from ts_pippy_handler import splitting
from ts_pippy_handler.errors import CheckpointError, UnsupportedModelError
from ts_pippy_handler.stage import Stage
from ts_pippy_handler.weights import Checkpoint

LONG = [(5 * index + 3) % VOCAB for index in range(22)]
MIDDLE = [(11 * index + 1) % VOCAB for index in range(15)]
SHORT = [200, 3, 77]
RUNS = {"long": [(64, 32)], "middle": [(8, 4), (40, 8), (0, 4)], "short": [(20, 4)]}
SPLITS = [[4], [1, 3], [2, 1, 1], [1, 1, 1, 1]]


def check(pipeline: Pipeline, directory: Path, *, atol: float = 1e-4) -> None:
    """Run three requests in chunks, alone and together, and compare every row with the unsplit model's."""
    texts = {"long": LONG, "middle": MIDDLE, "short": SHORT}
    done = dict.fromkeys(texts, 0)
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in texts}
    plan = [
        {"middle": 6, "long": 20},  # two prefills, one of them wider than any window
        {"middle": 7},  # the rest of a chunked prompt
        {"short": 1},  # one token and nothing else
        {"short": 1, "long": 1, "middle": 1},  # decode together
        {"middle": 1, "short": 1, "long": 1},
    ]
    for number, step in enumerate(plan):
        parts = [(texts[name][done[name] :][:size], done[name], RUNS[name]) for name, size in step.items()]
        rows = pipeline.run(batch_of(number, parts))
        assert rows.shape == (sum(step.values()), VOCAB)
        for (name, size), own in zip(step.items(), rows.split(list(step.values())), strict=True):
            logits[name].append(own)
            done[name] += size
    assert done == {name: len(tokens) for name, tokens in texts.items()}
    for name, tokens in texts.items():
        expected = eager_logits(directory, tokens)
        torch.testing.assert_close(torch.cat(logits[name]), expected, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", SPLITS, ids=lambda sizes: f"{len(sizes)} stages")
def test_split_equals_unsplit(checkpoints: Checkpoints, family: str, sizes: list[int]) -> None:
    directory = checkpoints(family, layers=4)
    check(Pipeline(directory, sizes), directory)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "short_factor": [1.0, 1.5, 2.0, 2.5] * 2,
        "long_factor": [4.0, 5.0, 6.0, 7.0] * 2,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
    },
}


@pytest.mark.parametrize("rope_type", ROPES)
def test_every_kind_of_rotary_embedding(checkpoints: Checkpoints, rope_type: str) -> None:
    parameters = {"rope_type": rope_type, "rope_theta": 10_000.0, **ROPES[rope_type]}
    directory = checkpoints("llama", layers=4, config={"rope_parameters": parameters})
    # yarn makes this model so steep that float32 itself is off by 1e-3; wrong frequencies are off by whole units.
    check(Pipeline(directory, [1, 3]), directory, atol=3e-3 if rope_type == "yarn" else 1e-4)
    window = 24 if rope_type == "longrope" else WINDOW
    assert traced(directory).max_positions == window, "beyond it the frequencies would follow the longest request"


def test_packed_and_plain_weights_agree(checkpoints: Checkpoints) -> None:
    directory = checkpoints("llama", layers=4)
    plain = Pipeline(directory, [2, 2], pack_weights=False)
    check(plain, directory)
    assert all("_linear_pointwise" not in stage.graph.module.code for stage in plain.stages)


@pytest.mark.parametrize("head", ["tied", "tied-present", "untied"])
@pytest.mark.parametrize("pack_weights", [True, False])
def test_an_output_matrix_of_every_kind(checkpoints: Checkpoints, head: str, pack_weights: bool) -> None:
    directory = checkpoints("llama", layers=4, head=head)
    assert ("lm_head.weight" in Checkpoint(str(directory)).names) == (head != "tied")
    check(Pipeline(directory, [2, 2], pack_weights=pack_weights), directory)
    check(Pipeline(directory, [4], pack_weights=pack_weights), directory)


def test_a_checkpoint_of_the_bare_model(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """As older checkpoints are: names without the model's own prefix."""
    source = checkpoints("gpt2", layers=4)
    directory = copy_checkpoint(source, tmp_path / "bare")
    model = eager(str(source))
    rewrite_weights(directory, model, limit=None)
    file = directory / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    assert "wte.weight" in tensors
    save_file(tensors, file, metadata={"format": "pt"})
    check(Pipeline(directory, [1, 3]), source)


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_what_the_models_own_code_computes(checkpoints: Checkpoints, family: str) -> None:
    directory = checkpoints(family, layers=4)
    pipeline = Pipeline(directory, [2, 2], pack_weights=False)
    expected = dict(eager(str(directory)).named_buffers())
    seen = set()
    for stage in pipeline.stages:
        for key, buffer in stage.graph.module.named_buffers():
            name = stage.graph.tensors.get(key, key)
            if name in expected:
                seen.add(name)
                torch.testing.assert_close(buffer, expected[name], rtol=0, atol=0)
            assert not buffer.is_meta
        assert not any(parameter.is_meta for parameter in stage.graph.module.parameters())
    has_rotary = {name for name in expected if name.endswith("rotary_emb.inv_freq")}
    assert seen >= has_rotary
    assert bool(has_rotary) == (family not in ("gpt2", "opt"))


def test_bytes_and_progress(checkpoints: Checkpoints) -> None:
    directory = checkpoints("llama", layers=4)
    model = traced(directory)
    read: list[int] = []
    graphs = splitting.split(model, [1, 3])
    stage = Stage(graphs[1], model, Checkpoint(str(directory)), CPU, progress=read.append)
    assert sum(read) == stage.num_bytes == model.costs.cost(range(1, 4)).weight_bytes
    assert stage.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert stage.is_last


def test_a_tensor_that_is_nowhere(checkpoints: Checkpoints, tmp_path: Path) -> None:
    directory = copy_checkpoint(checkpoints("llama", layers=4, shard_bytes=None), tmp_path / "copy")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    message = f"{file}: holds no tensor 'model.layers.2.mlp.down_proj.weight', which the model needs"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        Pipeline(directory, [2, 2])


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_a_prefix_that_a_training_tool_added_is_named(checkpoints: Checkpoints, tmp_path: Path, prefix: str) -> None:
    directory = copy_checkpoint(checkpoints("llama", layers=4, shard_bytes=None), tmp_path / "copy")
    file = directory / "model.safetensors"
    renamed = {prefix + name: tensor for name, tensor in load_file(file).items()}
    save_file(renamed, file, metadata={"format": "pt"})
    message = f"{file}: holds no tensor 'model."
    with pytest.raises(
        CheckpointError, match=rf"^{re.escape(message)}.*: save the weights with names that lack '{prefix}'"
    ):
        Pipeline(directory, [2, 2])


@pytest.mark.parametrize("layers_per_stage", [[4], [2, 2]])
def test_a_head_that_differs_from_the_embedding_it_is_tied_to(
    checkpoints: Checkpoints, tmp_path: Path, layers_per_stage: list[int]
) -> None:
    source = checkpoints("llama", layers=4, head="tied-present", shard_bytes=None)
    directory = copy_checkpoint(source, tmp_path / "copy")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)
    save_file(tensors, file, metadata={"format": "pt"})
    token_ids = [5, 9, 77, 120, 33, 8]
    logits = Pipeline(directory, layers_per_stage).run(batch_of(0, [(token_ids, 0, [(0, 16)])]))
    torch.testing.assert_close(logits, eager_logits(directory, token_ids))  # transformers does not tie these two


@pytest.mark.parametrize("layers_per_stage", [[4], [2, 2]])
@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
@pytest.mark.parametrize("head", ["tied", "tied-present", "shared memory", "untied"])
def test_a_stage_reads_each_of_its_tensors_once_and_no_other(
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    head: str,
    file_format: str,
    layers_per_stage: list[int],
) -> None:
    is_shared = head == "shared memory"
    options = {"layers": 4, "file_format": file_format, "shard_bytes": None, "head": "tied" if is_shared else head}
    directory = checkpoints("llama", **options)
    if is_shared:
        directory = copy_checkpoint(directory, tmp_path / "copy")
        share_head(directory, file_format)
    num_bytes = 0
    copy = Checkpoint._copy

    def counting(self: Checkpoint, file: Path, name: str, target: torch.Tensor, rows: slice | None) -> None:
        nonlocal num_bytes
        num_bytes += target.nbytes
        copy(self, file, name, target, rows)

    monkeypatch.setattr(Checkpoint, "_copy", counting)
    checkpoint = Checkpoint(str(directory))
    model = traced(directory, checkpoint=checkpoint)
    model.ask_checkpoint(checkpoint)
    for graph in splitting.split(model, layers_per_stage):
        num_bytes = 0
        stage = Stage(graph, model, checkpoint, CPU)
        assert num_bytes == stage.num_bytes


def share_head(directory: Path, file_format: str) -> None:
    """Store the tied head beside the embedding, in the same memory where the format can say so."""
    if file_format == "bin":
        file = directory / "pytorch_model.bin"
        tensors = torch.load(file)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        torch.save(tensors, file)
    else:
        file = directory / "model.safetensors"
        tensors = load_file(file)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, file, metadata={"format": "pt"})


def test_a_tensor_of_another_shape(checkpoints: Checkpoints, tmp_path: Path) -> None:
    directory = copy_checkpoint(checkpoints("llama", layers=4, shard_bytes=None), tmp_path / "copy")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, file, metadata={"format": "pt"})
    message = "model.safetensors: tensor 'model.norm.weight' has shape [65], the model needs [64]"
    with pytest.raises(CheckpointError, match=f"{re.escape(message)}$"):
        Pipeline(directory, [2, 2])


def test_a_constant_whose_value_is_unknown(checkpoints: Checkpoints) -> None:
    directory = checkpoints("llama", layers=4)
    model = traced(directory)
    model.buffers = {name: buffer.to("meta") for name, buffer in model.buffers.items()}
    with pytest.raises(UnsupportedModelError, match=r"constant 'model.rotary_emb.inv_freq' whose value is unknown$"):
        Stage(splitting.split(model, [4])[0], model, Checkpoint(str(directory)), CPU)
