"""Faults for real processes: with this folder on PYTHONPATH, every Python reads ``TS_PIPPY_FAULTS`` as it starts.

``{"delay_s": 0.02}`` makes every stage take at least so long for a batch, without using the processor.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from types import ModuleType
from typing import Any

TARGET = "ts_pippy_handler.stage"


class Loader(importlib.abc.Loader):
    """Loads the module as usual, then changes it."""

    def __init__(self, usual: importlib.abc.Loader, faults: dict[str, Any]) -> None:
        self._usual = usual
        self._faults = faults

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._usual.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._usual.exec_module(module)
        run = module.Stage.run
        delay_s = self._faults["delay_s"]

        def delayed(stage: Any, batch: Any, received: Any) -> Any:
            started = time.monotonic()
            outputs = run(stage, batch, received)
            time.sleep(max(0.0, delay_s - (time.monotonic() - started)))
            return outputs

        module.Stage.run = delayed  # type: ignore[attr-defined]


class Finder(importlib.abc.MetaPathFinder):
    """Finds the one module that is changed."""

    def __init__(self, faults: dict[str, Any]) -> None:
        self._faults = faults

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader, self._faults)
        return spec


if "TS_PIPPY_FAULTS" in os.environ:
    sys.meta_path.insert(0, Finder(json.loads(os.environ["TS_PIPPY_FAULTS"])))
