"""``ts-pippy rank``: run the stages of a host without TorchServe, and join those of the host with it.

Reads the settings from the archive that TorchServe serves; :mod:`~ts_pippy_handler.supervisor` keeps the ranks running.
"""

from __future__ import annotations

import argparse
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ts_pippy_handler import identity, network
from ts_pippy_handler.config import ServingConfig, load_config
from ts_pippy_handler.errors import ConfigError, one_line

_CONFIG_NAME = "model-config.yaml"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the archive that TorchServe serves, its directory or model-config.yaml; or, where that sets nothing, "
        "the checkpoint's directory",
    )
    parser.add_argument(
        "--rdzv-endpoint",
        required=True,
        metavar="HOST[:PORT]",
        help="host of TorchServe, and port of its rdzv-endpoint",
    )
    parser.add_argument("--nnodes", type=int, default=2, metavar="N", help="hosts in all: %(default)s")
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="stages on this host: %(default)s")
    parser.add_argument("--rdzv-id", metavar="ID", help="MODEL_PORT of TorchServe's torchrun; found there by itself")
    parser.add_argument(
        "--interface", metavar="NAME", help="in the place of pippy.interface: name, address or network of an interface"
    )
    parser.add_argument("--model-path", metavar="DIR", help="in the place of handler.model_path: where it is here")
    parser.add_argument(
        "--wait", type=float, default=3600.0, metavar="S", help="for TorchServe's host, at most: %(default)g seconds"
    )
    parser.add_argument("--debug", action="store_true", help="log more, and show the traceback of an error")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Run this host's ranks until interrupted.

    Args:
        options: See :func:`add_options`.
        say: Takes a line of progress.

    Raises:
        ConfigError: If the options or the settings are wrong.
        CheckpointError: If the checkpoint is not here.
        ServerError: If TorchServe's host is not there in time, or the ranks end again and again.
    """
    # Imports torch, which --help and mistakes in the options need not wait for.
    from ts_pippy_handler.supervisor import Meeting, supervise

    for name in ("nnodes", "nproc_per_node"):
        least = 2 if name == "nnodes" else 1
        if getattr(options, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least {least}, got {getattr(options, name)}")
    try:
        host, port = network.split_endpoint(options.rdzv_endpoint, network.RENDEZVOUS_PORT)
    except ValueError as error:
        raise ConfigError(f"--rdzv-endpoint: {error}") from None
    config = read_config(options)
    identity.facts(config)  # so that a checkpoint that is not here is told at once
    job = {
        "config": config.model_dump(mode="json"),
        "log_level": "DEBUG" if options.debug else "INFO",
        "rendezvous_host": host,
    }
    address = network.find_interface(config.pippy.interface).address
    meeting = Meeting(
        host=host,
        port=port,
        name=options.rdzv_id,
        own_address=address,
        num_hosts=options.nnodes,
        num_ranks=options.nproc_per_node,
        wait_s=options.wait,
    )
    supervise(meeting, json.dumps(job), say)


def read_config(options: argparse.Namespace) -> ServingConfig:
    """Return the settings of the model, with what the options say of this host.

    Raises:
        ConfigError: If there are none, or they are wrong.
    """
    mapping, directory = _settings(Path(options.model), options.model_path)
    handler = mapping.get("handler")
    if isinstance(handler, dict) and options.model_path is not None:
        mapping["handler"] = {**handler, "model_path": options.model_path}
    pippy = mapping.get("pippy")
    if options.interface is not None and isinstance(pippy, dict | None):
        mapping["pippy"] = {**(pippy or {}), "interface": options.interface}
    config = load_config(mapping, model_dir=None if directory is None else str(directory))
    if config.pippy.interface is None:
        raise ConfigError(
            "pippy.interface: is not set, so the ranks would talk over loopback, which no other host reaches; set it "
            "in model-config.yaml on all hosts, or give --interface: name, address or network of an interface, such as "
            "eth1 or 10.0.0.0/24"
        )
    return config


def _settings(model: Path, model_path: str | None) -> tuple[dict[str, Any], Path | None]:
    """Return a parsed model-config.yaml, and the directory that a relative ``handler.model_path`` is in."""
    if model.is_dir():
        if (model / _CONFIG_NAME).is_file():
            return _parsed((model / _CONFIG_NAME).read_bytes(), model), model
        if (model / "config.json").is_file():
            return {"handler": {"model_path": str(model)}}, None
        raise ConfigError(f"{model}: holds neither {_CONFIG_NAME} nor a checkpoint's config.json")
    if not model.is_file():
        raise ConfigError(
            f"{model}: is not here; copy the archive that TorchServe serves to this host, or its {_CONFIG_NAME}"
        )
    if model.suffix in (".yaml", ".yml"):
        return _parsed(model.read_bytes(), model), model.parent
    mapping = _parsed(_member(model), model)
    handler = mapping.get("handler")
    path = model_path or (handler.get("model_path") if isinstance(handler, dict) else None)
    if isinstance(path, str) and not Path(path).is_absolute() and not Path(path).is_dir():
        raise ConfigError(
            f"{model}: handler.model_path is {path!r}, which lies in the archive; unpack the archive and give its "
            "directory, or say with --model-path where the checkpoint is"
        )
    return mapping, None


def _member(archive: Path) -> bytes:
    """Return model-config.yaml of an archive."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                return opened.read(_CONFIG_NAME)
        with tarfile.open(archive) as unpacked:
            name = next(each for each in unpacked.getnames() if Path(each).name == _CONFIG_NAME)
            member = unpacked.extractfile(name)
            assert member is not None
            return member.read()
    except (KeyError, StopIteration):
        raise ConfigError(f"{archive}: the archive holds no {_CONFIG_NAME}") from None
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{archive}: not an archive of TorchServe: {one_line(error)}") from None


def _parsed(text: bytes, file: Path) -> dict[str, Any]:
    try:
        mapping = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: {_CONFIG_NAME} is no YAML: {one_line(error)}") from None
    if not isinstance(mapping, dict):
        raise ConfigError(f"{file}: {_CONFIG_NAME} must be a block of keys")
    return mapping
