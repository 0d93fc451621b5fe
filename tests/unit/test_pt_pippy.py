"""Upstream's functions: padded batches in and out, arguments honoured or refused, ranks that agree."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models import EOS_ID, Checkpoints
from tests.unit.fakes import EOS, VOCAB, FakeContext, FakeEngine, continuation
from tests.unit.pipelines import eager_logits
from ts_pippy_handler import launch, ranks
from ts_pippy_handler.errors import CheckpointError, ConfigError, InvalidRequestError, PipelineError
from ts_pippy_handler.pt_pippy import (
    PipelineDriver,
    _num_new,
    _unpadded,
    config_of,
    get_pipeline_driver,
    initialize_rpc_workers,
    num_spawned_stages,
)
from ts_pippy_handler.request import SamplingParams


@pytest.fixture(autouse=True)
def no_rank_variables() -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


class DriverEngine(FakeEngine):
    """Answers as soon as it is asked."""

    eos_token_ids = (EOS,)
    loaded = SimpleNamespace(vocab_size=VOCAB)

    def submit(self, *arguments: Any) -> int:
        number = super().submit(*arguments)
        self.answer_all()
        return number


def driver() -> PipelineDriver:
    return PipelineDriver(DriverEngine(), 0)  # type: ignore[arg-type]


def submitted(pipeline: PipelineDriver) -> list[tuple[list[int], SamplingParams]]:
    return pipeline.engine.submitted  # type: ignore[attr-defined, no-any-return]


def new_tokens(prompt: list[int], num: int) -> list[int]:
    return continuation(prompt, SamplingParams(max_new_tokens=num), eos=())[0]


@pytest.mark.parametrize(
    ("row", "padding", "expected"),
    [
        ([5, 6, 0, 0], {0}, [5, 6]),
        ([0, 0, 5, 6], {0}, [0, 5, 6]),
        ([0, 5, 6], {0}, [0, 5, 6]),
        ([0, 0, 0, 5, 0, 6, 0], {0}, [0, 5, 0, 6]),
        ([9, 9, 5, 9, 0], {0, 9}, [9, 5]),
        ([0, 0, 0], {0}, [0]),
        ([5, 6], {0}, [5, 6]),
    ],
)
def test_padding_is_guessed_at_the_ends_only(row: list[int], padding: set[int], expected: list[int]) -> None:
    ((tokens, mask),) = _unpadded(torch.tensor([row]), None, padding)
    assert tokens == expected
    assert torch.tensor([row])[0][mask].tolist() == expected


def test_without_a_mask_or_padding_every_token_counts() -> None:
    ((tokens, mask),) = _unpadded(torch.tensor([[0, 0, 5]]), None)
    assert tokens == [0, 0, 5]
    assert mask.all()


def test_a_mask_decides() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    rows = _unpadded(ids, torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]), {1, 5})
    assert [tokens for tokens, _ in rows] == [[2, 3, 4], [5, 6]]
    assert [mask.tolist() for _, mask in rows] == [[False, True, True, True], [True, True, False, False]]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([1, 0, 1], r"^attention_mask: a row may be padded at its ends only$"),
        ([0, 0, 0], r"^a row of input_ids holds only padding$"),
    ],
)
def test_masks_that_make_no_sense(mask: list[int], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _unpadded(torch.tensor([[1, 2, 3]]), torch.tensor([mask]))


@pytest.mark.parametrize(
    ("num_prompt", "max_new_tokens", "max_length", "expected"),
    [(5, None, None, 20), (5, 7, None, 7), (5, None, 8, 3), (5, 7, 8, 7), (5, 7, 2, 7), (5, None, 6, 1)],
)
def test_the_number_of_new_tokens(
    num_prompt: int, max_new_tokens: int | None, max_length: int | None, expected: int
) -> None:
    assert _num_new(num_prompt, max_new_tokens, max_length) == expected


@pytest.mark.parametrize(
    ("max_new_tokens", "max_length", "message"),
    [
        (0, None, r"^max_new_tokens must be at least 1, got 0$"),
        (-1, 50, r"^max_new_tokens must be at least 1, got -1$"),
        (None, 5, r"^max_length counts the prompt: 5 leaves no room after 5 prompt tokens; use max_new_tokens$"),
        (None, 2, r"^max_length counts the prompt: 2 leaves no room"),
    ],
)
def test_no_room_for_new_tokens(max_new_tokens: int | None, max_length: int | None, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _num_new(5, max_new_tokens, max_length)


def test_a_padded_batch_is_continued_as_transformers_does() -> None:
    ids = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    out = driver().generate(ids, mask, max_new_tokens=3)
    assert out.dtype == torch.long
    assert out[:, :4].tolist() == ids.tolist()
    assert out[:, 4:].tolist() == [new_tokens([5, 6], 3), new_tokens([1, 2, 3, 4], 3)]


def test_shorter_rows_are_filled_up() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 77, 77]])
    out = driver().generate(input_ids=ids, max_length=5, pad_token_id=77)
    assert out[0].tolist() == [5, 6, 7, *new_tokens([5, 6, 7], 2), 77, 77]
    assert out[1].tolist() == [8, 77, 77, *new_tokens([8], 4)]


def test_inputs_is_another_name() -> None:
    out = driver().generate(inputs=torch.tensor([[5]]), max_new_tokens=1)
    assert out.tolist() == [[5, *new_tokens([5], 1)]]


def test_sampling_arguments() -> None:
    pipeline = driver()
    ids = torch.tensor([[5], [6]])
    pipeline.generate(ids, max_new_tokens=2, do_sample=True, temperature=0.5, top_k=3, top_p=0.8, seed=40)
    pipeline.generate(ids, max_new_tokens=2, temperature=0.5, top_k=3, use_cache=True, num_beams=1, ignore_eos=True)
    drawn, greedy = submitted(pipeline)[:2], submitted(pipeline)[2:]
    assert [params for _, params in drawn] == [
        SamplingParams(max_new_tokens=2, temperature=0.5, top_k=3, top_p=0.8, seed=40 + row) for row in range(2)
    ]
    assert [(params.temperature, params.top_k, params.ignore_eos) for _, params in greedy] == [(0.0, 0, True)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 4}, r"^generate does not support num_beams=4$"),
        ({"repetition_penalty": 1.1}, r"^generate does not support repetition_penalty=1.1$"),
        ({"use_cache": "yes"}, r"^generate does not support use_cache='yes'$"),
        ({"eos_token_id": 7}, r"^generate does not support eos_token_id=7$"),
    ],
)
def test_what_generate_does_not_do_is_refused(arguments: dict[str, Any], message: str) -> None:
    pipeline = driver()
    with pytest.raises(InvalidRequestError, match=message):
        pipeline.generate(torch.tensor([[5]]), max_new_tokens=1, **arguments)
    assert not submitted(pipeline)


@pytest.mark.parametrize("eos", [None, 0, [0]])
def test_the_models_own_end_may_be_named(eos: Any) -> None:
    pipeline = driver()
    pipeline.generate(torch.tensor([[5]]), max_new_tokens=1, eos_token_id=eos)
    assert len(submitted(pipeline)) == 1


SHAPE = r"input_ids must be a tensor of shape \[batch, length\], none 0, got "


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (None, None, SHAPE + "NoneType"),
        ([[5, 6]], None, SHAPE + "list"),
        (torch.tensor([5, 6]), None, SHAPE + r"shape \[2\]"),
        (torch.zeros(1, 2, 3, dtype=torch.long), None, SHAPE + r"shape \[1, 2, 3\]"),
        (torch.zeros(0, 3, dtype=torch.long), None, SHAPE + r"shape \[0, 3\]"),
        (torch.zeros(2, 0, dtype=torch.long), None, SHAPE + r"shape \[2, 0\]"),
        (torch.zeros(1, 3), None, "input_ids must be whole numbers, got torch.float32"),
        (
            torch.tensor([[5, 6]]),
            torch.ones(1, 3),
            r"attention_mask must have the shape of input_ids, \[1, 2\], got ",
        ),
        (torch.tensor([[5], [6]]), torch.ones(1, 1), r"attention_mask must have the shape of input_ids, \[2, 1\]"),
    ],
    ids=str,
)
def test_prompts_and_masks_of_another_shape(ids: Any, mask: torch.Tensor | None, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^generate: {message}"):
        driver().generate(ids, mask, max_new_tokens=1)
    with pytest.raises(InvalidRequestError, match=f"^the pipeline driver's forward: {message}"):
        driver()(ids, mask)


def test_ranks_above_0_refuse() -> None:
    other = PipelineDriver(None, 3)
    assert not other.serves
    with pytest.raises(PipelineError, match=r"^rank 3 runs a stage; requests are served by rank 0$"):
        other.generate(torch.tensor([[5]]), max_new_tokens=1)
    other.close()


def context(directory: Path, **top: Any) -> FakeContext:
    pippy = {"kv_cache_tokens": 256, "threads_per_rank": 1}
    return FakeContext({"handler": {"model_path": str(directory)}, "pippy": pippy, **top})


def test_a_model_of_one_stage_is_called_like_the_model(checkpoints: Checkpoints) -> None:
    directory = checkpoints("gpt2", layers=4)
    pipeline = get_pipeline_driver(None, 1, context(directory))
    try:
        assert pipeline.serves
        ids = torch.tensor([[EOS_ID, 5, 6, 7], [8, 9, 10, 11]])
        mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
        logits = pipeline(ids, mask).logits
        assert logits.dtype == torch.float32
        assert torch.equal(logits[0, 0], torch.zeros(263))
        torch.testing.assert_close(logits[0, 1:], eager_logits(directory, [5, 6, 7]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits[1], eager_logits(directory, [8, 9, 10, 11]), rtol=1e-4, atol=1e-4)
        assert torch.equal(pipeline.forward(ids, attention_mask=mask).logits, logits)
        with pytest.raises(InvalidRequestError, match=r"^the pipeline driver's forward does not support labels=1$"):
            pipeline(ids, mask, labels=1)
        out = pipeline.generate(ids, mask, max_new_tokens=1, ignore_eos=True)
        assert out[:, 4].tolist() == logits[:, 3].argmax(-1).tolist()
        with pytest.raises(InvalidRequestError, match=r"^token id 263 is not in the vocabulary"):
            pipeline.generate(torch.tensor([[5], [263]]), max_new_tokens=1)
    finally:
        pipeline.close()


def test_a_model_gives_its_dtype(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(launch, "start_spawned", lambda config, *_: seen.append(config))
    directory = checkpoints("gpt2", layers=4)
    model = torch.nn.Linear(1, 1)
    model.dtype = torch.bfloat16  # type: ignore[assignment]
    get_pipeline_driver(model, 1, context(directory))
    get_pipeline_driver(None, 1, context(directory))
    configured = context(directory)
    configured.model_yaml_config["handler"]["dtype"] = "fp16"
    get_pipeline_driver(model, 1, configured)
    assert [config.handler.dtype for config in seen] == ["bfloat16", None, "fp16"]


def test_ranks_must_have_joined_before(model_dir: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^initialize_rpc_workers must have joined 2 ranks before the model is split$"
    ):
        get_pipeline_driver(None, 2, context(model_dir))


def test_a_joined_group_is_used(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = context(checkpoints("llama"))
    os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    group = ranks.Group(ranks.place_from_environment())
    monkeypatch.setattr(ranks, "join", lambda place, config: group)
    started: list[Any] = []
    monkeypatch.setattr(launch, "start_joined", lambda config, joined: started.append(joined))
    initialize_rpc_workers(1, 2, ctx)
    assert not get_pipeline_driver(None, 2, ctx).serves
    assert started == [group]
    with pytest.raises(ConfigError, match=r"^initialize_rpc_workers must have joined 3 ranks"):
        get_pipeline_driver(None, 3, ctx)


def test_a_checkpoint_without_weights_is_refused_before_ranks_join(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    monkeypatch.setattr(ranks, "join", lambda place, config: pytest.fail("joined"))
    with pytest.raises(CheckpointError, match="no weights found"):
        initialize_rpc_workers(1, 2, context(model_dir))


def test_arguments_that_contradict_the_environment(model_dir: Path) -> None:
    os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    message = r"^local_rank 0 of world_size 2 contradicts the environment, which says 1 of 2$"
    with pytest.raises(ConfigError, match=message):
        initialize_rpc_workers(0, 2, context(model_dir))


def test_a_number_of_stages_that_was_forgotten(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"^parallelLevel: is missing; with parallelType: custom it is the number of"):
        num_spawned_stages(context(model_dir, parallelType="custom"))
    assert num_spawned_stages(context(model_dir, parallelType="custom", parallelLevel=1)) == 1


def test_who_starts_the_stages(model_dir: Path) -> None:
    assert num_spawned_stages(context(model_dir)) == 1
    assert num_spawned_stages(context(model_dir, parallelLevel=3)) == 3
    os.environ["WORLD_SIZE"] = "2"
    assert num_spawned_stages(context(model_dir, parallelLevel=3)) is None


@pytest.mark.parametrize("level", [0, -1, True, "2", 1.0])
def test_a_number_of_stages_that_makes_no_sense(model_dir: Path, level: Any) -> None:
    message = rf"^parallelLevel: must be the number of stages, at least 1, got {level!r}$"
    with pytest.raises(ConfigError, match=message):
        num_spawned_stages(context(model_dir, parallelLevel=level))


def test_a_relative_model_path_is_in_the_archive(model_dir: Path) -> None:
    ctx = FakeContext({"handler": {"model_path": model_dir.name}}, model_dir=str(model_dir.parent))
    assert config_of(ctx).handler.model_path == str(model_dir)


@pytest.mark.parametrize(("row", "expected"), [([5, 5, 1, 2], [1, 2]), ([5, 1, 2], [1, 2]), ([1, 2, 5], [1, 2])])
def test_padding_of_its_own_is_no_text(row: list[int], expected: list[int]) -> None:
    ((tokens, _),) = _unpadded(torch.tensor([row]), None, {5}, is_sure=True)
    assert tokens == expected
