"""A workload through an engine: all of it is submitted, counted and told, and the ranks are stopped in any case."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fakes import FakeEngine, continuation
from ts_pippy_handler import bench_engine, launch
from ts_pippy_handler.config import load_config
from ts_pippy_handler.errors import ConfigError, InvalidRequestError, PipelineError
from ts_pippy_handler.request import FinishReason, SamplingParams, TokenEvent
from ts_pippy_handler.workload import Workload, WorkloadRequest

PROMPTS = [[5, 6], [7], [8, 9, 10], [11]]
WORKLOAD = Workload(
    file=Path("w.json"),
    requests=[WorkloadRequest(id=f"r{i}", prompt_token_ids=p, max_tokens=2 + i) for i, p in enumerate(PROMPTS)],
)
EXPECTED = [continuation(p, SamplingParams(max_new_tokens=2 + i), eos=())[0] for i, p in enumerate(PROMPTS)]


class BenchEngine(FakeEngine):
    """Answers a request when as many run as were promised, or when told that no more will come."""

    is_running = True
    failure: PipelineError | None = None

    def __init__(self, num_running: int) -> None:
        super().__init__()
        self.num_running = num_running
        self.most_running = 0
        self.is_closed = False
        self.refused: int | None = None

    def check(self, prompt_token_ids: Any, params: SamplingParams) -> None:
        if self.refused in prompt_token_ids:
            raise InvalidRequestError("does not fit")

    def submit(self, *arguments: Any) -> int:
        number = super().submit(*arguments)
        self.most_running = max(self.most_running, len(self._pending))
        left = len(PROMPTS) - len(self.submitted)
        while len(self._pending) >= self.num_running or (not left and self._pending):
            self.answer_oldest()
        return number

    def close(self) -> None:
        self.is_closed = True


def run(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, engine: BenchEngine, workload: Workload = WORKLOAD, **others: Any
) -> Any:
    started: list[Any] = []

    def start(config: Any, num_stages: int, options: Any) -> BenchEngine:
        started.append(config)
        return engine

    monkeypatch.setattr(launch, "start_spawned", start)
    config = load_config({"handler": {"model_path": str(model_dir)}, "pippy": {"max_waiting_requests": 1}})
    report = bench_engine.run(config, 1, workload, launch.SpawnOptions(), **others)
    assert started[0].pippy.max_waiting_requests == 4, "all may wait"
    return report


@pytest.mark.parametrize("concurrency", [None, 2])
def test_tokens_are_counted_and_saved(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, tmp_path: Path, concurrency: int | None
) -> None:
    engine = BenchEngine(concurrency or 4)
    file = tmp_path / "outputs.json"
    report = run(monkeypatch, model_dir, engine, concurrency=concurrency, outputs=file)
    assert (report.num_requests, report.prompt_tokens, report.output_tokens, report.num_short) == (4, 7, 14, 0)
    assert engine.submitted == [
        (prompt, SamplingParams(max_new_tokens=2 + i, ignore_eos=True)) for i, prompt in enumerate(PROMPTS)
    ]
    assert engine.most_running == (concurrency or 4)
    assert engine.is_closed
    assert json.loads(file.read_text()) == {f"r{i}": tokens for i, tokens in enumerate(EXPECTED)}
    assert report.load_s >= 0
    assert [stage.stage for stage in report.stages] == [0]


def test_a_request_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    engine = BenchEngine(4)
    engine.refused = 10
    with pytest.raises(InvalidRequestError, match=r"^w.json: requests\[2\]: does not fit$"):
        run(monkeypatch, model_dir, engine)
    assert not engine.submitted
    assert engine.is_closed


def test_a_pipeline_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    class Failing(BenchEngine):
        def submit(self, prompt: Any, params: Any, on_event: Any) -> int:
            error = PipelineError("a rank is gone")
            on_event(TokenEvent(token_id=None, finish_reason=FinishReason.ERROR, error=error))
            return 0

    engine = Failing(4)
    with pytest.raises(PipelineError, match=r"^a rank is gone$"):
        run(monkeypatch, model_dir, engine)
    assert engine.is_closed


def test_an_engine_that_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    engine = BenchEngine(1000)
    engine.submit = lambda *arguments: 0  # type: ignore[method-assign]
    engine.is_running = False
    with pytest.raises(PipelineError, match=r"^the engine stopped$"):
        run(monkeypatch, model_dir, engine)


def test_a_wrong_place_for_outputs_is_known_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "start_spawned", lambda *arguments: sys.exit("started"))
    with pytest.raises(ConfigError, match=r"^--save-outputs .*/no/such: No such file or directory$"):
        run(monkeypatch, model_dir, BenchEngine(4), outputs=tmp_path / "no" / "such")
