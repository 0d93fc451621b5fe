"""The options of ``ts-pippy bench``: an engine or a server is measured, never both."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ts_pippy_handler.errors import ConfigError

if TYPE_CHECKING:
    from ts_pippy_handler.bench_http import Server

_OF_ENGINE = {
    "MODEL_DIR": "model_dir",
    "--stages": "stages",
    "--dtype": "dtype",
    "--split": "split",
    "--device-memory": "device_memory",
    "--pippy": "pippy",
    "--save-outputs": "save_outputs",
}
_OF_SERVER = {
    "--url": "url",
    "--model": "model",
    "--prompts": "prompts",
    "--timeout": "timeout",
    "--api-key": "api_key",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the engine's own options leave out."""
    parser.epilog = "Either MODEL_DIR and --stages, or --url and --model."
    parser.add_argument("--workload", type=Path, required=True, metavar="FILE", help="JSON with a list 'requests'")
    parser.add_argument(
        "--concurrency", type=_at_least_one, metavar="C", help="most requests at a time; by default all at once"
    )
    parser.add_argument("--save-outputs", type=Path, metavar="FILE", help="write each request's new token ids")
    parser.add_argument("--url", help="base of an OpenAI API, for instance http://127.0.0.1:8000/v1")
    parser.add_argument("--model", metavar="NAME", help="model name that the server knows")
    parser.add_argument("--prompts", choices=["ids", "text"], help="what a server is sent; ids by default")
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="longest a server may take for a request: 600")
    parser.add_argument("--api-key", metavar="KEY", help="sent as bearer token")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def check(options: argparse.Namespace) -> None:
    """Refuse options that do not go together.

    Raises:
        ConfigError: Naming them.
    """
    engine = [name for name, key in _OF_ENGINE.items() if getattr(options, key) is not None]
    server = [name for name, key in _OF_SERVER.items() if getattr(options, key) is not None]
    if engine and server:
        raise ConfigError(f"{engine[0]} measures an engine and {server[0]} a server: give one or the other")
    if not engine and not server:
        raise ConfigError("nothing to measure: give MODEL_DIR and --stages, or --url and --model")
    needed = ["--url", "--model"] if server else ["MODEL_DIR", "--stages"]
    missing = [name for name in needed if name not in engine + server]
    if missing:
        raise ConfigError(f"{(engine + server)[0]} needs {' and '.join(missing)} too")


def server_of(options: argparse.Namespace) -> Server:
    """Return the server that the options name."""
    from ts_pippy_handler.bench_http import Server

    given = {"prompts": options.prompts, "timeout_s": options.timeout, "api_key": options.api_key}
    chosen = {name: value for name, value in given.items() if value is not None}
    return Server(url=options.url, model=options.model, **chosen)


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, above 0, got {text!r}")
    return seconds
