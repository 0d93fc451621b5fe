"""Package a checkpoint for TorchServe: model-config.yaml, a handler file, and the real torch-model-archiver.

Weights are referred to by path and stay where they are, unless asked to be copied into the archive. Knows TorchServe's
files, and nothing of how a model runs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ts_pippy_handler import network, partition
from ts_pippy_handler.config import PippyConfig, load_config, written_layers
from ts_pippy_handler.errors import ConfigError, PippyError

Launch = Literal["torchrun", "spawn"]
ArchiveFormat = Literal["default", "tgz", "no-archive"]

_SUFFIXES = {"default": ".mar", "tgz": ".tar.gz", "no-archive": ""}
_COPIED_DIRECTORY = "checkpoint"

_WAIT_FOR_HOSTS_S = 86_400
_MORE_AT_ONCE = 64
"""Requests that reach the handler beyond those that may run or wait: to be refused, or to ask for its health."""
_MORE_QUEUED = 1000
"""Requests that the frontend keeps until the handler takes them, a few hundredths of a second later."""

HANDLER_SOURCE = '''\
"""Serves a Hugging Face causal language model over pipeline stages; settings are in model-config.yaml."""

from ts_pippy_handler import TextGenerationHandler


class Handler(TextGenerationHandler):
    """TorchServe wants exactly one class defined in the handler file."""
'''


@dataclass(frozen=True, kw_only=True)
class ArchiveOptions:
    """What to package and how."""

    model_path: Path
    name: str
    num_stages: int
    output: Path
    launch: Launch = "torchrun"
    nodes: Sequence[int] = ()
    """Stages of each host, that of TorchServe first; empty for one host."""
    rdzv_port: int = network.RENDEZVOUS_PORT
    """Where the hosts meet."""
    archive_format: ArchiveFormat = "default"
    version: str = "1.0"
    dtype: str | None = None
    copy_weights: bool = False
    force: bool = False
    pippy: dict[str, Any] = field(default_factory=dict)
    """Further keys of the ``pippy`` block."""


def model_config(options: ArchiveOptions) -> dict[str, Any]:
    """Return the contents of model-config.yaml for a launch mode.

    The frontend's numbers are generous where a large model needs time (``startupTimeout``), and short where a wrong
    configuration would be retried for minutes (``maxRetryTimeoutInSec``). It passes on more requests than the handler
    accepts, so that a client hears at once that there are too many: what the frontend kept would wait unseen, and a
    full queue of its own it calls a missing worker.
    """
    accepted = _max_accepted(options)
    config: dict[str, Any] = {
        "minWorkers": 1,
        "maxWorkers": 1,
        "maxBatchDelay": 10,
        "responseTimeout": 300,
        "startupTimeout": 1200,
        "maxRetryTimeoutInSec": 60,
        "jobQueueSize": accepted + _MORE_QUEUED,
    }
    if options.launch == "torchrun":
        config |= {
            "batchSize": accepted + _MORE_AT_ONCE,
            "continuousBatching": True,
            "parallelType": "pp",
            "torchrun": {"nproc-per-node": options.num_stages, "rdzv-endpoint": "localhost:0"},
        }
        if len(options.nodes) > 1:
            # torchrun hosts the rendezvous where its endpoint is localhost, on all interfaces. The hosts are not
            # started together, and a network may be away for a while.
            config["maxRetryTimeoutInSec"] = _WAIT_FOR_HOSTS_S
            config["torchrun"] = {
                "nnodes": len(options.nodes),
                "nproc-per-node": options.nodes[0],
                "rdzv-backend": "c10d",
                "rdzv-endpoint": f"localhost:{options.rdzv_port}",
            }
    else:
        config |= {
            "batchSize": 1,
            "asyncCommunication": True,
            "parallelType": "custom",
            "parallelLevel": options.num_stages,
        }
    path = _COPIED_DIRECTORY if options.copy_weights else str(options.model_path.resolve())
    handler = {"model_path": path} | ({"dtype": options.dtype} if options.dtype else {})
    return config | {"pippy": options.pippy, "handler": handler}


def _max_accepted(options: ArchiveOptions) -> int:
    """Return how many requests may run or wait."""
    names = ("max_running_requests", "max_waiting_requests")
    given = (options.pippy.get(name, PippyConfig.model_fields[name].default) for name in names)
    return sum(value for value in given if isinstance(value, int))  # anything else is refused by the check


def package(options: ArchiveOptions) -> Path:
    """Write the sources and call torch-model-archiver.

    Returns:
        The archive: a file, or a directory for ``no-archive``.

    Raises:
        ConfigError: If the options do not make a valid configuration, or the archive exists already.
        PippyError: If torch-model-archiver fails; its own words are in the message.
    """
    _check(options)
    options.output.mkdir(parents=True, exist_ok=True)
    archive = options.output / (options.name + _SUFFIXES[options.archive_format])
    if archive.exists() and not options.force:
        raise ConfigError(f"{archive} exists already; use --force to replace it")
    sources = options.output / f"{options.name}-source"
    sources.mkdir(exist_ok=True)
    (sources / "handler.py").write_text(HANDLER_SOURCE, "utf-8")
    (sources / "model-config.yaml").write_text(yaml.safe_dump(model_config(options), sort_keys=False), "utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        extra = _copied_weights(options, Path(scratch))
        _run_archiver(options, sources, extra)
    return archive


def _check(options: ArchiveOptions) -> None:
    if options.num_stages < 1:
        raise ConfigError(f"number of stages: got {options.num_stages}, at least 1 is needed")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", options.name):
        raise ConfigError(
            f"name: letters, digits, '_', '-' and '.' are allowed, and it begins with one of the first two, "
            f"got {options.name!r}"
        )
    _check_nodes(options)
    absolute = {**model_config(options)["handler"], "model_path": str(options.model_path)}
    config = load_config({**model_config(options), "handler": absolute})
    layers = written_layers(config.handler.model_path)
    if layers is not None:
        partition.check_num_stages(options.num_stages, layers)


def _check_nodes(options: ArchiveOptions) -> None:
    if not options.nodes:
        return
    if min(options.nodes) < 1 or sum(options.nodes) != options.num_stages:
        written = ",".join(map(str, options.nodes))
        raise ConfigError(
            f"stages of each host: {written} must be numbers of at least 1 that add up to the number of stages, "
            f"{options.num_stages}"
        )
    if len(options.nodes) == 1:
        return
    if options.launch != "torchrun":
        raise ConfigError(
            "stages on several hosts: torchrun has to start them; spawn mode starts only ranks of its own"
        )
    if not options.pippy.get("interface"):
        raise ConfigError(
            "stages on several hosts: --interface is missing: name, address or network of an interface that the hosts "
            "share, such as eth1 or 10.0.0.0/24"
        )


def _copied_weights(options: ArchiveOptions, scratch: Path) -> Path | None:
    """Lay the checkpoint out as the archive shall hold it: the archiver keeps directories only below a given one."""
    if not options.copy_weights:
        return None
    shutil.copytree(options.model_path, scratch / _COPIED_DIRECTORY, copy_function=_link_or_copy)
    return scratch


def _link_or_copy(source: str, target: str) -> None:
    try:
        Path(target).hardlink_to(Path(source).resolve())
    except OSError:
        shutil.copy2(source, target)


def _run_archiver(options: ArchiveOptions, sources: Path, extra: Path | None) -> None:
    command = [
        *_archiver(),
        *("--model-name", options.name, "--version", options.version),
        *("--handler", str(sources / "handler.py"), "--config-file", str(sources / "model-config.yaml")),
        *("--export-path", str(options.output), "--archive-format", options.archive_format, "--force"),
    ]
    if extra is not None:
        command += ["--extra-files", str(extra)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise PippyError(f"torch-model-archiver failed with status {done.returncode}: {last}")


def _archiver() -> list[str]:
    """Return the command of the torch-model-archiver that belongs to this Python."""
    beside = Path(sys.executable).with_name("torch-model-archiver")
    found = str(beside) if beside.is_file() else shutil.which("torch-model-archiver")
    if found is None:
        raise ConfigError("torch-model-archiver is not installed; run: pip install torch-model-archiver")
    return [found]
