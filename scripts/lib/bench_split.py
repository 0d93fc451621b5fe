"""Compare what a plan predicts of each stage's time with what the stages take.

    python scripts/lib/bench_split.py MODEL_DIR [--stages 2,3,4] [--rows 8] [--prompt 256] [--new 32] [--rounds 3]

One batch is in flight at a time, so that only one stage computes at any moment, on one thread: stages do not compete
for cores, also where there are fewer cores than stages. Prompts are of whole blocks and one token; repeated, all but
that token is found in the cache, and what is computed is decoding alone.
"""

from __future__ import annotations

import argparse
import queue
import statistics

from ts_pippy_handler import launch
from ts_pippy_handler.config import ServingConfig, load_config
from ts_pippy_handler.engine import Engine
from ts_pippy_handler.request import SamplingParams, TokenEvent


def compute_seconds(engine: Engine, prompts: list[list[int]], new: int) -> list[float]:
    """Run prompts at once and return the seconds that each stage computed."""
    engine.stats(reset=True)
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    ended: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    with engine.paused():
        for prompt in prompts:
            engine.submit(prompt, params, lambda event: ended.put(event) if event.finish_reason else None)
    for _ in prompts:
        event = ended.get()
        if event.error is not None:
            raise event.error
    return [rank.compute_s for rank in engine.stats()]


def measure(config: ServingConfig, num_stages: int, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Return seconds per stage of a pass over the prompts and of one decode step, medians over the rounds."""
    engine = launch.start_spawned(config, num_stages, launch.SpawnOptions(log_level="WARNING"))
    prefill, decode = [], []
    try:
        for number in range(options.rounds + 1):
            prompts = [
                [1000 + (7 * token + 13 * row + 31 * number) % 30000 for token in range(options.prompt + 1)]
                for row in range(options.rows)
            ]
            prefill.append(compute_seconds(engine, prompts, 1))
            decode.append([s / options.new for s in compute_seconds(engine, prompts, options.new)])
    finally:
        engine.close()
    return medians(prefill[1:]), medians(decode[1:])


def medians(rounds: list[list[float]]) -> list[float]:
    """Return each stage's median."""
    return [statistics.median(stage) for stage in zip(*rounds, strict=True)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model_dir")
    parser.add_argument("--stages", default="2,3,4")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for num_stages in map(int, options.stages.split(",")):
        pippy = {"threads_per_rank": 1, "chunks": 1}
        config = load_config({"pippy": pippy, "handler": {"model_path": options.model_dir, "dtype": "float32"}})
        prefill, decode = measure(config, num_stages, options)
        for kind, seconds in (("prefill", prefill), ("decode", decode)):
            print(
                num_stages,
                kind,
                [round(s * 1e3, 2) for s in seconds],
                [round(s / sum(seconds), 3) for s in seconds],
                flush=True,
            )


if __name__ == "__main__":
    main()
