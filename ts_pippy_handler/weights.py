"""Read single tensors out of a Hugging Face checkpoint, so that a rank touches only what its stage uses.

Handles safetensors and PyTorch ``.bin`` files, one or many, with or without an index. Every tensor is copied out of a
memory mapping that is closed again, so resident memory grows by the stage's own tensors only; ``.bin`` files as torch
wrote them before 1.6 cannot be mapped, and one at a time is held in memory. Knows which names exist and how to find
them under another prefix; knows nothing of stages.

Source: the index layout of ``transformers`` sharded checkpoints.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from ts_pippy_handler import tensor_files, weight_files
from ts_pippy_handler.errors import CheckpointError, one_line
from ts_pippy_handler.tensor_files import DAMAGE, TensorHeader, copy_values, read_header

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
        self._listed = weight_files.read_index(self.entry) if self.entry.suffix == ".json" else {}
        self._files: dict[str, Path] = {}
        self._headers: dict[str, TensorHeader] = {}
        # As transformers: what the files hold counts, whatever the index says of it, and the last file that holds it.
        for file in sorted(set(self._listed.values()), key=str) or [self.entry]:
            header = read_header(file)
            self._files |= dict.fromkeys(header.tensors, file)
            self._headers |= header.tensors
            self.same_memory |= header.same_memory
        self._read: tuple[Path, dict[str, torch.Tensor]] | None = None

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._files)

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor without reading it."""
        return self._headers[name].shape

    def where_missing(self, names: Iterable[str], prefix: str) -> str:
        """Return what an error about a weight that :meth:`find` does not find says: which file should hold it.

        Args:
            names: Of the weight.
            prefix: As for :meth:`find`.
        """
        names = list(names)
        listed = next(iter(self._find_all(names, prefix, self._listed)), None)
        if listed is not None:
            return f"{self._listed[listed]}: tensor {listed!r} is missing, although {self.entry.name} lists it"
        # Training tools put a prefix before all names.
        near = next((each for each in self.names for name in names if each.endswith(f".{name}")), None)
        if near is None:
            return f"{self.entry}: holds no tensor {names[0]!r}, which the model needs"
        surplus = next(near.removesuffix(name) for name in names if near.endswith(f".{name}"))
        return (
            f"{self.entry}: holds no tensor {names[0]!r}, which the model needs; there is {near!r}: save the weights "
            f"with names that lack {surplus!r}"
        )

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

    def _find_all(self, names: Iterable[str], prefix: str, there: Collection[str] | None = None) -> list[str]:
        there = self._files if there is None else there
        dotted = f"{prefix}."
        found = []
        for name in names:
            candidates = (name, name.removeprefix(dotted), dotted + name)
            found += [candidate for candidate in candidates if candidate in there][:1]
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

    def check(self, name: str, shape: Sequence[int], *, is_weight: bool = True) -> None:
        """Check by its header that a tensor is what the model needs.

        Args:
            name: Of the tensor.
            shape: That it must have.
            is_weight: Whether its values must be those of a weight, not the numbers of a quantised one.

        Raises:
            CheckpointError: Naming file and tensor, if it is not.
        """
        seen = self._headers[name]
        if seen.shape != list(shape):
            raise CheckpointError(
                f"{self._files[name]}: tensor {name!r} has shape {seen.shape}, the model needs {list(shape)}"
            )
        if is_weight:
            self.check_dtype(name)

    def check_dtype(self, name: str) -> None:
        """Check by its header that a tensor's values are those of a weight.

        Raises:
            CheckpointError: Naming file and tensor, if they are not.
        """
        if not self._headers[name].is_weight:
            raise CheckpointError(
                f"{self._files[name]}: tensor {name!r} is of dtype {self._headers[name].dtype}, as of a quantised "
                "weight; only weights stored as floating-point numbers of at least 16 bits can be served"
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
            copy_values(stored, value)
            return value

    @staticmethod
    @contextlib.contextmanager
    def _naming(file: Path, name: str) -> Iterator[None]:
        """Turn whatever a damaged file raises into an error that names file and tensor."""
        try:
            yield
        except DAMAGE as error:
            raise CheckpointError(f"{file}: cannot read tensor {name!r}: {one_line(error)}") from error

    def _copy(self, file: Path, name: str, target: torch.Tensor, rows: slice | None) -> None:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                copy_values(tensors.get_tensor(name) if rows is None else tensors.get_slice(name)[rows], target)
        else:
            whole = self._load_bin(file)[name]
            copy_values(whole if rows is None else whole[rows], target)

    def _load_bin(self, file: Path) -> dict[str, torch.Tensor]:
        """Return the tensors of a ``.bin`` file: mapped, or if it is of the format before torch 1.6 read and kept."""
        if self._read is None or self._read[0] != file:
            self._read = None
            tensors, is_mapped = tensor_files.load_bin(file)
            if is_mapped:
                return tensors
            self._read = file, tensors
        return self._read[1]


def _pieces(num_rows: int, num_bytes: int) -> Iterator[slice]:
    """Return the rows of a tensor in pieces of about ``_PIECE_BYTES``."""
    step = max(1, _PIECE_BYTES * num_rows // max(num_bytes, 1))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))
