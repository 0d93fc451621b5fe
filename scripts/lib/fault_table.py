"""Break every rank in every way and moment under a real TorchServe, and write docs/fault_table.md.

    python -m scripts.lib.fault_table [--seconds 480] [--launch torchrun|spawn]

About an hour on two cores. Stops after ``--seconds`` and goes on from docs/fault_table.json when it is called again;
delete that file to measure anew. Needs the development requirements and Java.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.breaking import FAULTS, HEARTBEAT_TIMEOUT_S, MOMENTS, STAGES, STEP_TIMEOUT_S, Breakable
from tests.models import Checkpoints
from tests.packages import Launch, Packages

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "fault_table.json"
LAUNCHES: tuple[Launch, ...] = ("torchrun", "spawn")
_PER_SERVER = 5
"""Spawn mode starts its ranks anew five times in five minutes, and then gives up."""
PLACES = {0: "0", 1: "1, middle", STAGES - 1: f"{STAGES - 1}, last"}

HEAD = f"""\
# Faults, measured

Written by `python -m scripts.lib.fault_table`: a real TorchServe on one host, a tiny llama over {STAGES} ranks,
`pippy.heartbeat_timeout` {HEARTBEAT_TIMEOUT_S:g} s, `pippy.step_timeout` {STEP_TIMEOUT_S:g} s, and one fault at a time:

- **SIGKILL** is also what the kernel's out-of-memory killer sends; **SIGSTOP** is never continued.
- **exception in step** is a Python exception in a stage; **out of memory** is torch's, of an allocation in a stage;
  **stuck step** never returns. At idle they come with the next request.
- **connections closed** shuts all TCP connections of the rank down; **connections silent** has the kernel drop whatever
  arrives on them, and nobody is told.

**error** is the time from the fault until the request that ran had ended, and how: with a status, by a *cut*
connection, or *finished* with the right tokens after the ranks were started anew. At idle it is the time until
`v1/health` no longer said ready. **back** is the time from the fault until a new request had its right answer.
Orphans are processes of the ranks before that remain; wrong are answers with other tokens than `transformers` gives.

"""
NOTE = """
When rank 0 of spawn mode is gone, TorchServe 0.12 never answers the requests that ran; the client of this measurement
gave up after 25 s. Such a request is also what the frontend waits for when rank 0 is back.
"""


def keys(launches: Sequence[str]) -> list[tuple[str, str, int, str]]:
    """Return every cell's launch mode, fault, rank and moment."""
    return list(itertools.product(launches, FAULTS, PLACES, MOMENTS))


def kept() -> dict[str, dict[str, object]]:
    """Return what was measured before."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def measure(launch: Launch, results: dict[str, dict[str, object]], deadline: float) -> None:
    """Add what is missing of a launch mode to the results, until the deadline."""
    missing = [key for key in keys([launch]) if "/".join(map(str, key)) not in results]
    missing.sort(key=lambda key: MOMENTS.index(key[3]), reverse=True)  # a streak of one moment tells the most
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Checkpoints(Path(folder))("llama")
        packages = Packages(Path(folder))
        for start in range(0, len(missing), _PER_SERVER):
            server = Path(folder) / f"server{start}"
            server.mkdir()
            with Breakable(packages, model, launch, server) as breakable:
                for key in missing[start : start + _PER_SERVER]:
                    if time.monotonic() > deadline:
                        return
                    _, fault, rank, moment = key
                    cell = breakable.measure(fault, rank, moment)
                    name = "/".join(map(str, key))
                    print(name, cell, flush=True)
                    results |= kept()  # the other launch mode may be measured at the same time
                    results[name] = asdict(cell)
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def table(results: dict[str, dict[str, object]]) -> str:
    """Return the results as Markdown."""
    lines = []
    for launch in LAUNCHES:
        lines += [f"## {launch}", "", "| fault | rank | moment | error | back | orphans | wrong |", "|" + " --- |" * 7]
        for key in keys([launch]):
            _, fault, rank, moment = key
            cell = results.get("/".join(map(str, key)))
            if cell is not None:
                shown = f"{cell['error_s']} s, {cell['outcome']} | {cell['recovery_s']} s | {cell['orphans']}"
                lines.append(f"| {fault} | {PLACES[rank]} | {moment} | {shown} | {cell['wrong']} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--launch", choices=LAUNCHES, action="append")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    results = kept()
    for launch in arguments.launch or LAUNCHES:
        measure(launch, results, deadline)
        (DOCS / "fault_table.md").write_text(HEAD + table(kept()) + NOTE.lstrip("\n"))


if __name__ == "__main__":
    main()
