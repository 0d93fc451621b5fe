"""Compare tokens/s through TorchServe and HTTP with the engine's own, and with another server's, on one workload.

    python -m scripts.lib.bench_http MODEL_DIR --workload requests.json [--stages 2] [--concurrency 16] [--rounds 3]
        [--other 'COMMAND' --other-url http://127.0.0.1:8000/v1 --other-model NAME]

In each round the engine, TorchServe in each launch mode, and the other server (started by COMMAND, ended by SIGTERM)
are measured one after the other by ``ts-pippy bench``; each server is gone before the next one starts. Prints one line
per run, then the medians. Needs the development requirements and a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.packages import Launch, Packages
from tests.torchserve import BIN, TorchServe

MODES: tuple[Launch, ...] = ("torchrun", "spawn")
_START_S = 600.0
_FIGURES = ("output_tokens_per_s", "ttft_s", "inter_token_s")


def bench(options: argparse.Namespace, *arguments: object) -> dict[str, Any]:
    """Run ``ts-pippy bench`` and return its figures."""
    command = [BIN / "ts-pippy", "bench", "--workload", options.workload, "--concurrency", options.concurrency]
    command += ["--json", *arguments]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, timeout=1200, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    assert not report["num_short"], report
    return report


def through_torchserve(options: argparse.Namespace, launch: Launch) -> dict[str, Any]:
    """Package and serve the model, and measure its OpenAI path."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "server").mkdir()
        packages = Packages(Path(folder))
        name = packages(options.model, options.stages, launch)
        with TorchServe(packages.store, Path(folder) / "server", [f"{name}.mar"], token_auth=False) as server:
            server.wait_ready(name, _START_S)
            url = f"http://127.0.0.1:{server.ports['inference']}/predictions/{name}/1.0/v1"
            return bench(options, "--url", url, "--model", name)


def through_other(options: argparse.Namespace) -> dict[str, Any]:
    """Start the other server, wait until it lists its models, measure and end it."""
    process = subprocess.Popen(shlex.split(options.other), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_S
        while not _answers(f"{options.other_url}/models"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the other server did not start: {options.other}")
            time.sleep(2)
        return bench(options, "--url", options.other_url, "--model", options.other_model)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def main() -> None:
    """Measure in turn and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other", help="command that starts another server in the foreground")
    parser.add_argument("--other-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--other-model", default="model")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(options.rounds):
        runs = {"engine": lambda: bench(options, options.model, "--stages", options.stages, "--dtype", "float32")}
        runs |= {launch: lambda launch=launch: through_torchserve(options, launch) for launch in MODES}
        if options.other:
            runs["other"] = lambda: through_other(options)
        for name, run in runs.items():
            report = run()
            found[name].append(report)
            print(name, {figure: report[figure] for figure in _FIGURES}, flush=True)
    for name, reports in found.items():
        rate = statistics.median(report["output_tokens_per_s"] for report in reports)
        first = statistics.median(report["ttft_s"]["p50"] for report in reports)
        between = statistics.median(report["inter_token_s"]["p95"] for report in reports)
        print(f"{name:10} {rate:7.1f} tokens/s   TTFT p50 {first:.2f} s   inter-token p95 {between * 1000:.0f} ms")


if __name__ == "__main__":
    main()
