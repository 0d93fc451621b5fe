"""Write a checkpoint anew with the weights of each stage in a file of their own, in the order they are read.

The copy is an ordinary checkpoint that transformers reads too. A rank then reads one file from beginning to end, and a
host needs no other stage's file, except the first one's for a weight that stages share. Knows no ranks.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from ts_pippy_handler import device_memory, loading, tracer
from ts_pippy_handler.config import ServingConfig
from ts_pippy_handler.errors import ConfigError
from ts_pippy_handler.graph_data import decode_stage
from ts_pippy_handler.weight_sources import needed_tensors
from ts_pippy_handler.weights import Checkpoint

_WEIGHTS = frozenset(".safetensors .bin .pt .pth .h5 .msgpack .gguf .onnx .ot".split())
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class StageFile:
    """A file that was written."""

    path: Path
    num_bytes: int
    """Of its tensors."""


def shard(
    config: ServingConfig,
    num_stages: int,
    output: Path,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> list[StageFile]:
    """Write the copy.

    Args:
        config: The checkpoint; with ``handler.dtype`` its floating-point weights are converted.
        num_stages: Files to write, one for each stage.
        output: Directory to make. It appears when it is complete, or not at all.
        progress: Called with the number of bytes of each tensor that was read.

    Returns:
        The weight files, in the order of the stages. At most one stage's weights are in memory at a time.

    Raises:
        ConfigError: If the directory is there already, or the number of stages is impossible.
        LoadError: If the checkpoint is damaged or its model cannot be split.
    """
    if output.exists():
        raise ConfigError(f"{output} exists already; name a directory that does not")
    loading.check_early(config, num_stages)
    source = Path(config.handler.model_path)
    stages = tracer.trace_stages(config, num_stages, device_memory.on_this_machine(config.pippy, num_stages))
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
        partial = Path(scratch) / "checkpoint"
        partial.mkdir()
        _copy_others(source, partial, config.handler.torch_dtype_name)
        files = _write_stages(config, stages, partial, progress)
        partial.rename(output)
    return [StageFile(path=output / file.path.name, num_bytes=file.num_bytes) for file in files]


def _copy_others(source: Path, target: Path, dtype: str | None) -> None:
    """Copy all files that hold no weights."""
    for file in source.iterdir():
        if file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
            shutil.copy2(file, target / file.name)
    if dtype is not None:
        written = json.loads((source / "config.json").read_text("utf-8"))
        written.pop("torch_dtype", None)  # its name before transformers 5
        (target / "config.json").write_text(json.dumps(written | {"dtype": dtype}, indent=2) + "\n", "utf-8")


def _write_stages(
    config: ServingConfig, stages: list[bytes], target: Path, progress: Callable[[int], object]
) -> list[StageFile]:
    checkpoint = Checkpoint(config.handler.model_path, config.handler.index_filename)
    name = config.handler.torch_dtype_name
    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    weight_map: dict[str, str] = {}
    files: list[StageFile] = []
    for number, encoded in enumerate(stages, 1):
        file = target / f"model-{number:05}-of-{len(stages):05}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for tensor_name in needed_tensors(*decode_stage(encoded), checkpoint):
            if tensor_name not in weight_map:
                tensors[tensor_name] = checkpoint.load(tensor_name, dtype)
                weight_map[tensor_name] = file.name
                progress(tensors[tensor_name].nbytes)
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(0o644)  # it makes files that nobody else may read, and TorchServe may be somebody else
        files.append(StageFile(path=file, num_bytes=sum(tensor.nbytes for tensor in tensors.values())))
    index = {"metadata": {"total_size": sum(file.num_bytes for file in files)}, "weight_map": weight_map}
    (target / _INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    return files
