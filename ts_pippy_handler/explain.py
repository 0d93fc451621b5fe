"""Say in words why a model is cut where it is: the rule, the stage that limits, what another cut would give.

Numbers come from :mod:`~ts_pippy_handler.fit`; knows neither graphs nor devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ByteSize

from ts_pippy_handler import fit
from ts_pippy_handler.config import PippyConfig
from ts_pippy_handler.costs import LayerCosts
from ts_pippy_handler.fit import Decision, DeviceMemory
from ts_pippy_handler.step_time import MIX


@dataclass(frozen=True, kw_only=True)
class _Words:
    """How one kind of cost is spoken of."""

    rule: str
    most: str
    """Name of the stage that costs most."""
    more: str
    less: str


_TIME = _Words(rule="the slowest stage is as fast as it can be", most="the slowest stage", more="slower", less="faster")
_WEIGHTS = _Words(
    rule="the stage with the most weights has as few as it can", most="the largest stage", more="larger", less="smaller"
)
_FILL = _Words(
    rule="the fullest device is as empty as it can be", most="the fullest device", more="fuller", less="emptier"
)
_ALIKE = 0.0005
"""A difference that is not worth a tenth of a percent is none."""


def explain(costs: LayerCosts, pippy: PippyConfig, memory: DeviceMemory | None, decision: Decision) -> str:
    """Return why the layers are spread as ``decision`` says, in a few sentences."""
    is_cut = len(decision.sizes) > 1
    words = _words(pippy, memory)
    sentences = [_rule(pippy, words) if is_cut else "One stage has all layers."]
    if memory is not None:
        sentences.append(_devices(costs, pippy, memory, decision))
    if is_cut:
        sentences.append(_limit(decision, words))
    if is_cut and isinstance(pippy.split, list):
        sentences.append(_alternative(costs, pippy, memory, decision))
    return " ".join(sentences)


def _words(pippy: PippyConfig, memory: DeviceMemory | None) -> _Words:
    if pippy.split != "memory":
        return _TIME
    return _WEIGHTS if memory is None else _FILL


def _rule(pippy: PippyConfig, words: _Words) -> str:
    if isinstance(pippy.split, list):
        return f"Cut as given (split: {pippy.split})."
    mix = f", for {MIX.prompt_rows / MIX.answer_rows:g} prompt tokens to each new one" if words is _TIME else ""
    return f"Cut so that {words.rule} (split: {pippy.split}{mix})."


def _devices(costs: LayerCosts, pippy: PippyConfig, memory: DeviceMemory, decision: Decision) -> str:
    sizes = ", ".join(
        f"{ByteSize(budget).human_readable(separator=' ')} "
        f"{'measured' if pippy.declared_memory(stage) is None else 'declared'} for stage {stage}"
        for stage, budget in enumerate(memory.budgets)
    )
    told = f"Device memory, {sizes}, leaves a cache of {decision.cache_tokens:,} tokens"
    if isinstance(pippy.split, list):
        return f"{told}."
    free = fit.layers_per_stage(costs, pippy, len(decision.sizes))
    if free == decision.sizes:
        return f"{told} and changes nothing."
    return f"{told}; without that limit the layers would be {free}."


def _limit(decision: Decision, words: _Words) -> str:
    stages = _costs(decision, decision.sizes)
    limiting = max(range(len(stages)), key=stages.__getitem__)
    share = f"{stages[limiting] / sum(stages):.1%}"
    told = {
        _TIME: f"Stage {limiting} limits, with {share} of the time of all stages",
        _WEIGHTS: f"Stage {limiting} limits, with {share} of the weights of all stages",
        _FILL: f"Stage {limiting} limits, with {stages[limiting]:.1%} of its device in use",
    }[words]
    if decision.sizes[limiting] == 1:
        return f"{told}; it has a single layer, so no other cut relieves it."
    given = [each for each in (limiting - 1, limiting + 1) if 0 <= each < len(stages)]
    moves = "; ".join(
        f"given to stage {to}, {_change(decision, _moved(decision.sizes, limiting, to), words)}" for to in given
    )
    return f"{told}. With one layer fewer there, {moves}."


def _alternative(costs: LayerCosts, pippy: PippyConfig, memory: DeviceMemory | None, decision: Decision) -> str:
    by_time = pippy.model_copy(update={"split": "time"})
    sizes = fit.layers_per_stage(costs, by_time, len(decision.sizes), memory)
    if sizes == decision.sizes:
        return "split: time would cut there, too."
    return f"split: time would give {sizes}: {_change(decision, sizes, _TIME)}."


def _moved(sizes: Sequence[int], source: int, target: int) -> list[int]:
    """Return the sizes with one layer of ``source`` given to its neighbour ``target``."""
    step = {source: -1, target: 1}
    return [size + step.get(stage, 0) for stage, size in enumerate(sizes)]


def _change(decision: Decision, sizes: Sequence[int], words: _Words) -> str:
    """Return how the stage that costs most would change."""
    costs = _costs(decision, sizes)
    if math.inf in costs:
        return f"stage {costs.index(math.inf)} would not fit its device"
    change = max(costs) / max(_costs(decision, decision.sizes)) - 1
    if abs(change) < _ALIKE:
        return f"{words.most} would be neither {words.more} nor {words.less}"
    return f"{words.most} would be {abs(change):.1%} {words.more if change > 0 else words.less}"


def _costs(decision: Decision, sizes: Sequence[int]) -> list[float]:
    return [decision.cost(stage, *layers) for stage, layers in enumerate(fit.ranges(sizes))]
