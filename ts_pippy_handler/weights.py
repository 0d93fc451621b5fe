"""Read single tensors out of a Hugging Face checkpoint, so that a rank touches only what its stage uses.

Handles safetensors and PyTorch ``.bin`` files, one or many, with or without an index. Every tensor is copied out of a
memory mapping that is closed again, so resident memory grows by the stage's own tensors only; ``.bin`` files as torch
wrote them before 1.6 cannot be mapped, and one at a time is held in memory. Knows which names exist and how to find
them under another prefix; knows nothing of stages.

Sources: the safetensors and ``torch.save`` formats; the index layout of ``transformers`` sharded checkpoints.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import re
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ts_pippy_handler import weight_files
from ts_pippy_handler.errors import CheckpointError, one_line
from ts_pippy_handler.validation import show

_DAMAGE = (
    *(SafetensorError, OSError, RuntimeError, LookupError, EOFError, ValueError, pickle.UnpicklingError, struct.error),
    *(AssertionError, AttributeError, TypeError),  # a damaged pickle is a program gone astray
)
"""What reading a damaged or foreign file raises."""
_SAVE = "save the model's tensors anew, best as safetensors"
_PIECE_BYTES = 4 << 20


class Checkpoint:
    """The tensors of a checkpoint directory by name.

    Args:
        model_path: Directory of the checkpoint.
        index_filename: Index or single weight file relative to it; the usual names are tried when absent.

    Raises:
        CheckpointError: If there are no weights, or the index or a file it names is missing or unreadable.
    """

    def __init__(self, model_path: str, index_filename: str | None = None) -> None:
        self.entry = weight_files.find_entry(Path(model_path), index_filename)
        """The index, or the only weight file."""
        self.same_memory: dict[str, str] = {}
        """Tensors of ``.bin`` files that are another one's memory, by name, as tied weights are saved."""
        self._files = self._find_tensors()
        self._shapes: dict[Path, dict[str, list[int]]] = {}
        self._read: tuple[Path, dict[str, torch.Tensor]] | None = None

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._files)

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor without reading it.

        Raises:
            CheckpointError: Naming file and tensor, if the file is damaged.
        """
        file = self._files[name]
        if file not in self._shapes:  # all of a file at once: it may hold thousands, and opening it reads its header
            with self._naming(file, name):
                self._shapes[file] = _tensor_shapes(file)
        return self._shapes[file][name]

    def find(self, names: Iterable[str], prefix: str) -> str | None:
        """Return the first of ``names`` that the checkpoint has, as written or with ``prefix.`` added or removed."""
        return next(iter(self._find_all(names, prefix)), None)

    def find_equal(self, names: Iterable[str], prefix: str) -> str | None:
        """Return the first of ``names`` that the checkpoint has, as :meth:`find`, if all it has are equal.

        Raises:
            CheckpointError: If two differ: weights that the model ties, and the checkpoint does not.
        """
        found = self._find_all(names, prefix)
        for other in found[1:]:
            if not self._are_equal(found[0], other):
                raise CheckpointError(
                    f"{self._files[other].name}: {found[0]!r} and {other!r} are one weight in the model, but differ "
                    "here; if it was trained with two, set tie_word_embeddings to false in config.json"
                )
        return found[0] if found else None

    def is_stored_apart(self, name: str, other: str) -> bool:
        """Whether two tensors are stored each by itself, and so may differ."""
        return self.same_memory.get(name, name) != self.same_memory.get(other, other)

    def _find_all(self, names: Iterable[str], prefix: str) -> list[str]:
        dotted = f"{prefix}."
        found = []
        for name in names:
            candidates = (name, name.removeprefix(dotted), dotted + name)
            found += [candidate for candidate in candidates if candidate in self._files][:1]
        return list(dict.fromkeys(found))

    def _are_equal(self, name: str, other: str) -> bool:
        if not self.is_stored_apart(name, other):
            return True
        shape = self.shape(name)
        if shape != self.shape(other):
            return False
        for rows in _pieces(shape[0], torch.float32.itemsize * math.prod(shape)) if shape else [None]:
            size = [] if rows is None else [rows.stop - rows.start, *shape[1:]]
            one, two = torch.empty(size), torch.empty(size)
            self.read_into(name, one, rows)
            self.read_into(other, two, rows)
            if not torch.equal(one, two):
                return False
        return True

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Check that a tensor has the shape the model needs.

        Raises:
            CheckpointError: Naming file and tensor, if it has another, or the file is damaged.
        """
        seen = self.shape(name)
        if seen != list(shape):
            raise CheckpointError(
                f"{self._files[name].name}: tensor {name!r} has shape {seen}, the model needs {list(shape)}"
            )

    def read_into(self, name: str, target: torch.Tensor, rows: slice | None = None) -> None:
        """Copy a tensor, or some of its rows, into ``target``, converting to its dtype and device.

        The tensor's shape must have been checked.

        Raises:
            CheckpointError: Naming file and tensor, if the file is damaged.
        """
        file = self._files[name]
        with self._naming(file, name):
            if target.nbytes <= _PIECE_BYTES or target.dim() == 0:
                self._copy(file, name, target, rows)
                return
            # A large tensor in pieces: what was copied of a mapping counts as resident until the mapping is closed.
            first = 0 if rows is None else rows.start
            for piece in _pieces(target.shape[0], target.nbytes):
                self._copy(file, name, target[piece], slice(first + piece.start, first + piece.stop))

    def load(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a whole tensor as it is stored; of ``dtype``, if that is given and it holds floating-point numbers.

        Raises:
            CheckpointError: Naming file and tensor, if the file is damaged.
        """
        file = self._files[name]
        with self._naming(file, name):
            stored: torch.Tensor
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as tensors:
                    stored = tensors.get_tensor(name)
            else:
                stored = self._load_bin(file)[name].contiguous()
            if dtype is None or not stored.is_floating_point():
                return stored.clone()
            value = torch.empty(stored.shape, dtype=dtype)
            _convert(stored, value)
            return value

    @staticmethod
    @contextlib.contextmanager
    def _naming(file: Path, name: str) -> Iterator[None]:
        """Turn whatever a damaged file raises into an error that names file and tensor."""
        try:
            yield
        except _DAMAGE as error:
            raise CheckpointError(f"{file}: cannot read tensor {name!r}: {one_line(error)}") from error

    def _copy(self, file: Path, name: str, target: torch.Tensor, rows: slice | None) -> None:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                _convert(tensors.get_tensor(name) if rows is None else tensors.get_slice(name)[rows], target)
        else:
            whole = self._load_bin(file)[name]
            _convert(whole if rows is None else whole[rows], target)

    def _load_bin(self, file: Path) -> dict[str, torch.Tensor]:
        """Return the tensors of a ``.bin`` file: mapped, or if it is of the format before torch 1.6 read and kept."""
        if self._read is None or self._read[0] != file:
            self._read = None
            tensors, is_mapped = _load_bin(file)
            if is_mapped:
                return tensors
            self._read = file, tensors
        return self._read[1]

    def _find_tensors(self) -> dict[str, Path]:
        if self.entry.suffix != ".json":
            return dict.fromkeys(self._names_in(self.entry), self.entry)
        files = weight_files.read_index(self.entry)
        for file in sorted(set(files.values())):
            present = set(self._names_in(file))
            lost = [name for name, where in files.items() if where == file and name not in present]
            if lost:
                raise CheckpointError(f"{file}: tensor {show(lost[0])} is missing, although {self.entry.name} lists it")
        return files

    def _names_in(self, file: Path) -> list[str]:
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as tensors:
                    return list(tensors.keys())
            tensors = _load_bin(file)[0]
            self.same_memory |= _same_memory(tensors)
            return list(tensors)
        except _DAMAGE as error:
            reason = weight_files.what_it_is(file) or one_line(error)
            raise CheckpointError(f"{file}: unreadable or truncated: {reason}") from error


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


def _pieces(num_rows: int, num_bytes: int) -> Iterator[slice]:
    """Return the rows of a tensor in pieces of about ``_PIECE_BYTES``."""
    step = max(1, _PIECE_BYTES * num_rows // max(num_bytes, 1))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _tensor_shapes(file: Path) -> dict[str, list[int]]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as tensors:
            return {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return {name: list(tensor.shape) for name, tensor in _load_bin(file)[0].items()}


def _convert(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy values, between the dtypes of plain weights only: the numbers of a quantised weight are not its values."""
    if target.is_floating_point() and (not source.is_floating_point() or source.itemsize < 2):
        raise ValueError(f"its dtype is {source.dtype}, as of a quantised weight; wanted is a floating-point dtype")
    target.copy_(source)


def _load_bin(file: Path) -> tuple[dict[str, torch.Tensor], bool]:
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
        if (reason := weight_files.what_it_is(file)) is not None:
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
