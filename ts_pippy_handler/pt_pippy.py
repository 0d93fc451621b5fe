"""Upstream's functions under their names: bring up the RPC ranks, and turn a model into a pipeline driver.

The names and signatures are those of TorchServe's ``ts/handler_utils/distributed/pt_pippy.py``; what they do is done
by :mod:`~ts_pippy_handler.ranks`, :mod:`~ts_pippy_handler.tracing` and :mod:`~ts_pippy_handler.engine`. Does not
import TorchServe.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ts_pippy_handler import launch, loading, meeting, ranks
from ts_pippy_handler.config import ServingConfig, load_config
from ts_pippy_handler.engine import Engine
from ts_pippy_handler.errors import ConfigError, InvalidRequestError, PipelineError
from ts_pippy_handler.generation_defaults import read_defaults
from ts_pippy_handler.request import FinishReason, SamplingParams, TokenEvent

_GROUP = "ts_pippy_group"  # attribute of the TorchServe context that carries the group between the two calls


def config_of(ctx: Any) -> ServingConfig:
    """Return the checked configuration of a TorchServe context.

    Raises:
        ConfigError: If model-config.yaml is wrong.
    """
    return load_config(ctx.model_yaml_config, model_dir=ctx.system_properties.get("model_dir"))


def initialize_rpc_workers(local_rank: int, world_size: int, ctx: Any) -> None:
    """Join the RPC agents and process groups of all ranks.

    Args:
        local_rank: Rank on this host. Which stage it runs follows from ``RANK``, so several hosts work.
        world_size: Number of ranks; one per stage.
        ctx: TorchServe's context; ``pippy.rpc_timeout``, ``pippy.num_worker_threads`` and ``pippy.interface`` of its
            model-config.yaml are honoured.

    Raises:
        ConfigError: If the arguments contradict the environment or model-config.yaml is wrong.
        CheckpointError: If the checkpoint's files are missing or damaged.
        LoadError: Naming the ranks that did not appear in time.
    """
    place = ranks.place_from_environment()
    if (local_rank, world_size) != (place.local_rank, place.world_size):
        raise ConfigError(
            f"local_rank {local_rank} of world_size {world_size} contradicts the environment, "
            f"which says {place.local_rank} of {place.world_size}"
        )
    config = config_of(ctx)
    loading.check_early(config, world_size)
    setattr(ctx, _GROUP, meeting.join(place, config))


def get_pipeline_driver(model: torch.nn.Module | None, world_size: int, ctx: Any) -> PipelineDriver:
    """Split the model over the ranks and return what drives it.

    Args:
        model: A Hugging Face causal language model, best built on the meta device; only its class and dtype are
            looked at, weights are read from ``handler.model_path``. None takes both from there.
        world_size: Number of stages.
        ctx: TorchServe's context, after :func:`initialize_rpc_workers`.

    Returns:
        On rank 0 a driver that is called like the model and generates; on other ranks one that refuses to.

    Raises:
        LoadError: On every rank, with the reason, if any of them fails.
    """
    config = config_of(ctx)
    if model is not None:
        config = _with_dtype_of(model, config)
    pad = read_defaults(config.handler.model_path).pad
    group: ranks.Group | None = getattr(ctx, _GROUP, None)
    if group is not None and group.place.world_size == world_size:
        return PipelineDriver(launch.start_joined(config, group), group.place.rank, pad)
    if group is None and num_spawned_stages(ctx) == world_size:
        options = launch.SpawnOptions(ends_process=True)
        return PipelineDriver(launch.start_spawned(config, world_size, options), 0, pad)
    raise ConfigError(f"initialize_rpc_workers must have joined {world_size} ranks before the model is split")


def num_spawned_stages(ctx: Any) -> int | None:
    """Return the number of stages this process shall start itself; None when torchrun started all ranks.

    Without rank variables, ``parallelLevel`` of model-config.yaml is that number.
    """
    if ranks.place_from_environment().world_size > 1:
        return None
    top = ctx.model_yaml_config or {}
    if top.get("parallelType") == "custom" and "parallelLevel" not in top:
        raise ConfigError("parallelLevel: is missing; with parallelType: custom it is the number of stages")
    level = top.get("parallelLevel", 1)
    if isinstance(level, bool) or not isinstance(level, int) or level < 1:
        raise ConfigError(f"parallelLevel: must be the number of stages, at least 1, got {level!r}")
    return level


def _with_dtype_of(model: torch.nn.Module, config: ServingConfig) -> ServingConfig:
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    if config.handler.dtype is not None or not dtype:
        return config
    handler = type(config.handler).model_validate({**config.handler.model_dump(), "dtype": dtype})
    return ServingConfig(pippy=config.pippy, handler=handler)


class PipelineDriver:
    """Drives a split model from rank 0; call it like the model's forward, or :meth:`generate`."""

    def __init__(self, engine: Engine | None, rank: int, pad_token_id: int | None = None) -> None:
        self._engine = engine
        self._rank = rank
        self._model_pad = pad_token_id

    @property
    def serves(self) -> bool:
        """Whether this is rank 0."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """The engine of rank 0.

        Raises:
            PipelineError: On any other rank.
        """
        if self._engine is None:
            raise PipelineError(f"rank {self._rank} runs a stage; requests are served by rank 0")
        return self._engine

    def __call__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **unknown: object
    ) -> SimpleNamespace:
        """Return ``.logits`` [B, L, V] (float32, CPU), zero where ``attention_mask`` [B, L] is.

        Raises:
            InvalidRequestError: If an argument is not supported or the prompt does not fit.
        """
        _refuse(unknown, "the pipeline driver's forward")
        _check_batch(input_ids, attention_mask, "the pipeline driver's forward")
        rows = _unpadded(input_ids, attention_mask)
        params = SamplingParams(max_new_tokens=1, only_logits=True)
        numbers = self._run_all([row for row, _ in rows], params)
        logits = torch.zeros(*input_ids.shape, self.engine.loaded.vocab_size)
        for index, (number, (_, kept)) in enumerate(zip(numbers, rows, strict=True)):
            logits[index, kept] = self.engine.take_logits(number[0])
        return SimpleNamespace(logits=logits)

    forward = __call__

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        inputs: torch.Tensor | None = None,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        pad_token_id: int | None = None,
        ignore_eos: bool = False,
        **unknown: object,
    ) -> torch.Tensor:
        """Continue a padded batch as ``transformers`` ``generate`` does.

        Args:
            input_ids: Prompts [B, L], int64, padded on either side.
            attention_mask: 1 for tokens, 0 for padding [B, L]. Without it, padding tokens at either end are padding,
                as transformers infers it. A model that pads with its end-of-sequence token, or has no padding token,
                leaves that open: then runs of end-of-sequence tokens at the ends count, as upstream's handler pads.
            inputs: Another name for ``input_ids``.
            max_new_tokens: New tokens of each row.
            max_length: Prompt and new tokens of each row together, padding not counted; ignored beside
                ``max_new_tokens``, as in transformers.
            do_sample: Draw tokens instead of taking the most likely.
            temperature: Of the draw.
            top_k: Only the k most likely tokens; 0 for all.
            top_p: Only the smallest set of tokens of this probability.
            seed: Of the draw; each row adds its index.
            pad_token_id: Fills rows that end early; the model's own by default.
            ignore_eos: Go on after an end-of-sequence token.
            unknown: Anything else is refused, not ignored.

        Returns:
            int64 tensor [B, L + longest continuation]: the rows as given, continued.

        Raises:
            InvalidRequestError: If an argument is not supported or a row does not fit.
            PipelineError: If the pipeline fails.
        """
        eos = set(self.engine.eos_token_ids)
        _refuse(unknown, "generate", {"eos_token_id": (None, sorted(eos), *(eos if len(eos) == 1 else ()))})
        prompts = _check_batch(input_ids if input_ids is not None else inputs, attention_mask, "generate")
        pad = self._pad_token_id(pad_token_id)
        is_sure = pad not in eos
        rows = [row for row, _ in _unpadded(prompts, attention_mask, {pad} if is_sure else eos, is_sure=is_sure)]
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if do_sample else {}
        params = [
            SamplingParams(
                max_new_tokens=_num_new(len(row), max_new_tokens, max_length),
                seed=seed + index,
                ignore_eos=ignore_eos,
                **sampling,  # type: ignore[arg-type]
            )
            for index, row in enumerate(rows)
        ]
        new = [tokens for _, tokens in self._run_all(rows, params)]
        longest = max(len(tokens) for tokens in new)
        filled = torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens in new], dtype=torch.long)
        return torch.cat([prompts.cpu(), filled], 1).to(prompts.device)

    def close(self) -> None:
        """End the pipeline."""
        if self._engine is not None:
            self._engine.close()

    def _pad_token_id(self, given: int | None) -> int:
        if given is not None:
            return given
        if self._model_pad is not None:
            return self._model_pad
        return self.engine.eos_token_ids[0] if self.engine.eos_token_ids else 0

    def _run_all(
        self, rows: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[tuple[int, list[int]]]:
        """Run every row to its end and return its request number and new tokens."""
        each = [params] * len(rows) if isinstance(params, SamplingParams) else list(params)
        for row, own in zip(rows, each, strict=True):
            self.engine.check(row, own)  # before any of them starts
        queues: list[queue.Queue[TokenEvent]] = [queue.Queue() for _ in rows]
        numbers = [
            self.engine.submit(row, own, events.put) for row, own, events in zip(rows, each, queues, strict=True)
        ]
        return [(number, _drain(events)) for number, events in zip(numbers, queues, strict=True)]


def _drain(events: queue.Queue[TokenEvent]) -> list[int]:
    tokens: list[int] = []
    while True:
        event = events.get()
        if event.token_id is not None:
            tokens.append(event.token_id)
        if event.finish_reason is FinishReason.ERROR:
            raise event.error or PipelineError("the pipeline failed")
        if event.finish_reason is not None:
            return tokens


def _num_new(num_prompt: int, max_new_tokens: int | None, max_length: int | None) -> int:
    if max_new_tokens is not None:
        if max_new_tokens < 1:
            raise InvalidRequestError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        return max_new_tokens
    if max_length is None:
        return 20  # the default of transformers
    if max_length <= num_prompt:
        raise InvalidRequestError(
            f"max_length counts the prompt: {max_length} leaves no room after {num_prompt} prompt tokens; "
            "use max_new_tokens"
        )
    return max_length - num_prompt


def _check_batch(input_ids: object, attention_mask: torch.Tensor | None, what: str) -> torch.Tensor:
    seen = type(input_ids).__name__ if not isinstance(input_ids, torch.Tensor) else f"shape {list(input_ids.shape)}"
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or 0 in input_ids.shape:
        raise InvalidRequestError(f"{what}: input_ids must be a tensor of shape [batch, length], none 0, got {seen}")
    if input_ids.is_floating_point() or input_ids.dtype is torch.bool:
        raise InvalidRequestError(f"{what}: input_ids must be whole numbers, got {input_ids.dtype}")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise InvalidRequestError(
            f"{what}: attention_mask must have the shape of input_ids, {list(input_ids.shape)}, "
            f"got {list(attention_mask.shape)}"
        )
    return input_ids


def _refuse(unknown: dict[str, object], what: str, allowed: Mapping[str, tuple[Any, ...]] | None = None) -> None:
    # What asks for the behaviour that is there anyway is accepted; upstream's callers pass some of it.
    harmless: dict[str, tuple[Any, ...]] = {
        "use_cache": (True, False, None),
        "return_dict": (True, None),
        "num_beams": (1, None),
        **(allowed or {}),
    }
    for name, value in unknown.items():
        if name not in harmless or not any(value is same or value == same for same in harmless[name]):
            raise InvalidRequestError(f"{what} does not support {name}={value!r}")


def _unpadded(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    padding: set[int] | None = None,
    *,
    is_sure: bool = False,
) -> list[tuple[list[int], torch.Tensor]]:
    """Return each row's tokens without padding, and a mask [L] of where they were.

    Raises:
        InvalidRequestError: If a row is padded in its middle or has no tokens.
    """
    if attention_mask is not None:
        masks = attention_mask.bool().cpu()
    elif padding is None:
        masks = torch.ones_like(input_ids, dtype=torch.bool, device="cpu")
    else:
        masks = torch.stack([_guessed_mask(row.tolist(), padding, is_sure=is_sure) for row in input_ids])
    rows = []
    for row, mask in zip(input_ids.cpu(), masks, strict=True):
        positions = mask.nonzero()[:, 0]
        if not len(positions):
            raise InvalidRequestError("a row of input_ids holds only padding")
        if int(positions[-1]) - int(positions[0]) + 1 != len(positions):
            raise InvalidRequestError("attention_mask: a row may be padded at its ends only")
        rows.append((row[mask].tolist(), mask))
    return rows


def _guessed_mask(row: list[int], padding: set[int], *, is_sure: bool = False) -> torch.Tensor:
    """Mark the tokens between the runs of padding at both ends.

    Unless padding tokens are surely nothing else, one leading token stays: it may be a real start.
    """
    end = len(row)
    while end > 1 and row[end - 1] in padding:
        end -= 1
    start = 0
    while start + 1 < end and row[start] in padding and (is_sure or row[start + 1] in padding):
        start += 1
    mask = torch.zeros(len(row), dtype=torch.bool)
    mask[start:end] = True
    return mask
