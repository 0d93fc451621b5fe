"""Try every causal architecture of transformers, and write docs/architectures.md.

    python -m scripts.lib.architecture_table [NAME]...     # names given: only print what becomes of them

Takes about twenty minutes. Needs the development requirements.
"""

from __future__ import annotations

import argparse
import tempfile
import textwrap
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from tests.architectures import LAYERS, NEW_TOKENS, VARIANTS, Verdict, all_names, judge

REPO = Path(__file__).parents[2]

HEAD = """\
# Architectures

What becomes of each model type that transformers {version} maps to a causal language model: written by
`python -m scripts.lib.architecture_table`, checked by
`scripts/test tests/integration/test_architectures.py --slow also --walk`.

- **exact**: a tiny random model of {layers} layers gave the tokens of `generate`, for three prompts of unequal length
  in one batch, {new} new tokens each, with the cache, in float32, over 1, 2, 3 and 4 stages.
- **refused**: it does not load, and says why, before weights are read.
- **no reference**: transformers itself could not build, save or run it offline with a tiny configuration, so nothing
  was compared. It may work.

{counts}

| architecture | | why |
| --- | --- | --- |
"""


def table(verdicts: list[Verdict]) -> str:
    """Return the page."""
    named = [verdict for verdict in verdicts if verdict.name not in VARIANTS]
    counts = {status: sum(each.status == status for each in named) for status in ("exact", "refused", "no reference")}
    told = "Of {} model types {} are exact, {} refused, and {} without a reference.".format(
        len(named), *counts.values()
    )
    rows = [
        f"| `{each.name}` | {each.status} | {textwrap.shorten(each.detail.replace('|', '/'), 120, placeholder=' …')} |"
        for each in verdicts
    ]
    head = HEAD.format(version=transformers.__version__, layers=LAYERS, new=NEW_TOKENS, counts=told)
    return head + "\n".join(rows) + "\n"


def main() -> None:
    """Judge, print what is wrong, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    verdicts = []
    for name in tqdm(options.names or all_names(), disable=None):
        with tempfile.TemporaryDirectory() as directory:
            verdicts.append(judge(name, Path(directory)))
        if options.names or verdicts[-1].status in ("wrong", "broken"):
            tqdm.write(f"{name}: {verdicts[-1].status} {verdicts[-1].detail}")
    if not options.names:
        (REPO / "docs" / "architectures.md").write_text(table(verdicts), "utf-8")


if __name__ == "__main__":
    main()
