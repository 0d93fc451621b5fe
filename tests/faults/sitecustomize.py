"""Faults for real processes: with this folder on PYTHONPATH, every Python reads ``TS_PIPPY_FAULTS`` as it starts.

- ``{"delay_s": 0.02}`` makes every stage take at least so long for a batch, without using the processor.
- ``{"folder": "/some/where"}`` is where a test leaves orders for a rank that runs: a file ``rank-1`` with one word.
  The rank takes the order away and obeys it: ``raise``, ``allocate`` (more than there is) or ``hang`` in its next step,
  ``close`` (its connections) or ``deafen`` (nothing more arrives on them) at once. ``load-1`` with ``raise`` is for the
  time when it loads its stage.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

TARGET = "ts_pippy_handler.stage"
AT_ONCE = ("close", "deafen")
SO_ATTACH_FILTER = 26
DROP_ALL = (ctypes.c_uint16 * 4)(6, 0, 0, 0)  # one instruction of classic BPF: take 0 bytes of the packet
POLL_S = 0.02


class Orders:
    """What a test wants this rank to do."""

    def __init__(self, folder: str | None) -> None:
        rank = os.environ.get("RANK", "0")
        self._files = {kind: Path(folder or "/nonexistent") / f"{kind}-{rank}" for kind in ("rank", "load")}

    def take(self, kind: str, words: tuple[str, ...] | None = None) -> str | None:
        """Return an order and take it away; only one of ``words`` if they are given."""
        path = self._files[kind]
        try:
            order = path.read_text()
            if words is not None and order not in words:
                return None
            path.unlink()
        except OSError:
            return None
        return order

    def obey_in_step(self) -> None:
        """Fail in one of the ways in which a step can."""
        order = self.take("rank", ("raise", "allocate", "hang"))
        if order == "raise":
            raise ValueError("a fault that a test asked for")
        if order == "allocate":
            import torch

            torch.empty(1 << 60, dtype=torch.uint8)
        while order == "hang":
            time.sleep(1)

    def obey_at_once(self) -> None:
        """Wait for orders that need no step."""
        while True:
            time.sleep(POLL_S)
            order = self.take("rank", AT_ONCE)
            for connection in _connections() if order else ():
                if order == "close":
                    connection.shutdown(socket.SHUT_RDWR)
                else:
                    program = (ctypes.c_uint64 * 2)(1, ctypes.addressof(DROP_ALL))
                    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, bytes(program))
                connection.detach()


def _connections() -> list[socket.socket]:
    """Return the TCP connections of this process, whoever opened them; they stay open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            each = socket.socket(fileno=int(name))
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.getpeername():
                found.append(each)
            else:
                each.detach()
        except OSError:  # closed meanwhile, or not connected
            if "each" in locals():
                each.detach()
    return found


class Loader(importlib.abc.Loader):
    """Loads the module as usual, then changes it."""

    def __init__(self, usual: importlib.abc.Loader, faults: dict[str, Any]) -> None:
        self._usual = usual
        self._faults = faults

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._usual.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._usual.exec_module(module)
        run, load = module.Stage.run, module.Stage.__init__
        delay_s = self._faults.get("delay_s", 0.0)
        orders = Orders(self._faults.get("folder"))

        def delayed(stage: Any, batch: Any, received: Any) -> Any:
            started = time.monotonic()
            orders.obey_in_step()
            outputs = run(stage, batch, received)
            time.sleep(max(0.0, delay_s - (time.monotonic() - started)))
            return outputs

        def failing(stage: Any, *arguments: Any, **named: Any) -> None:
            if orders.take("load"):
                raise ValueError("a fault that a test asked for")
            load(stage, *arguments, **named)

        module.Stage.run, module.Stage.__init__ = delayed, failing  # type: ignore[attr-defined]
        if "folder" in self._faults:
            threading.Thread(target=orders.obey_at_once, daemon=True).start()


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
