"""Traced stages kept on disk, so that a model that was served before starts without being traced again.

A file is named by everything its contents follow from: config.json, the names of the checkpoint's tensors, dtype, split
and number of stages, the versions of the packages that trace, and the source files of this package and of
transformers. Nothing is ever read back under another name, and a file that is damaged counts as absent. Files hold
plain data, no pickles. Knows no torch and no ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
from platformdirs import user_cache_path

from ts_pippy_handler.config import ServingConfig, written_config

logger = logging.getLogger(__name__)

_PACKAGES = ("torch", "transformers", "accelerate", "torchpippy")
_MAX_FILES = 64
_DIGEST_BYTES = hashlib.sha256().digest_size


class TraceCache:
    """The traces of one configuration and number of stages.

    Args:
        config: The checked configuration. With ``pippy.trace_cache`` off, or with remote code, which may be anything,
            nothing is kept.
        num_stages: Number of stages; 0 for what is kept of the whole model, the costs of its layers.
        tensor_names: Names in the checkpoint; which tensors become a parameter follows from them.
        same_memory: Those that are another one's memory; which weights are tied follows from them.
    """

    def __init__(
        self,
        config: ServingConfig,
        num_stages: int,
        tensor_names: Sequence[str] = (),
        same_memory: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._file: Path | None = None
        if config.pippy.trace_cache and not config.handler.trust_remote_code:
            name = _name(config, num_stages, tensor_names, same_memory)
            self._file = user_cache_path("ts_pippy_handler") / "traces" / f"{name}.trace"

    def load(self) -> list[bytes] | None:
        """Return the stages, as :func:`ts_pippy_handler.graph_data.decode_stage` reads them; None if none are kept."""
        if self._file is None:
            return None
        try:
            content = self._file.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):  # a read-only cache serves as well
            self._file.touch()  # the least recently used are forgotten first
        digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if not body or hashlib.sha256(body).digest() != digest:
            return None
        return msgspec.msgpack.decode(body, type=list[bytes])

    def store(self, stages: list[bytes]) -> None:
        """Keep the stages; a disk that cannot be written to is no error."""
        if self._file is None:
            return
        body = msgspec.msgpack.encode(stages)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._file.parent) as folder:
                draft = Path(folder) / "draft"
                draft.write_bytes(hashlib.sha256(body).digest() + body)
                draft.replace(self._file)  # whole or not at all, also with several processes
            _forget_oldest(self._file.parent)
        except OSError as error:
            logger.info("the trace is not kept: %s", error)


def _name(config: ServingConfig, num_stages: int, tensor_names: Sequence[str], same_memory: Mapping[str, str]) -> str:
    parts = {
        "config": written_config(config.handler.model_path),
        "dtype": config.handler.torch_dtype_name,
        "split": config.pippy.split if num_stages else None,
        "num_stages": num_stages,
        "tensors": sorted(tensor_names),
        "same_memory": sorted(same_memory.items()),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "sources": sorted(_sources()),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _sources() -> Iterator[tuple[str, int, int]]:
    """Return path, size and time of change (ns) of the source files that a trace may follow from."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    transformers = Path(spec.origin).parent
    models = [Path(entry) for entry in os.scandir(transformers / "models") if entry.is_dir()]
    for folder in (Path(__file__).parent, transformers, transformers / "integrations", *models):
        for entry in os.scandir(folder):
            if entry.name.endswith(".py"):
                stat = entry.stat()
                yield entry.path, stat.st_size, stat.st_mtime_ns


def _forget_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.trace"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[_MAX_FILES:]:
        file.unlink(missing_ok=True)
