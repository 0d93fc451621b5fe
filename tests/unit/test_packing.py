"""Packed linear layers give what plain ones give, and where they do not work plain ones remain."""

from __future__ import annotations

import dataclasses
import logging

import psutil
import pytest
import torch
from torch import fx

from ts_pippy_handler import native_linear, packing
from ts_pippy_handler.packing import NATIVE, ONEDNN, Kernels, find_kernels, reserve, use_packed_linears

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_answer() -> None:
    packing._works.cache_clear()


class Two(torch.nn.Module):
    """A matrix of its own, and one that is read as an embedding too."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.own = torch.nn.Parameter(torch.randn(24, 16, generator=generator), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.randn(24, generator=generator), requires_grad=False)
        self.tied = torch.nn.Parameter(torch.randn(10, 24, generator=generator), requires_grad=False)


def traced() -> fx.GraphModule:
    root = Two()
    graph = fx.Graph()
    rows, tokens = graph.placeholder("rows"), graph.placeholder("tokens")
    own, bias, tied = (graph.get_attr(name) for name in ("own", "bias", "tied"))
    hidden = graph.call_function(torch.ops.aten.linear.default, (rows, own, bias))
    embedded = graph.call_function(torch.ops.aten.embedding.default, (tied, tokens))
    added = graph.call_function(torch.ops.aten.add.Tensor, (hidden, embedded))
    graph.output(graph.call_function(torch.ops.aten.linear.default, (added, tied)))
    return fx.GraphModule(root, graph)


def inputs(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, 16, generator=generator), torch.arange(num_rows) % 10


def kernels_or_skip(*, native: bool) -> Kernels:
    found = find_kernels(torch.float32, "cpu", native=native)
    if found is not (NATIVE if native else ONEDNN):
        pytest.skip("these kernels are not for this processor, its compiler or this torch")
    return found


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("part_bytes", [1 << 24, 5 * 24 * 4, 1])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
def test_packed_equals_plain(num_rows: int, part_bytes: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_or_skip(native=native)
    monkeypatch.setattr(packing, "_PART_BYTES", part_bytes)
    plain, packed = traced(), traced()
    names = use_packed_linears(packed, torch.float32, CPU, native=native)
    assert {name: weight.is_only_packed for name, weight in names.items()} == {"own": True, "tied": False}
    weights = dict(packed.named_parameters())
    del packed.own
    memory = reserve(names.values())
    for name, weight in names.items():
        assert weight.kernels is kernels
        for rows, attribute in weight.parts():
            packed.register_buffer(attribute, kernels.pack(weights[name].data[rows], memory))
    packed.recompile()
    assert kernels.linear.__name__ in packed.code
    assert "aten.linear" not in packed.code
    given = inputs(num_rows)
    torch.testing.assert_close(packed(*given), plain(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.float16, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "cuda")]
)
def test_other_dtypes_and_devices_stay_plain(dtype: torch.dtype, device: str) -> None:
    assert find_kernels(dtype, device) is None
    module = traced()
    before = module.code
    assert use_packed_linears(module, dtype, torch.device(device)) == {}
    module.recompile()
    assert module.code == before


def changed(monkeypatch: pytest.MonkeyPatch, name: str, **parts: object) -> None:
    """Give oneDNN's kernels, or our own, other functions."""
    monkeypatch.setattr(packing, name, dataclasses.replace(getattr(packing, name), **parts))


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, NotImplementedError])
def test_an_operator_that_fails_leaves_everything_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    def fails(weight: torch.Tensor, memory: object) -> torch.Tensor:
        raise error("no such kernel")

    changed(monkeypatch, "ONEDNN", pack=fails)
    module = traced()
    with caplog.at_level(logging.WARNING):
        assert use_packed_linears(module, torch.float32, CPU, native=False) == {}
    if torch.backends.mkldnn.is_available():
        assert caplog.messages == ["linear layers stay unpacked and slower: no such kernel"]
    module.recompile()
    given = inputs(3)
    assert torch.equal(module(*given), traced()(*given))


def test_a_wrong_result_leaves_everything_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NATIVE", "ONEDNN"):
        changed(monkeypatch, name, linear=lambda rows, *rest: torch.zeros(3, 24))
    assert find_kernels(torch.float32, "cpu") is None


def test_without_onednn_nothing_of_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    changed(monkeypatch, "ONEDNN", pack=lambda *_: pytest.fail("tried all the same"))
    assert find_kernels(torch.float32, "cpu", native=False) is None


def test_without_our_own_kernels_onednn_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(native_linear, "find_multiply", lambda: None)
    assert find_kernels(torch.float32, "cpu") is ONEDNN


def test_scratch_gives_back_what_smaller_weights_do_not_need() -> None:
    def resident() -> int:
        return psutil.Process().memory_info().rss

    scratch = packing.Scratch(8 << 20, torch.float32)
    scratch.take(8 << 20).fill_(1.0)
    large = resident()
    small = scratch.take(3)
    assert large - resident() > 30e6
    assert small.tolist() == [1.0, 1.0, 1.0]
    assert scratch.take(8 << 20).fill_(2.0).sum() == 2 * (8 << 20), "it grows again"
