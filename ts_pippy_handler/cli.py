"""The ``ts-pippy`` command: generate without TorchServe, plan, package, measure, drain, lend a host to another.

Errors go to standard error in one line with a status other than 0; ``--debug`` shows the traceback instead. Results
go to standard output, and nothing else does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from ts_pippy_handler import __version__, bench_cli, drain_cli, network, rank_cli
from ts_pippy_handler.config import DTYPES, ServingConfig, load_config, locate
from ts_pippy_handler.errors import ConfigError, InvalidRequestError, PippyError, one_line

if TYPE_CHECKING:
    from ts_pippy_handler.completion import Answer
    from ts_pippy_handler.generator import Prompt, Wishes
    from ts_pippy_handler.launch import SpawnOptions
    from ts_pippy_handler.text import Tokenizer

_STDERR = 2  # the descriptor: the other ranks' output, whatever it is, must not reach standard output


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    # Answers and plans own standard output; every line of logging goes to standard error, also from torch.
    logging.basicConfig(stream=sys.stderr, level="INFO" if options.debug else "WARNING", format="%(message)s")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    signal.signal(signal.SIGTERM, _terminate)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output has seen enough; Python must not try to write the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (PippyError, OSError) as error:
        if options.debug:
            raise
        print(f"ts-pippy: error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if options.debug:
            raise
        print(
            f"ts-pippy: internal error: {type(error).__name__}: {one_line(error)} (--debug shows more)", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print("ts-pippy: interrupted", file=sys.stderr)
        return 130


def _terminate(number: int, _frame: object) -> None:
    """End as after an error, so that the other ranks are told and leave quietly."""
    sys.exit(128 + number)


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake and exit with status 2."""
        self.exit(2, f"ts-pippy: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ts-pippy", description="Serve a Hugging Face model split into pipeline stages.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_plan(commands)
    _add_shard(commands)
    _add_package(commands)
    _add_bench(commands)
    _add_drain(commands)
    _add_rank(commands)
    return parser


def _command(commands: Any, name: str, run: Any, text: str, *, needs_model: bool = True) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    number = None if needs_model else "?"
    parser.add_argument(
        "model_dir", metavar="MODEL_DIR", nargs=number, help="directory of a Hugging Face checkpoint, or hub id"
    )
    parser.add_argument(
        "--revision", metavar="R", help="of a hub id: branch, tag or commit; by default the main branch"
    )
    parser.add_argument("--download", action="store_true", help="fetch a hub id that the cache lacks")
    parser.add_argument("--stages", type=int, required=needs_model, metavar="N", help="number of pipeline stages")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="by default the checkpoint's own")
    parser.add_argument("--split", type=_split, help="'time' (default), 'memory', or layers per stage: '[10,20]'")
    parser.add_argument(
        "--device-memory",
        type=_memory,
        metavar="SIZE,SIZE,…",
        help="what each stage may take of its device, such as 8GiB,16GiB; one size for all; or 'measured'",
    )
    parser.add_argument(
        "--pippy",
        type=_setting,
        action="append",
        metavar="KEY=VALUE",
        help="a further key of the pippy block of model-config.yaml, such as compile=true; may be repeated",
    )
    parser.add_argument("--debug", action="store_true", help="log more, and show the traceback of an error")
    return parser


def _add_generate(commands: Any) -> None:
    parser = _command(commands, "generate", _generate, "Continue prompts with the engine that TorchServe would run.")
    parser.add_argument(
        "--prompt", dest="prompts", action=_AppendPrompt, default=[], metavar="TEXT", help="may be repeated"
    )
    parser.add_argument(
        "--input-ids", dest="prompts", action=_AppendIds, metavar="'[1,2,3]'", help="token ids instead of text"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="K")
    parser.add_argument("--temperature", type=float, metavar="T", help="0, the default, takes the most likely token")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--seed", type=int, metavar="S")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="ends the text; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    parser.add_argument("--json", action="store_true", help="print one JSON list")


def _add_plan(commands: Any) -> None:
    parser = _command(commands, "plan", _plan, "Show how a model would be split, without reading weights.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_shard(commands: Any) -> None:
    text = "Copy a checkpoint with the weights of each stage in a file of their own."
    parser = _command(commands, "shard", _shard, text)
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="directory to make")


