"""Measure how tokens/s grow with the number of requests and with the length of prompts, and plot it into docs/.

    python scripts/lib/plot_scaling.py MODEL_DIR --stages 2

Every point is a run of ``ts-pippy bench`` of its own: equal requests, all submitted at once. Writes
``docs/scaling.json`` (the figures) and ``docs/scaling.svg``. Needs a quiet machine and matplotlib.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from tqdm import tqdm

DOCS = Path(__file__).parents[2] / "docs"
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
PROMPT_LENGTHS = (16, 64, 256, 1024, 4096)
PROMPT, NEW = 32, 32
"""Tokens of each request where concurrency varies."""
PROMPTS_AT_ONCE, NEW_BEHIND_PROMPT = 4, 8
"""Requests, and their new tokens, where the length of prompts varies."""


def measure(model: Path, stages: int, num: int, prompt_len: int, num_new: int) -> dict[str, Any]:
    """Run ``num`` equal requests at once and return the bench's figures."""
    draw = random.Random(prompt_len)
    prompts = [[draw.randrange(100, 1000) for _ in range(prompt_len)] for _ in range(num)]
    requests = [{"prompt_token_ids": prompt, "max_tokens": num_new} for prompt in prompts]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as work:
        json.dump({"requests": requests}, work)
        work.flush()
        command = [sys.executable, "-m", "ts_pippy_handler.cli", "bench", model, "--stages", stages, "--json"]
        command += ["--dtype", "float32", "--workload", work.name]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure, write the figures, plot them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each point; the median counts")
    options = parser.parse_args()
    by_concurrency: dict[int, list[float]] = {num: [] for num in CONCURRENCIES}
    by_length: dict[int, list[float]] = {length: [] for length in PROMPT_LENGTHS}
    with tqdm(total=options.repeat * (len(CONCURRENCIES) + len(PROMPT_LENGTHS)), desc="points") as bar:
        for _ in range(options.repeat):  # interleaved: a busy moment hits one run of many points
            for num in CONCURRENCIES:
                found = measure(options.model, options.stages, num, PROMPT, NEW)
                by_concurrency[num].append(found["output_tokens_per_s"])
                bar.update()
            for length in PROMPT_LENGTHS:
                found = measure(options.model, options.stages, PROMPTS_AT_ONCE, length, NEW_BEHIND_PROMPT)
                by_length[length].append(found["total_tokens_per_s"])
                bar.update()
    figures = {
        "model": options.model.name,
        "stages": options.stages,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, one thread per stage",
        "output_tokens_per_s_by_concurrency": {num: sorted(each) for num, each in by_concurrency.items()},
        "total_tokens_per_s_by_prompt_length": {length: sorted(each) for length, each in by_length.items()},
    }
    (DOCS / "scaling.json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    plot(by_concurrency, by_length, f"{figures['model']}, {options.stages} stages, {figures['machine']}")


def plot(by_concurrency: dict[int, list[float]], by_length: dict[int, list[float]], title: str) -> None:
    """Draw both curves, the median of each point with its range."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    panels = (
        (left, by_concurrency, f"requests at once ({PROMPT} prompt and {NEW} new tokens each)", "output tokens/s"),
        (right, by_length, f"prompt tokens ({PROMPTS_AT_ONCE} requests at once)", "prompt and output tokens/s"),
    )
    for axes, points, x_label, y_label in panels:
        medians = [sorted(each)[len(each) // 2] for each in points.values()]
        axes.plot(list(points), medians, marker="o")
        axes.fill_between(
            list(points), [min(each) for each in points.values()], [max(each) for each in points.values()], alpha=0.2
        )
        axes.set(xscale="log", xlabel=x_label, ylabel=y_label, ylim=(0, None))
        axes.set_xticks(list(points), map(str, points))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.savefig(DOCS / "scaling.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
