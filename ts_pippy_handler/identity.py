"""What all hosts must have in common: versions, settings and the checkpoint, each as a short text to be compared.

A checkpoint is told by its config.json, and by size, beginning and samples of each weight file: reading it all would
take as long as loading it. Knows no torch and no ranks.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import ts_pippy_handler
from ts_pippy_handler.config import ServingConfig
from ts_pippy_handler.weight_files import find_entry, read_index

_PACKAGES = ("torch", "transformers")
_OWN_TO_A_HOST = {
    "pippy": {"interface", "threads_per_rank", "trace_cache"},
    "handler": {"model_path", "revision", "download"},
}
"""Settings that may differ between hosts."""
_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096
_MOST_NAMED = 6
_HEX_DIGITS = 16


def facts(config: ServingConfig) -> dict[str, str]:
    """Return what the ranks of this host load, by name.

    Raises:
        CheckpointError: If the checkpoint has no weights.
    """
    found = {"ts-pippy-handler": ts_pippy_handler.__version__}
    found |= {name: importlib.metadata.version(name).partition("+")[0] for name in _PACKAGES}
    for block, own in _OWN_TO_A_HOST.items():
        settings = getattr(config, block).model_dump(mode="json")
        found |= {f"{block}.{key}": json.dumps(value) for key, value in settings.items() if key not in own}
    directory = Path(config.handler.model_path)
    found["config.json"] = _digest(directory / "config.json")
    defaults = directory / "generation_config.json"
    found["generation_config.json"] = _digest(defaults) if defaults.is_file() else "absent"
    entry = find_entry(directory, config.handler.index_filename)
    for file in sorted(set(read_index(entry).values())) if entry.suffix == ".json" else [entry]:
        found[file.name] = _fingerprint(file)
    return found


def differences(hosts: Sequence[tuple[str, Mapping[str, str]]]) -> str | None:
    """Return in words what hosts do not have in common; None if nothing.

    Args:
        hosts: Name and facts of each. The first is what others are compared with.
    """
    (first, expected), *others = hosts
    found = []
    for host, seen in others:
        for key in [*expected, *(key for key in seen if key not in expected)]:
            ours, theirs = expected.get(key, "absent"), seen.get(key, "absent")
            if ours != theirs:
                found.append(f"{key} is {ours} on {first} and {theirs} on {host}")
    if not found:
        return None
    more = len(found) - _MOST_NAMED
    return "; ".join(found[:_MOST_NAMED]) + (f"; and {more} more differences" if more > 0 else "")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:_HEX_DIGITS]


def _fingerprint(file: Path) -> str:
    """Return size and a hash of samples spread over a file; the first holds the beginning of its header."""
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        for number in range(_NUM_SAMPLES):
            opened.seek(max(0, size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE_BYTES))
    return f"{size} bytes, {digest.hexdigest()[:_HEX_DIGITS]}"
