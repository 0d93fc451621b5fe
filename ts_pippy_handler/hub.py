"""Checkpoints named by their id on a model hub instead of a directory: found in the local cache, fetched only if asked.

Knows what huggingface_hub's cache holds; knows nothing of what is inside a checkpoint.
"""

from __future__ import annotations

import re

from ts_pippy_handler.errors import ConfigError, one_line

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NOT_NEEDED = ["original/*", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.onnx", "onnx/*", "*.pth", "consolidated*"]
"""Weights in other formats, which many repositories hold beside those that are read."""


def is_id(text: str) -> bool:
    """Whether a text may be a model's id, ``ORGANISATION/NAME``."""
    return _ID.fullmatch(text) is not None


def find(model_id: str, revision: str | None, *, download: bool) -> str:
    """Return the directory of a model's snapshot in the hub's cache.

    Args:
        model_id: ``ORGANISATION/NAME``.
        revision: Branch, tag or commit; the main branch when absent.
        download: Whether what the cache lacks may be fetched. Otherwise nothing touches the network.

    Raises:
        ConfigError: If it is not in the cache, or cannot be fetched.
    """
    from huggingface_hub import constants, snapshot_download  # takes a moment, and most models are directories

    wanted = model_id if revision is None else f"{model_id} at revision {revision!r}"
    try:
        return str(
            snapshot_download(model_id, revision=revision, local_files_only=not download, ignore_patterns=_NOT_NEEDED)
        )
    except Exception as error:  # of the network, the hub, the disk
        if not download:
            raise ConfigError(
                f"handler.model_path: not a directory, and {wanted} is not in the hub's cache "
                f"{constants.HF_HUB_CACHE}; give the path of a downloaded checkpoint, or set handler.download: true "
                "(--download) to fetch it"
            ) from error
        offline = " HF_HUB_OFFLINE is set: unset it, or" if constants.HF_HUB_OFFLINE else ""
        raise ConfigError(
            f"handler.model_path: {wanted} cannot be fetched, and is not in the hub's cache "
            f"{constants.HF_HUB_CACHE};{offline} fetch it where there is a network and give its path "
            f"({one_line(error, 160)})"
        ) from error
