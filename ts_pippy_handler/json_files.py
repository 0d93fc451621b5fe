"""JSON files of a checkpoint: an object, or one line that says why there is none. Knows nothing of their contents."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

from ts_pippy_handler.errors import CheckpointError, one_line
from ts_pippy_handler.validation import show


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: Naming the file, if it cannot be read or holds something else.
    """
    try:
        content = file.read_bytes()
        # transformers fails on it or, in generation_config.json, takes the file for absent; neither is what was meant.
        if content.startswith(codecs.BOM_UTF8):
            raise CheckpointError(
                f"{file}: begins with a UTF-8 byte order mark, with which transformers does not read it; save it "
                "without one"
            )
        written = json.loads(content.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = what_it_is(file) or one_line(error)
        raise CheckpointError(f"{file}: {reason}") from error
    if not isinstance(written, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, got {show(written)}")
    return written


def what_it_is(file: Path) -> str | None:
    """Say what a file is that was taken for a file of a checkpoint; None if its beginning does not tell."""
    try:
        with file.open("rb") as opened:
            start = opened.read(64)
    except OSError as error:
        return error.strerror  # of those who read the file next some say that it is not there
    if not start:
        return "it is empty"
    if not start.strip(b"\0"):
        return "it begins with zeros, as space that was reserved for a download that did not finish"
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS, not the file itself; fetch that with 'git lfs pull'"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "it is a web page, probably an error saved in its place; download it again"
    return None