def _add_package(commands: Any) -> None:
    parser = _command(commands, "package", _package, "Write model-config.yaml and handler, and archive them.")
    parser.add_argument("--name", required=True, help="model name at TorchServe")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="model store directory")
    parser.add_argument("--launch", choices=["torchrun", "spawn"], default="torchrun", help="who starts the ranks")
    parser.add_argument(
        "--nodes", type=_numbers, metavar="N,N,…", help="stages of each host, TorchServe's first; by default all there"
    )
    parser.add_argument("--interface", metavar="NAME", help="interface the hosts share: name, address or network")
    parser.add_argument("--rdzv-port", type=int, default=network.RENDEZVOUS_PORT, metavar="P", help="%(default)s")
    parser.add_argument("--archive-format", choices=["default", "tgz", "no-archive"], default="default")
    parser.add_argument("--model-version", default="1.0", metavar="V")
    parser.add_argument("--copy-weights", action="store_true", help="put the checkpoint into the archive")
    parser.add_argument("--max-running", type=int, metavar="N", help="requests generating at the same time; 64")
    parser.add_argument("--max-waiting", type=int, metavar="N", help="requests that may wait, more get status 429; 256")
    parser.add_argument("--force", action="store_true", help="replace an existing archive")


def _add_bench(commands: Any) -> None:
    text = "Measure a workload: through the engine, or against a server."
    bench_cli.add_options(_command(commands, "bench", _bench, text, needs_model=False))


def _add_drain(commands: Any) -> None:
    text = "Let a model that TorchServe serves on this host finish its requests and take no new ones."
    parser = commands.add_parser("drain", help=text, description=text)
    parser.set_defaults(run=_drain)
    drain_cli.add_options(parser)


def _add_rank(commands: Any) -> None:
    text = "Run stages on this host for a model that TorchServe serves on another."
    parser = commands.add_parser("rank", help=text, description=text)
    parser.set_defaults(run=_rank)
    rank_cli.add_options(parser)


def _split(text: str) -> str | list[int]:
    if text in ("time", "memory"):
        return text
    try:
        sizes = json.loads(text)
    except ValueError:
        sizes = None
    if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
        raise argparse.ArgumentTypeError(f"must be 'time', 'memory' or a list like '[10,20]', got {text!r}")
    return sizes


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers such as 1,2, got {text!r}") from None


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, such as compile=true, got {text!r}")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise argparse.ArgumentTypeError(f"{key}: {value!r} is not YAML") from None


def _memory(text: str) -> str | list[str]:
    return text.split(",") if "," in text else text


