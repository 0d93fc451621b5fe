"""How much memory the intermediate values of a traced graph take at each of its nodes.

As the graph is run, one node after the other, each value freed after its last use. What an operator needs inside is not
seen.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_MAY_COPY = frozenset({"aten.reshape.default", "aten.contiguous.default", "aten.flatten.using_ints"})
"""Operators that are views by their schema, and yet copy what does not lie as it should."""


def live_bytes(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return for each node the bytes alive while it runs, for each row of the batch, parameters not counted."""
    nodes = list(graph.nodes)
    owners: dict[fx.Node, fx.Node] = {}
    last_use: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        source = viewed(node)
        owners[node] = node if source is None else owners[source]
        for used in (node, *node.all_input_nodes):
            last_use[owners[used]] = node
    freed: dict[fx.Node, int] = {}
    sizes = {owner: 0 if owner.op == "get_attr" else bytes_per_row(owner.meta.get("val")) for owner in last_use}
    for owner, node in last_use.items():
        freed[node] = freed.get(node, 0) + sizes[owner]
    found: dict[fx.Node, int] = {}
    alive = 0
    for node in nodes:
        alive += sizes.get(node, 0)
        found[node] = alive
        alive -= freed.get(node, 0)
    return found


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the node whose memory a node's value lies in, if it is not its own."""
    source = node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(source, fx.Node):
        return None
    if node.target is operator.getitem:
        return source
    if not isinstance(node.target, torch._ops.OpOverload) or str(node.target) in _MAY_COPY:
        return None
    returns = node.target._schema.returns
    is_view = bool(returns) and returns[0].alias_info is not None
    return source if is_view and _dtype(node) == _dtype(source) else None


def _dtype(node: fx.Node) -> Any:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return getattr(first, "dtype", None)


def bytes_per_row(value: Any) -> int:
    """Return the bytes of a traced value for each row of the batch; 0 if it is the same for any batch."""
    if isinstance(value, (tuple, list)):
        return sum(map(bytes_per_row, value))
    if not isinstance(value, torch.Tensor):
        return 0
    count: Any = value.numel()
    if isinstance(count, int):
        return 0  # the same for any batch, so it is small
    expression = count.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, 1))) * value.element_size()
