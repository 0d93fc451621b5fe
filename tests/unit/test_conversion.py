"""Checkpoints that store experts one by one, or under other names, load as transformers loads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.architectures import write_checkpoint
from tests.models import Checkpoints
from tests.unit.pipelines import CPU, traced
from ts_pippy_handler import conversion, splitting
from ts_pippy_handler.conversion import Conversions
from ts_pippy_handler.errors import CheckpointError
from ts_pippy_handler.graph_data import ModelFacts, decode_stage, encode_stage
from ts_pippy_handler.stage import Stage
from ts_pippy_handler.weights import Checkpoint


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("mixtral", tmp_path_factory.mktemp("mixtral"))[0]


def rewritten(source: Path, target: Path, change) -> Path:
    """Copy a checkpoint with the tensors that ``change`` makes of its own."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_experts_stored_one_by_one(mixtral: Path) -> None:
    checkpoint = Checkpoint(str(mixtral))
    name = "model.layers.2.mlp.experts.gate_up_proj"
    assert name not in checkpoint.names
    found = conversion.plan(traced(mixtral).model, checkpoint)
    own = found.converted[name]
    assert len(own.sources) == 8
    assert all("layers.2." in source for source in own.sources)
    stored = load_file(mixtral / "model.safetensors")
    read: list[str] = []
    value = own.run(lambda source: read.append(source) or stored[source])[name]
    expected = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32).state_dict()[name]
    torch.testing.assert_close(value, expected, rtol=0, atol=0)
    assert sorted(read) == sorted(own.sources), "each is read once"


def test_a_stage_carries_what_its_own_parameters_need(mixtral: Path) -> None:
    model = traced(mixtral)
    model.ask_checkpoint(Checkpoint(str(mixtral)))
    graphs = splitting.split(model, [1, 3])
    graph, facts = decode_stage(encode_stage(graphs[0], ModelFacts.of(model, graphs[0])))
    assert {name.split(".")[2] for name in facts.conversions.converted} == {"0"}
    stage = Stage(graph, facts, Checkpoint(str(mixtral)), CPU)
    values = dict(stage.graph.module.named_parameters())
    fused = next(value for name, value in values.items() if graph.tensors[name].endswith("experts.gate_up_proj"))
    expected = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32).state_dict()
    torch.testing.assert_close(fused, expected["model.layers.0.mlp.experts.gate_up_proj"], rtol=0, atol=0)


def test_experts_stored_as_the_model_holds_them(mixtral: Path, tmp_path: Path) -> None:
    state = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32).state_dict()
    plain = rewritten(mixtral, tmp_path / "fused", lambda _: {name: value.clone() for name, value in state.items()})
    assert conversion.plan(traced(plain).model, Checkpoint(str(plain))) == Conversions()


def test_a_missing_expert_is_named(mixtral: Path, tmp_path: Path) -> None:
    def without_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        lost = next(name for name in tensors if "layers.1." in name and "experts.3.w2" in name)
        return {name: value for name, value in tensors.items() if name != lost}

    broken = rewritten(mixtral, tmp_path / "broken", without_one)
    model = traced(broken)
    model.ask_checkpoint(Checkpoint(str(broken)))
    graph = splitting.split(model, [4])[0]
    with pytest.raises(CheckpointError, match=r"make a 'model\.layers\.1\.mlp\.experts\.down_proj' of shape \[3, "):
        Stage(graph, model, Checkpoint(str(broken)), CPU)


def test_an_expert_of_another_shape_is_named(mixtral: Path, tmp_path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next(name for name in tensors if "layers.1." in name and "experts.3.w1" in name)
        return {**tensors, name: tensors[name][:-1].clone()}

    broken = rewritten(mixtral, tmp_path / "broken", cut)
    with pytest.raises(CheckpointError, match=r"layers\.1\..*cannot be turned into 'model\.layers\.1\.mlp\.experts"):
        conversion.plan(traced(broken).model, Checkpoint(str(broken)))


@pytest.mark.parametrize(
    ("name", "shape", "is_reported"),
    [
        ("h.0.attn.bias", [1, 1, 8, 8], False),
        ("transformer.h.0.attn.masked_bias", [], False),
        ("transformer.h.0.attn.bias", [8], True),
        ("transformer.h.0.attn.rotary_emb.inv_freq", [4], False),
        ("wte.weight", [2, 2], False),
        ("extra.0.ignored", [2], False),
        ("transformer.h.9.ln_1.weight", [2], True),
    ],
)
def test_tensors_that_nothing_reads(
    checkpoints: Checkpoints, tmp_path: Path, name: str, shape: list[int], is_reported: bool
) -> None:
    model = traced(checkpoints("gpt2", layers=4)).model
    model._keys_to_ignore_on_load_unexpected = {r"extra\.\d+\.ignored"}
    save_file({name: torch.ones(shape)}, tmp_path / "model.safetensors")
    found = conversion.unread(model, Checkpoint(str(tmp_path)), Conversions())
    assert found == ([name] if is_reported else [])


def test_experts_one_by_one_are_read(mixtral: Path) -> None:
    model = traced(mixtral)
    model.ask_checkpoint(Checkpoint(str(mixtral)))
    assert model.unread == []


def test_other_names(tmp_path: Path) -> None:
    directory, _ = write_checkpoint("gpt_neox", tmp_path)
    found = conversion.plan(traced(directory).model, Checkpoint(str(directory)))
    assert found.renamed["lm_head.weight"] == ["embed_out.weight"]
    assert not found.converted
