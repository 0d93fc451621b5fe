"""Serve with TorchServe a Hugging Face model that does not fit one device, split into pipeline stages.

Importing the package imports neither torch nor TorchServe; the names below load what they need when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ts_pippy_handler.base_pippy_handler import BasePippyHandler
    from ts_pippy_handler.pt_pippy import get_pipeline_driver, initialize_rpc_workers
    from ts_pippy_handler.text_generation_handler import TextGenerationHandler

__version__ = "0.1.0"

__all__ = ["BasePippyHandler", "TextGenerationHandler", "__version__", "get_pipeline_driver", "initialize_rpc_workers"]

_HOMES = {
    "BasePippyHandler": "base_pippy_handler",
    "TextGenerationHandler": "text_generation_handler",
    "get_pipeline_driver": "pt_pippy",
    "initialize_rpc_workers": "pt_pippy",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
