"""Compare the share of time that ``ts-pippy plan`` predicts for each stage with what the stages take.

    python -m scripts.lib.bench_split MODEL_DIR [--stages 2,3,4] [--wide-stages 2,3]

Prints a row for each stage of MODEL_DIR, and of a random model whose vocabulary is much larger than its layers. The
work is what the prediction assumes: as many requests at a time, two prompt tokens for each new one, contexts of the
same length on average. Each stage has one thread, and one batch is in flight, so that one stage computes at a time and
nothing but the stages is compared. Needs a machine with nothing else to do, and the development requirements.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.models import tiny_checkpoint
from ts_pippy_handler import bench_engine, launch, plan
from ts_pippy_handler.config import load_config
from ts_pippy_handler.step_time import MIX
from ts_pippy_handler.workload import Workload, WorkloadRequest

NEW = round(MIX.context_len / (MIX.prompt_rows / MIX.answer_rows + 0.5))
PROMPT = NEW * MIX.prompt_rows // MIX.answer_rows
"""Tokens of each request, in the proportion of the mix and with its context on average."""


@dataclass(frozen=True)
class Share:
    """Of one stage, in the time of all."""

    layers: str
    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """Relative to what was measured."""
        return self.predicted / self.measured - 1


def wide_model(directory: Path) -> Path:
    """Write a random llama whose head is as large as ten of its sixteen layers."""
    sizes = {"vocab_size": 32_000, "hidden_size": 256, "intermediate_size": 768}
    return tiny_checkpoint(directory, "llama", layers=16, std=0.05, shard_bytes=None, tokenizer=False, config=sizes)


def workload(num_requests: int) -> Workload:
    """Return requests of random tokens, all different, in the proportions of the predicted mix."""
    draw = random.Random(0)
    prompts = [[draw.randrange(100, 1000) for _ in range(PROMPT)] for _ in range(num_requests)]
    requests = [WorkloadRequest(id=i, prompt_token_ids=prompt, max_tokens=NEW) for i, prompt in enumerate(prompts)]
    return Workload(file=Path("generated"), requests=requests)


def shares(model_dir: Path, num_stages: int, num_requests: int) -> Iterator[Share]:
    """Predict and measure one split of a model."""
    pippy = {"chunks": 1, "threads_per_rank": 1}
    config = load_config({"pippy": pippy, "handler": {"model_path": str(model_dir), "dtype": "float32"}})
    planned = plan.make_plan(config, num_stages)
    options = launch.SpawnOptions(log_level="WARNING")
    report = bench_engine.run(config, num_stages, workload(num_requests), options, concurrency=MIX.answer_rows)
    assert report.stages is not None
    total = sum(stage.compute_s for stage in report.stages)
    for stage, figures in zip(planned.stages, report.stages, strict=True):
        layers = f"{stage.first_layer}-{stage.first_layer + stage.num_layers - 1}"
        yield Share(layers, stage.time_share, figures.compute_s / total)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--stages", type=_numbers, default=[2, 3, 4], metavar="N,N,…")
    parser.add_argument("--wide-stages", type=_numbers, default=[2, 3], metavar="N,N,…")
    parser.add_argument("--requests", type=int, default=40)
    options = parser.parse_args()
    print("| model | stages | layers | predicted | measured | difference |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as directory:
        wide = wide_model(Path(directory) / "wide")
        for model, counts in ((options.model, options.stages), (wide, options.wide_stages)):
            for count in counts:
                for share in shares(model, count, options.requests):
                    figures = f"{share.predicted:.1%} | {share.measured:.1%} | {share.difference:+.1%}"
                    print(f"| {model.name} | {count} | {share.layers} | {figures} |", flush=True)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


if __name__ == "__main__":
    main()