class _AppendPrompt(argparse.Action):
    """Keep texts and token ids in the order they were given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, _option: Any = None) -> None:
        namespace.prompts = [*namespace.prompts, self.parsed(parser, values)]

    def parsed(self, _parser: argparse.ArgumentParser, value: str) -> str | list[int]:
        """Return the prompt an argument stands for."""
        return value


class _AppendIds(_AppendPrompt):
    def parsed(self, _parser: argparse.ArgumentParser, value: str) -> str | list[int]:
        """Return the token ids an argument stands for."""
        try:
            ids = json.loads(value)
        except ValueError:
            ids = None
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            _parser.error(f"argument --input-ids: must be a JSON list of whole numbers, got {value!r}")
        return ids


def _config(options: argparse.Namespace) -> ServingConfig:
    handler = {"model_path": options.model_dir, "request_timeout": None, "download": options.download}
    if options.revision is not None:
        handler["revision"] = options.revision
    if options.dtype:
        handler["dtype"] = options.dtype
    return load_config({"pippy": _pippy(options), "handler": handler})


def _pippy(options: argparse.Namespace, **others: Any) -> dict[str, Any]:
    """Return what the options say of the ``pippy`` block; ``others`` are keys with options of their own, or None."""
    given = {"split": options.split, "device_memory": options.device_memory, **others}
    pippy = {key: value for key, value in given.items() if value is not None}
    for key, value in options.pippy or ():
        if key in pippy:
            raise ConfigError(f"--pippy {key}: it was given before, as {pippy[key]!r}")
        pippy[key] = value
    return pippy


def _spawn_options(options: argparse.Namespace) -> SpawnOptions:
    from ts_pippy_handler.launch import SpawnOptions

    return SpawnOptions(
        stdout=_STDERR,
        show_progress=sys.stderr.isatty(),
        log_level="INFO" if options.debug else "WARNING",
    )


def _generate(options: argparse.Namespace) -> int:
    # Imported here, so that --help and mistakes in the options need not wait seconds for torch.
    from ts_pippy_handler import launch, loading, tracer
    from ts_pippy_handler.generator import Generator

    if not options.prompts:
        raise ConfigError("nothing to generate from: give --prompt TEXT or --input-ids '[1,2,3]'")
    config = _config(options)
    wishes = _wishes(options)
    prompts = [_prompt(each) for each in options.prompts]
    loading.check_early(config, options.stages)
    # Tracing begins before the tokenizer is loaded: both import transformers, which takes seconds.
    with contextlib.closing(tracer.Tracing(config, options.stages)) as tracing:
        tokenizer = _tokenizer(options, config)
        engine = launch.start_spawned(config, options.stages, _spawn_options(options), tracing)
    try:
        generator = Generator(engine, tokenizer, config.handler)
        completions = generator.submit_all(prompts, wishes)
        answers = []
        for completion in completions:
            completion.done.wait()
            answers.append(completion.answer())
    finally:
        engine.close()
    _print_answers(options, answers)
    return 0


def _tokenizer(options: argparse.Namespace, config: ServingConfig) -> Tokenizer | None:
    from ts_pippy_handler.text import Tokenizer

    tokenizer = Tokenizer.load(config.handler.model_path)
    if tokenizer is None and any(isinstance(each, str) for each in options.prompts):
        raise InvalidRequestError(f"{options.model_dir} has no tokenizer, so --prompt cannot be read; use --input-ids")
    return tokenizer


def _wishes(options: argparse.Namespace) -> Wishes:
    from ts_pippy_handler.payload import GenerationPayload, check_fields

    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    checked: GenerationPayload = check_fields({"prompt": "-", "ignore_eos": options.ignore_eos, **given})
    return checked.wishes()


def _prompt(given: str | list[int]) -> Prompt:
    from ts_pippy_handler.generator import Prompt

    if isinstance(given, str):
        return Prompt(text=given)
    if not given:
        raise InvalidRequestError("--input-ids '[]': at least one token id is needed")
    return Prompt(token_ids=given)


def _print_answers(options: argparse.Namespace, answers: Sequence[Answer]) -> None:
    if options.json:
        items = [
            {
                "prompt_token_ids": answer.prompt_token_ids,
                "token_ids": answer.token_ids,
                "text": answer.text,
                "finish_reason": answer.finish_reason.value,
            }
            for answer in answers
        ]
        print(json.dumps(items))
        return
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    for answer in answers:
        print(answer.text if answer.text is not None else answer.token_ids)


def _plan(options: argparse.Namespace) -> int:
    from ts_pippy_handler import plan

    result = plan.make_plan(_config(options), options.stages)
    print(json.dumps(result.as_dict()) if options.json else result.as_table())
    return 0


def _shard(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from ts_pippy_handler import sharding

    with tqdm(unit="B", unit_scale=True, desc="writing weights", disable=not sys.stderr.isatty(), leave=False) as bar:
        files = sharding.shard(_config(options), options.stages, options.output, bar.update)
    for file in files:
        print(f"{file.path}  {file.num_bytes / 1e6:,.1f} MB")
    return 0


def _package(options: argparse.Namespace) -> int:
    from ts_pippy_handler import archive

    given = {"model_path": options.model_dir, "revision": options.revision, "download": options.download}
    located = locate(given)
    written = archive.package(
        archive.ArchiveOptions(
            model_path=Path(located["model_path"]),
            name=options.name,
            num_stages=options.stages,
            output=options.output,
            launch=options.launch,
            nodes=options.nodes or (),
            rdzv_port=options.rdzv_port,
            archive_format=options.archive_format,
            version=options.model_version,
            dtype=options.dtype,
            copy_weights=options.copy_weights,
            force=options.force,
            pippy=_pippy(
                options,
                max_running_requests=options.max_running,
                max_waiting_requests=options.max_waiting,
                interface=options.interface,
            ),
        )
    )
    print(written)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from ts_pippy_handler.workload import read_workload

    bench_cli.check(options)
    if options.url is not None:
        from ts_pippy_handler import bench_http

        server = bench_cli.server_of(options)
        workload = read_workload(options.workload, need=server.prompt_field)
        report = bench_http.run(server, workload, concurrency=options.concurrency)
    else:
        from ts_pippy_handler import bench_engine

        config, workload = _config(options), read_workload(options.workload)
        spawn = _spawn_options(options)
        report = bench_engine.run(
            config, options.stages, workload, spawn, concurrency=options.concurrency, outputs=options.save_outputs
        )
    print(json.dumps(report.as_dict()) if options.json else report.as_table())
    return 0


def _drain(options: argparse.Namespace) -> int:
    drain_cli.drain(options, say=lambda line: print(line, flush=True))
    return 0


def _rank(options: argparse.Namespace) -> int:
    rank_cli.run(options, say=lambda line: print(f"ts-pippy rank: {line}", file=sys.stderr, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
