"""Compare decoding of one request in float32, bfloat16 and float16, and the matrix kernels it spends its time in.

    python -m scripts.lib.bench_dtypes MODEL_DIR [--stages 1] [--rounds 3]

One thread for each stage. The first table has the time between two tokens of a request that runs alone; the second the
time of one linear layer of the model's size for 1 and 32 rows, packed as stages pack it, and its speed. Needs a machine
with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from ts_pippy_handler import bench_engine, launch, packing
from ts_pippy_handler.config import load_config
from ts_pippy_handler.workload import Workload, WorkloadRequest

DTYPES = ("float32", "bfloat16", "float16")
PROMPT, NEW = 32, 64
ROWS = (1, 32)
_COPIES_BYTES = 256 << 20
"""Weights are read from memory, not from a cache: as many copies are used in turn."""


def decode_ms(model_dir: Path, dtype: str, num_stages: int) -> float:
    """Return the median time between two tokens, in milliseconds."""
    handler = {"model_path": str(model_dir), "dtype": dtype}
    config = load_config({"pippy": {"threads_per_rank": 1}, "handler": handler})
    request = WorkloadRequest(id=0, prompt_token_ids=list(range(100, 100 + PROMPT)), max_tokens=NEW)
    options = launch.SpawnOptions(log_level="WARNING")
    report = bench_engine.run(config, num_stages, Workload(file=Path("generated"), requests=[request]), options)
    assert report.inter_token_s.p50 is not None
    return 1000 * report.inter_token_s.p50


def kernel_ms(dtype: torch.dtype, rows: int, columns: int, outputs: int) -> float:
    """Return the median time of a linear layer [columns → outputs], in milliseconds."""
    num = max(2, _COPIES_BYTES // (columns * outputs * dtype.itemsize))
    inputs = torch.randn(rows, columns).to(dtype)
    kernels = packing.find_kernels(dtype, "cpu")
    weights = [torch.randn(outputs, columns).to(dtype) for _ in range(num)]
    if kernels is not None:
        weights = [kernels.pack(weight, None) for weight in weights]
    times = []
    with torch.inference_mode():
        for weight in weights:
            started = time.perf_counter()
            if kernels is None:
                torch.nn.functional.linear(inputs, weight)
            else:
                kernels.linear(inputs, [weight], [outputs], None)
            times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds = [[decode_ms(options.model, dtype, options.stages) for dtype in DTYPES] for _ in range(options.rounds)]
    print("| dtype | ms per token |")
    print("| --- | --- |")
    for dtype, times in zip(DTYPES, zip(*rounds, strict=True), strict=True):
        print(f"| {dtype} | {statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f}) |")
    torch.set_num_threads(1)
    sizes = json.loads((options.model / "config.json").read_text("utf-8"))
    columns, outputs = sizes["hidden_size"], sizes["intermediate_size"]
    print(f"\n| {columns} × {outputs} in | rows | ms | GB/s | GFLOP/s |")
    print("| --- | --- | --- | --- | --- |")
    for name in DTYPES:
        dtype = getattr(torch, name)
        for rows in ROWS:
            taken = kernel_ms(dtype, rows, columns, outputs)
            read, computed = columns * outputs * dtype.itemsize, 2 * rows * columns * outputs
            print(f"| {name} | {rows} | {taken:.3f} | {read / taken / 1e6:.1f} | {computed / taken / 1e6:.1f} |")


if __name__ == "__main__":
    main()
