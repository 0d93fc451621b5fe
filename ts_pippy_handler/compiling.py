"""Compile a stage with ``torch.compile`` (``pippy.compile``): fewer and fused kernels, for a slow first start.

Attention over the cache and packed linear layers stay as they are: each becomes one opaque operator that finds its
module or weight by number, because a compiler can see neither the cache nor the packed layout. Compiled once for one
row and once for any number of rows, while the stage loads; what would need compiling later runs uncompiled instead, so
no request ever waits for a compiler. Compiled code is kept on disk by torch. Knows one stage; nothing of ranks.

Source: ``torch.compile``; its cache is ``TORCHINDUCTOR_CACHE_DIR``.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ts_pippy_handler import process
from ts_pippy_handler.attention import like_attended
from ts_pippy_handler.cached_attention import CachedAttention
from ts_pippy_handler.errors import LoadError, one_line
from ts_pippy_handler.packing import is_packed_linear

logger = logging.getLogger(__name__)

_numbers = itertools.count()
_attentions: dict[int, CachedAttention] = {}
_packed_linears: dict[int, Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]] = {}


# Registered by hand: torch.library.custom_op would check each output for aliases, for 15 µs a call.
_library = torch.library.Library("ts_pippy_compiled", "DEF")
_library.define(
    "cached_attention(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? slopes, int number) -> Tensor"
)
_library.define("packed_linear(Tensor rows, Tensor? bias, int number, int num_outputs) -> Tensor")


def _cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    number: int,
) -> torch.Tensor:
    """Run the attention module of this number."""
    attended: torch.Tensor = _attentions[number](query, key, value, sinks, slopes)
    return attended


def _packed_linear(rows: torch.Tensor, bias: torch.Tensor | None, number: int, _num_outputs: int) -> torch.Tensor:
    """Run the packed linear layer of this number."""
    return _packed_linears[number](rows, bias)


def _like_attention(
    query: torch.Tensor,
    _key: torch.Tensor,
    value: torch.Tensor,
    _sinks: torch.Tensor | None,
    _slopes: torch.Tensor | None,
    _number: int,
) -> torch.Tensor:
    return like_attended(query, value)


def _like_linear(rows: torch.Tensor, _bias: torch.Tensor | None, _number: int, num_outputs: int) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], num_outputs)


for name, run, like in (
    ("cached_attention", _cached_attention, _like_attention),
    ("packed_linear", _packed_linear, _like_linear),
):
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ts_pippy_compiled::{name}", like, lib=_library)


def compile_module(
    module: fx.GraphModule, attentions: dict[str, CachedAttention], warm_up: Callable[[Callable[..., Any]], None]
) -> Callable[..., Any]:
    """Return the compiled form of a loaded stage's module, which is changed.

    Args:
        module: With its weights.
        attentions: Its attention modules by name.
        warm_up: Calls the function it is given as batches of every kind will.

    Raises:
        LoadError: If torch cannot compile it: on a CPU, most often for want of a C++ compiler.
    """
    started = time.monotonic()
    logger.info("compiling a stage: up to minutes, unless code compiled before is found")
    process.keep_compiled_code()
    _hide(module, attentions)
    compiled = torch.compile(module, dynamic=True, fullgraph=True)
    try:
        warm_up(compiled)
    except Exception as error:
        cause = getattr(error, "inner_exception", error)  # what the compiler behind torch.compile raised
        reason = f"{type(cause).__name__}: {one_line(cause)}"
        raise LoadError(
            f"pippy.compile: the stage cannot be compiled: {reason}; on a CPU, torch.compile needs a C++ compiler. "
            "Set pippy.compile to false to run without"
        ) from error
    logger.info("compiled in %.1f s", time.monotonic() - started)

    def run(*inputs: torch.Tensor) -> Any:
        with torch.compiler.set_stance("eager_on_recompile"):
            return compiled(*inputs)

    return run


def _hide(module: fx.GraphModule, attentions: dict[str, CachedAttention]) -> None:
    """Put opaque operators in the place of attention modules and packed linear layers."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_module" and node.target in attentions:
            number = next(_numbers)
            _attentions[number] = attentions[node.target]
            arguments = (*node.args, number)
            operator = torch.ops.ts_pippy_compiled.cached_attention.default
        elif is_packed_linear(node):
            number = next(_numbers)
            rows, parts, sizes, bias = node.args
            weights = [getattr(module, part.target) for part in parts]
            _packed_linears[number] = _with_weights(node.target, weights, sizes)
            arguments = (rows, bias, number, sum(sizes))
            operator = torch.ops.ts_pippy_compiled.packed_linear.default
        else:
            continue
        with graph.inserting_before(node):
            replacement = graph.call_function(operator, arguments)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()


def _with_weights(
    linear: Callable[..., torch.Tensor], parts: Sequence[torch.Tensor], num_outputs: Sequence[int]
) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    return lambda rows, bias: linear(rows, parts, num_outputs, bias)
