"""One file of tensors, safetensors or torch's ``.bin``: what its header says, and values out of a memory mapping.

Knows what such files raise when they are damaged; knows nothing of indexes or of models.

Sources: the safetensors and ``torch.save`` formats.
"""

from __future__ import annotations

import json
import pickle
import re
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ts_pippy_handler.errors import CheckpointError, one_line
from ts_pippy_handler.json_files import what_it_is
from ts_pippy_handler.validation import show

DAMAGE = (
    *(SafetensorError, OSError, RuntimeError, LookupError, EOFError, ValueError, pickle.UnpicklingError, struct.error),
    *(AssertionError, AttributeError, TypeError),  # a damaged pickle is a program gone astray
)
"""What reading a damaged or foreign file raises."""
_SAVE = "save the model's tensors anew, best as safetensors"
_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
"""Safetensors' names of the dtypes of plain weights."""


@dataclass(frozen=True)
class TensorHeader:
    """What is known of a tensor without reading it."""

    shape: list[int]
    dtype: str
    """As the file's format names it."""
    is_weight: bool
    """Whether its numbers are a weight's values: those of a quantised weight are not."""


@dataclass(frozen=True)
class FileHeader:
    """What a file holds."""

    tensors: dict[str, TensorHeader]
    same_memory: dict[str, str]
    """Tensors of a ``.bin`` file that lie where another one does, with the name of the first that lies there."""


def read_header(file: Path) -> FileHeader:
    """Return what a file holds. No values are read, but of ``.bin`` files from before torch 1.6, which have no header.

    Raises:
        CheckpointError: Naming the file, if it is damaged, cut short, or something else.
    """
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                headers = {
                    name: TensorHeader(list(each.get_shape()), each.get_dtype(), each.get_dtype() in _PLAIN)
                    for name, each in slices.items()
                }
            return FileHeader(headers, {})
        tensors = load_bin(file)[0]
        headers = {
            name: TensorHeader(list(each.shape), str(each.dtype), _is_weight(each)) for name, each in tensors.items()
        }
        return FileHeader(headers, _same_memory(tensors))
    except DAMAGE as error:
        reason = what_it_is(file) or _missing_end(file) or one_line(error)
        raise CheckpointError(f"{file}: unreadable or truncated: {reason}") from error


def _missing_end(file: Path) -> str | None:
    """Say how many bytes a safetensors file lacks or has too many; None if that is not what is wrong with it."""
    if file.suffix != ".safetensors":
        return None
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            size = file.stat().st_size
            if length > size:
                return f"its header should have {length} bytes, the whole file has {size}"
            header = json.loads(opened.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (*DAMAGE, RecursionError):
        return None
    return None if size == expected else f"it has {size} bytes, by its header it should have {expected}"


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a ``.bin`` file holds a weight's values, one after the other."""
    is_plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    return is_plain and tensor.is_floating_point() and tensor.itemsize > 1


def copy_values(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy values, between the dtypes of plain weights only: the numbers of a quantised weight are not its values.

    Raises:
        ValueError: If they are of another dtype.
    """
    if target.is_floating_point() and not _is_weight(source):
        raise ValueError(f"its dtype is {source.dtype}, as of a quantised weight; wanted is a floating-point dtype")
    target.copy_(source)


def load_bin(file: Path) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the tensors of a file, and whether they are mapped.

    Raises:
        CheckpointError: If the file holds something else.
    """
    try:
        return _tensors_in(_unpickle(file, mmap=True), file), True
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
    return _tensors_in(_unpickle(file, mmap=False), file), False  # torch.save's format before 1.6


def _unpickle(file: Path, *, mmap: bool) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a pickle is of an unusual protocol is said by what follows
            # weights_only: a pickle inside a checkpoint must not run code.
            return torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        # What torch writes before and after its reason is advice to read the file unsafely.
        if (reason := what_it_is(file)) is not None:
            raise CheckpointError(f"{file}: unreadable or truncated: {reason}") from error
        found = re.search(r"WeightsUnpickler error:\s*(.+?)(?:\. |$)", str(error), re.MULTILINE)
        raise CheckpointError(
            f"{file}: damaged, or no file of tensors that can be read safely (weights only): "
            f"{found[1][:200] if found else one_line(error)}; {_SAVE}"
        ) from error


def _tensors_in(content: object, file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of what a ``.bin`` file holds; other entries, such as a step count, are passed over."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, not tensors by name; {_SAVE}")
    tensors = _tensors_of(content)
    nested = next((key for key, value in content.items() if len(_tensors_of(value)) > len(tensors)), None)
    if nested is not None:
        raise CheckpointError(
            f"{file}: its tensors lie one level down, under {show(nested)}; save that part alone, best as safetensors"
        )
    if not tensors:
        raise CheckpointError(f"{file}: holds {len(content)} entries, none of them a tensor with a name; {_SAVE}")
    return tensors


def _tensors_of(content: object) -> dict[str, torch.Tensor]:
    items = content.items() if isinstance(content, Mapping) else ()
    return {name: value for name, value in items if isinstance(name, str) and isinstance(value, torch.Tensor)}


def _same_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the tensors that lie where another one does, with the name of the first that lies there."""
    first: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            original = first.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()), name)
            if original != name:
                found[name] = original
    return found
