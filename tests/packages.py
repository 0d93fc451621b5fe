"""Models packaged for TorchServe as a user does it: by ``ts-pippy package``, then perhaps edited by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from tests.command import archive, ts_pippy

Launch = Literal["torchrun", "torchrun-batch", "spawn"]
"""How the ranks start: ``torchrun`` with continuous batching, as upstream's yaml has it without, or ``spawn``."""
LAUNCHES: tuple[Launch, ...] = get_args(Launch)
UPSTREAM_BATCH = {"batchSize": 4, "maxBatchDelay": 200}


class Packages:
    """Makes each archive once, in ``store``."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.store.mkdir()
        self._folder = folder
        self._names: dict[str, str] = {}

    def __call__(self, model: Path, stages: int, launch: Launch, **changes: Any) -> str:
        """Package a checkpoint and return the name of its archive, without ``.mar``.

        Args:
            model: The checkpoint.
            stages: Number of stages.
            launch: See ``Launch``.
            changes: Further or other top-level keys of model-config.yaml.
        """
        key = repr((model, stages, launch, changes))
        if key not in self._names:
            name = f"{launch.replace('-', '')}{stages}n{len(self._names)}"
            self._package(model, name, stages, launch, changes)
            self._names[key] = name
        return self._names[key]

    def changed(self, model: Path, launch: Launch, changes: Mapping[str, Any]) -> str:
        """Package a checkpoint with changes in model-config.yaml, each time anew.

        Args:
            model: The checkpoint.
            launch: See ``Launch``.
            changes: Further or other keys of the blocks ``handler`` and ``pippy``; ``stages`` is the number of stages.
        """
        name = f"changed{len(list(self._folder.glob('changed*')))}"
        self._package(model, name, 2, launch, {})
        config = yaml.safe_load((self.source(name) / "model-config.yaml").read_text())
        for block in ("handler", "pippy"):
            config[block] = {**(config.get(block) or {}), **changes.get(block, {})}
        if "stages" in changes:
            config["parallelLevel"] = changes["stages"]
            if "torchrun" in config:
                config["torchrun"]["nproc-per-node"] = changes["stages"]
        archive(self.store, name, self.source(name) / "handler.py", config)
        return name

    def source(self, name: str) -> Path:
        """Return the folder with the handler and the model-config.yaml that ``ts-pippy package`` wrote."""
        return self._folder / name / f"{name}-source"

    def _package(self, model: Path, name: str, stages: int, launch: Launch, changes: dict[str, Any]) -> None:
        target = self._folder / name
        target.mkdir()
        mode = "spawn" if launch == "spawn" else "torchrun"
        done = ts_pippy("package", model, "--name", name, "--stages", stages, "-o", target, "--launch", mode)
        assert done.status == 0, done.stderr
        if launch == "torchrun-batch":
            changes = UPSTREAM_BATCH | {"continuousBatching": None} | changes
        if not changes:
            (target / f"{name}.mar").rename(self.store / f"{name}.mar")
            return
        config = yaml.safe_load((self.source(name) / "model-config.yaml").read_text())
        config = {key: value for key, value in (config | changes).items() if value is not None}
        archive(self.store, name, self.source(name) / "handler.py", config)
