"""Compare generation over pipeline stages with transformers' own, on the same batch.

    python scripts/lib/bench_generate.py MODEL_DIR [--stages 2] [--rounds 3] [--sizes 4x20,16x200]

Each round measures both, one after the other, in processes of their own; medians are printed. Ours runs one compute
thread per stage, transformers as many threads as there are stages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

PROMPT_TOKENS = 50


def prompts(batch: int) -> list[list[int]]:
    """Return distinct prompts of equal length, so that neither side has to pad."""
    return [list(range(100 + row, 100 + row + PROMPT_TOKENS)) for row in range(batch)]


def transformers_rate(model_dir: str, batch: int, new: int, threads: int) -> float:
    """Return tokens per second of ``generate`` with its cache, after a warm-up."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    ids = torch.tensor(prompts(batch))
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    model.generate(ids, max_new_tokens=4, **options)
    started = time.perf_counter()
    model.generate(ids, max_new_tokens=new, **options)
    return batch * new / (time.perf_counter() - started)


def pipeline_rate(model_dir: str, batch: int, new: int, stages: int) -> float:
    """Return tokens per second of the engine, after a warm-up."""
    from ts_pippy_handler import launch
    from ts_pippy_handler.config import load_config
    from ts_pippy_handler.generator import Generator, Prompt, Wishes

    handler = {"model_path": model_dir, "dtype": "float32"}
    config = load_config({"pippy": {"threads_per_rank": 1}, "handler": handler})
    engine = launch.start_spawned(config, stages, launch.SpawnOptions(log_level="WARNING"))
    try:
        generator = Generator(engine, None, config.handler)
        for count in (4, new):
            wishes = Wishes(max_new_tokens=count, ignore_eos=True)
            started = time.perf_counter()
            completions = generator.submit_all([Prompt(token_ids=row) for row in prompts(batch)], wishes)
            for completion in completions:
                completion.done.wait()
            rate = batch * count / (time.perf_counter() - started)
    finally:
        engine.close()
    return rate


def measure(side: str, options: argparse.Namespace, batch: int, new: int) -> float:
    """Measure one side once in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, options.model_dir, "--stages", str(options.stages)]
    command += ["--side", side, "--sizes", f"{batch}x{new}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model_dir")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="4x20,16x200", help="batch x new tokens, separated by commas")
    parser.add_argument("--side", choices=["ours", "transformers"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    for size in options.sizes.split(","):
        batch, new = (int(part) for part in size.split("x"))
        if options.side:
            rate = pipeline_rate if options.side == "ours" else transformers_rate
            print(json.dumps(rate(options.model_dir, batch, new, options.stages)))
            continue
        rounds = [
            [measure(side, options, batch, new) for side in ("ours", "transformers")] for _ in range(options.rounds)
        ]
        ours, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {batch} | {new} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
