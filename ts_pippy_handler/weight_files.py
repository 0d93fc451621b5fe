"""Which files of a checkpoint directory hold its weights, in the order transformers looks for them.

Knows the usual names, the index of sharded checkpoints, and what is often found in the place of a weight file; opens no
weight file as one.
"""

from __future__ import annotations

from pathlib import Path, PurePath

from ts_pippy_handler.config import written_config
from ts_pippy_handler.errors import CheckpointError, one_line
from ts_pippy_handler.json_files import read_object
from ts_pippy_handler.validation import show

_USUAL_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_OTHERS = ("adapter_", "consolidated", ".")
"""Beginnings of the names of ``.safetensors`` files that are no weights of transformers' model."""
_UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".aria2", ".download", ".tmp")
"""How programs that fetch files name those that they are not done with."""


def find_entry(directory: Path, index_filename: str | None) -> Path:
    """Return the index, or the only weight file.

    Args:
        directory: Of the checkpoint.
        index_filename: The file, relative to it; the usual names are tried when absent.

    Raises:
        CheckpointError: If there is none.
    """
    if index_filename is not None:
        path = directory / index_filename
        if not path.is_file():
            raise CheckpointError(f"handler.index_filename: {index_filename!r} is not in {directory}")
        return path
    if (directory / "config.json").is_file() and (named := written_config(str(directory)).get("transformers_weights")):
        if not isinstance(named, str) or ".." in PurePath(named).parts or not (directory / named).is_file():
            raise CheckpointError(f"{directory}/config.json: transformers_weights: {show(named)} is no file beside it")
        return directory / named
    try:
        for name in _USUAL_FILES:
            if (directory / name).is_file():
                return directory / name
        files = [file for file in directory.iterdir() if file.is_file()]
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be listed: {one_line(error)}") from error
    candidates = [file for file in files if file.suffix == ".safetensors" and not file.name.startswith(_OTHERS)]
    if len(candidates) == 1:
        return candidates[0]
    raise CheckpointError(
        f"{directory}: no weights found; looked for {', '.join(_USUAL_FILES)}{_what_is_there(candidates, files)}"
    )


def _what_is_there(candidates: list[Path], files: list[Path]) -> str:
    names = {file.name for file in files}
    shards = sorted({*(file.name for file in candidates), *(name for name in names if "-of-" in name)})
    if shards:
        return f"; {len(shards)} files such as {shards[0]} are there, but no index that says what they hold"
    if "adapter_config.json" in names:
        return "; an adapter is there (adapter_config.json): merge it into its base model, and save that"
    if unfinished := sorted(name for name in names if name.endswith(_UNFINISHED)):
        return f"; {unfinished[0]} is there, a download that has not finished"
    if any(name.endswith(".gguf") for name in names):
        return "; a GGUF file is there, which is another format"
    return ""


def read_index(index: Path) -> dict[str, Path]:
    """Return the file that holds each tensor, of which all are there.

    Raises:
        CheckpointError: If the index is damaged or leads to a file that is not there or lies elsewhere.
    """
    written = read_object(index)
    weight_map = written.get("weight_map")
    if not isinstance(weight_map, dict):
        seen = f"it is {show(weight_map)}" if "weight_map" in written else "its keys are " + show(list(written))
        raise CheckpointError(f"{index}: not a checkpoint index with a 'weight_map': {seen}")
    if not weight_map:
        raise CheckpointError(f"{index}: its 'weight_map' names no tensors")
    for name, place in weight_map.items():
        if not isinstance(place, str) or not place:
            raise CheckpointError(f"{index}: says that tensor {show(name)} is in {show(place)}, which names no file")
        # As written: the hub's cache holds links to files that lie elsewhere.
        if PurePath(place).is_absolute() or ".." in PurePath(place).parts:
            raise CheckpointError(
                f"{index}: says that tensor {show(name)} is in {show(place)}, outside the checkpoint's directory"
            )
    files = {str(name): index.parent / place for name, place in weight_map.items()}
    for file in sorted(set(files.values())):
        if not file.is_file():
            raise CheckpointError(f"{file}: missing, although {index.name} says it holds tensors")
    return files
