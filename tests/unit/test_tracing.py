"""One trace of the whole model, cut where asked, with everything a stage needs named."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import fx
from transformers import AutoConfig

from tests.models import FAMILIES, VOCAB, WINDOW, Checkpoints
from tests.unit.pipelines import eager, traced
from ts_pippy_handler import splitting, step_time, tracing
from ts_pippy_handler.errors import UnsupportedModelError
from ts_pippy_handler.step_time import MIX


def tiny_config(model_type: str, **settings: object) -> object:
    return AutoConfig.for_model(model_type, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_trace_knows(checkpoints: Checkpoints, family: str) -> None:
    directory = checkpoints(family, layers=4)
    model = traced(directory)
    assert model.num_layers == 4
    assert model.vocab_size == VOCAB
    assert model.max_positions == WINDOW
    assert model.dtype == torch.float32
    shapes = {name: tuple(p.shape) for name, p in eager(str(directory)).named_parameters(remove_duplicate=False)}
    assert {name: tuple(p.shape) for name, p in model.parameters.items()} == shapes
    assert all(parameter.is_meta for parameter in model.parameters.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [[4], [1, 3], [2, 1, 1], [1, 1, 1, 1]], ids=str)
def test_one_hidden_state_per_hop(checkpoints: Checkpoints, family: str, sizes: list[int]) -> None:
    graphs = splitting.split(traced(checkpoints(family, layers=4)), sizes)
    assert [graph.num_layers for graph in graphs] == sizes
    assert [graph.first_layer for graph in graphs] == [sum(sizes[:index]) for index in range(len(sizes))]
    assert [(graph.index, graph.num_stages) for graph in graphs] == [(i, len(sizes)) for i in range(len(sizes))]
    for graph, following in itertools.pairwise(graphs):
        assert [(value.shape, value.dtype) for value in graph.sends] == [((1, None, 64), torch.float32)]
        assert following.receives == graph.sends
    assert graphs[0].receives == graphs[-1].sends == ()
    assert len(graphs[-1].outputs) == 1
    specs = [spec for graph in graphs for spec in splitting.attention_specs(graph.module).values()]
    assert [spec.layer for spec in specs] == [0, 1, 2, 3]
    assert [len(splitting.attention_specs(graph.module)) for graph in graphs] == sizes


def test_a_stage_holds_the_tensors_of_its_own_layers_only(checkpoints: Checkpoints) -> None:
    graphs = splitting.split(traced(checkpoints("llama", layers=4)), [1, 2, 1])
    names = [{graph.tensors.get(key, key) for key, _ in graph.module.named_parameters()} for graph in graphs]
    everything = set(dict(eager(str(checkpoints("llama", layers=4))).named_parameters()))
    assert set.union(*names) == everything
    assert sum(map(len, names)) == len(everything)
    assert "model.embed_tokens.weight" in names[0]
    assert {"lm_head.weight", "model.norm.weight"} <= names[2]
    assert {int(name.split(".")[2]) for name in names[1]} == {1, 2}


@pytest.mark.parametrize("family", ["gemma2", "mistral", "llama"])
def test_windows_and_caps_are_read_off_the_model(checkpoints: Checkpoints, family: str) -> None:
    (graph,) = splitting.split(traced(checkpoints(family, layers=4)), [4])
    specs = list(splitting.attention_specs(graph.module).values())
    windows = {"gemma2": [8, 0, 8, 0], "mistral": [8] * 4, "llama": [0] * 4}
    assert [spec.window for spec in specs] == windows[family]
    assert {spec.softcap for spec in specs} == {5.0 if family == "gemma2" else 0.0}
    assert {(spec.num_heads, spec.num_kv_heads, spec.key_dim, spec.value_dim) for spec in specs} == {(4, 2, 16, 16)}
    assert {spec.scale for spec in specs} == {0.25}


def test_costs_add_up_to_the_model(checkpoints: Checkpoints) -> None:
    directory = checkpoints("llama", layers=4)
    model = traced(directory)
    total = sum(parameter.numel() for parameter in eager(str(directory)).parameters())
    assert sum(unit.num_parameters for unit in model.costs.units) == total
    assert sum(unit.weight_bytes for unit in model.costs.units) == total * 4
    embedding = VOCAB * 64
    assert sum(unit.read_bytes for unit in model.costs.units) == (total - embedding) * 4, "a lookup reads one row only"
    assert model.costs.units[1] == model.costs.units[2]
    assert model.costs.units[0].read_bytes == model.costs.units[1].read_bytes
    assert model.costs.units[3].read_bytes == model.costs.units[1].read_bytes + (embedding + 64) * 4
    assert model.costs.num_operators[3] > model.costs.num_operators[2] == model.costs.num_operators[1] > 20
    head_ns = step_time.nanoseconds(
        read_bytes=(embedding + 64) * 4,
        multiplications=embedding * MIX.answer_rows + 64 * MIX.num_rows,
        num_operators=model.costs.num_operators[3] - model.costs.num_operators[1],
    )
    assert abs(model.costs.units[3].time_cost - model.costs.units[1].time_cost - head_ns) <= 2
    assert {unit.kv_bytes_per_token for unit in model.costs.units} == {2 * 2 * 16 * 4}
    assert model.costs.cost(range(4)).num_parameters == total


def test_a_tied_matrix_costs_each_stage_that_has_it_once(checkpoints: Checkpoints) -> None:
    model = traced(checkpoints("gpt2", layers=4))
    matrix = VOCAB * 64 * 4
    read = [unit.read_bytes for unit in model.costs.units]
    assert read[3] - read[2] >= matrix, "looked up by row and read as the head: the head counts"
    assert model.costs.cost(range(4)).read_bytes == sum(read)
    parts = [model.costs.cost(range(2)), model.costs.cost(range(2, 4))]
    assert sum(part.weight_bytes for part in parts) == model.costs.cost(range(4)).weight_bytes + matrix
    assert model.aliases["lm_head.weight"] == model.aliases["transformer.wte.weight"]
    assert set(model.aliases["lm_head.weight"]) == {"lm_head.weight", "transformer.wte.weight"}


def test_of_experts_a_row_needs_those_it_is_sent_to() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB}
    config = tiny_config("mixtral", **sizes, num_local_experts=6, num_experts_per_tok=2)
    model = tracing.trace(config, torch.float32)
    names = [f"model.layers.{layer}.mlp.experts.{part}" for layer in range(2) for part in ("gate_up_proj", "down_proj")]
    assert model.costs.row_shares == dict.fromkeys(names, pytest.approx(1 / 3))
    unit, experts = model.costs.units[0], 6 * 3 * 64 * 96
    assert unit.read_bytes == (unit.num_parameters - VOCAB * 64 - experts * 2 // 3) * 4
    assert model.costs.num_operators[0] > 20 + 2 * 6


def test_other_dtypes_halve_the_weights(checkpoints: Checkpoints) -> None:
    directory = checkpoints("gpt2", layers=4)
    half, full = (traced(directory, dtype).costs.cost(range(4)) for dtype in (torch.bfloat16, torch.float32))
    assert half.weight_bytes * 2 == full.weight_bytes
    assert half.num_parameters == full.num_parameters


def test_splitting_leaves_torch_as_it_was(checkpoints: Checkpoints) -> None:
    before = fx.GraphModule.recompile
    splitting.split(traced(checkpoints("gpt2", layers=4)), [2, 2])
    assert fx.GraphModule.recompile is before


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("t5", {}, r"^t5: encoder-decoder models cannot be split$"),
        ("vit", {}, r"^vit: Unrecognized configuration class"),
        (
            "bert",
            {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32},
            r"is not causal; only causal language models can be split$",
        ),
    ],
)
def test_architectures_that_cannot_be_split(model_type: str, settings: dict, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        tracing.trace(tiny_config(model_type, **settings), torch.float32)


def test_layers_that_keep_a_state_are_refused() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    message = "^mamba: cannot be traced: its code treats texts of different lengths differently"
    with pytest.raises(UnsupportedModelError, match=message):
        tracing.trace(tiny_config("mamba", **small), torch.float32)


def test_positions_that_the_model_counts_itself_are_refused() -> None:
    """In a packed row they would run through all requests."""
    small = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32, "vocab_size": 64}
    config = tiny_config("bart", **small, is_encoder_decoder=False, is_decoder=True)
    with pytest.raises(UnsupportedModelError, match=r"^bart counts positions itself \(embedding.*\) instead of taking"):
        tracing.trace(config, torch.float32)


@pytest.mark.parametrize(
    ("said", "dtype"),
    [
        ("bfloat16", torch.bfloat16),
        ("half", torch.float16),
        (torch.float16, torch.float16),
        (None, torch.float32),
        ("nonsense", torch.float32),
    ],
)
def test_the_dtype_of_a_checkpoint(said: object, dtype: torch.dtype) -> None:
    assert tracing.checkpoint_dtype(SimpleNamespace(dtype=said)) is dtype
    assert tracing.checkpoint_dtype(SimpleNamespace()) is torch.float32


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"max_position_embeddings": 7}, 7),
        ({"n_positions": 9}, 9),
        ({"max_seq_len": 11}, 11),
        ({"max_position_embeddings": None, "seq_length": 13}, 13),
        ({"max_position_embeddings": None, "max_target_positions": 15}, 15),
        ({"text": {"max_position_embeddings": 17}}, 17),
        ({"max_position_embeddings": -1}, None),
        ({}, None),
    ],
)
def test_the_window_under_any_of_its_names(checkpoints: Checkpoints, config: dict, window: int | None) -> None:
    model = traced(checkpoints("gpt2", layers=4))
    text_config = SimpleNamespace(**config.pop("text", config))
    model.config = SimpleNamespace(**config, get_text_config=lambda: text_config)
    assert model.max_positions == window
