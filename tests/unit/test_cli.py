"""Results go to standard output and nothing else does; a mistake is one line and a status."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models import Checkpoints, byte_tokenizer
from tests.unit.fakes import FakeEngine, continuation
from ts_pippy_handler import __version__, archive, cli, launch, loading, tracer
from ts_pippy_handler.errors import LoadError
from ts_pippy_handler.request import SamplingParams


@pytest.fixture(autouse=True)
def quiet_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.logging, "basicConfig", lambda **options: None)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return what is said of options that argparse refuses."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ts-pippy: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


class SpawnedEngine(FakeEngine):
    """A fake engine that the command starts, feeds and closes."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[Any, int, Any]] = []
        self.is_closed = False

    def submit(self, *arguments: Any, **others: Any) -> int:
        number = super().submit(*arguments, **others)
        self.answer_all()
        return number

    def close(self) -> None:
        self.is_closed = True


class FakeTracing:
    """The model being traced, as far as the command sees it."""

    def __init__(self, config: Any, num_stages: int) -> None:
        self.config, self.num_stages, self.is_closed = config, num_stages, False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> SpawnedEngine:
    fake = SpawnedEngine()

    def start(config: Any, num_stages: int, options: Any, tracing: FakeTracing) -> SpawnedEngine:
        assert (tracing.config, tracing.num_stages) == (config, num_stages)
        assert not tracing.is_closed
        fake.started.append((config, num_stages, options))
        return fake

    monkeypatch.setattr(launch, "start_spawned", start)
    monkeypatch.setattr(loading, "check_early", lambda config, num_stages: None)  # the checkpoints here are empty
    monkeypatch.setattr(tracer, "Tracing", FakeTracing)
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2, raising=False)
    return fake


@pytest.fixture
def text_model(model_dir: Path) -> Path:
    byte_tokenizer().save_pretrained(model_dir)
    return model_dir


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "ts-pippy: error: the following arguments are required: COMMAND"),
        (["serve"], "ts-pippy: error: argument COMMAND: invalid choice: 'serve' (choose from"),
        (["plan", "x"], "ts-pippy: error: the following arguments are required: --stages"),
        (["plan", "x", "--stages", "two"], "ts-pippy: error: argument --stages: invalid int value: 'two'"),
        (
            ["plan", "x", "--stages", "2", "--dtype", "int8"],
            "ts-pippy: error: argument --dtype: invalid choice: 'int8' (choose from",
        ),
        (
            ["plan", "x", "--stages", "2", "--split", "evenly"],
            "argument --split: must be 'time', 'memory' or a list like '[10,20]', got 'evenly'",
        ),
        (["plan", "x", "--stages", "2", "--split", "[1,true]"], "must be 'time', 'memory' or a list like '[10,20]'"),
        (
            ["generate", "x", "--stages", "1", "--input-ids", "[1,2.5]"],
            "argument --input-ids: must be a JSON list of whole numbers, got '[1,2.5]'",
        ),
        (
            ["generate", "x", "--stages", "1", "--input-ids", "1,2"],
            "argument --input-ids: must be a JSON list of whole numbers, got '1,2'",
        ),
        (["package", "x", "--stages", "1", "-o", "y"], "the following arguments are required: --name"),
        (
            ["package", "x", "--stages", "1", "--name", "n", "-o", "y", "--launch", "mpi"],
            "argument --launch: invalid choice: 'mpi' (choose from",
        ),
        (["plan", "x", "--stages", "2", "--quick"], "unrecognized arguments: --quick"),
        (["bench", "x", "--stages", "2"], "the following arguments are required: --workload"),
        (
            ["bench", "x", "--stages", "2", "--workload", "w", "--concurrency", "0"],
            "argument --concurrency: must be a whole number, at least 1, got '0'",
        ),
        (
            ["bench", "--url", "u", "--model", "m", "--workload", "w", "--timeout", "nan"],
            "argument --timeout: must be a number of seconds, above 0, got 'nan'",
        ),
        (["bench", "--url", "u", "--workload", "w", "--prompts", "both"], "argument --prompts: invalid choice: 'both'"),
    ],
)
def test_mistakes_in_the_options(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in refused(capsys, *arguments)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"ts-pippy {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "/no/such", "--stages", 2], "handler.model_path: not a directory; give the path of a downloaded"),
        (["generate", "/no/such", "--stages", 2], "nothing to generate from: give --prompt TEXT or --input-ids"),
        (["generate", "/no/such", "--stages", 2, "--prompt", "x"], "handler.model_path: not a directory"),
        (["package", "/no/such", "--stages", 2, "--name", "n", "-o", "/tmp/never"], "handler.model_path: not a dir"),
        (["bench", "--workload", "w"], "nothing to measure: give MODEL_DIR and --stages, or --url and --model\n"),
        (["bench", "x", "--workload", "w"], "MODEL_DIR needs --stages too\n"),
        (["bench", "--stages", 2, "--workload", "w"], "--stages needs MODEL_DIR too\n"),
        (["bench", "--url", "u", "--workload", "w"], "--url needs --model too\n"),
        (["bench", "--api-key", "k", "--workload", "w"], "--api-key needs --url and --model too\n"),
        (
            ["bench", "x", "--url", "u", "--model", "m", "--workload", "w"],
            "MODEL_DIR measures an engine and --url a server: give one or the other\n",
        ),
        (
            ["bench", "--url", "u", "--model", "m", "--dtype", "bf16", "--workload", "w"],
            "--dtype measures an engine and --url a server: give one or the other\n",
        ),
        (
            ["bench", "x", "--stages", 2, "--timeout", 5, "--workload", "w"],
            "MODEL_DIR measures an engine and --timeout a server: give one or the other\n",
        ),
        (["bench", "/no/such", "--stages", 2, "--workload", "/no/such"], "handler.model_path: not a directory"),
        (
            ["bench", "--url", "u", "--model", "m", "--workload", "/no/such"],
            "--workload /no/such: No such file or directory\n",
        ),
    ],
)
def test_errors_are_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], arguments: list[object], message: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 1
    assert out == ""
    assert err.startswith(f"ts-pippy: error: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max-new-tokens", 0, "max_new_tokens: must be a whole number, at least 1, got 0"),
        ("--temperature", -1, "temperature: must be a number, at least 0 and at most 100, got -1.0"),
        ("--top-p", 1.5, "top_p: must be a number, above 0 and at most 1, got 1.5"),
        ("--top-k", -2, "top_k: must be a whole number, at least 0"),
        ("--seed", -1, "seed: must be a whole number, at least 0"),
        ("--stop", "", "stop: must be a text that is not empty"),
        ("--input-ids", "[]", "--input-ids '[]': at least one token id is needed"),
    ],
)
def test_wishes_that_cannot_be_honoured(
    capsys: pytest.CaptureFixture[str],
    engine: SpawnedEngine,
    text_model: Path,
    option: str,
    value: object,
    message: str,
) -> None:
    status, out, err = run(capsys, "generate", text_model, "--stages", 1, "--prompt", "x", option, value)
    assert (status, out) == (1, "")
    assert err.startswith(f"ts-pippy: error: {message}")
    assert err.count("\n") == 1
    assert not engine.submitted
    assert engine.is_closed == bool(engine.started)


def test_generate_as_json(capsys: pytest.CaptureFixture[str], engine: SpawnedEngine, text_model: Path) -> None:
    status, out, _ = run(
        capsys, "generate", text_model, "--stages", 3, "--prompt", "héllo", "--input-ids", "[7, 8]", "--prompt", "x",
        "--max-new-tokens", 4, "--temperature", 0.5, "--top-p", 0.9, "--top-k", 5, "--seed", 6, "--stop", "q",
        "--stop", "z", "--ignore-eos", "--dtype", "bf16", "--split", "[1,2,3]", "--json",
    )  # fmt: skip
    assert status == 0
    assert out.count("\n") == 1
    answers = json.loads(out)
    prompts = [list("héllo".encode()), [7, 8], [ord("x")]]
    params = SamplingParams(
        max_new_tokens=4, temperature=0.5, top_p=0.9, top_k=5, seed=6, stop=("q", "z"), ignore_eos=True
    )
    assert engine.submitted == [(prompt, params) for prompt in prompts]
    for answer, prompt in zip(answers, prompts, strict=True):
        tokens, _ = continuation(prompt, params, eos=())
        assert answer == {
            "prompt_token_ids": prompt,
            "token_ids": tokens,
            "text": byte_tokenizer().decode(tokens),
            "finish_reason": "length",
        }
    ((config, num_stages, options),) = engine.started
    assert num_stages == 3
    assert (config.handler.dtype, config.pippy.split) == ("bf16", [1, 2, 3])
    assert options.log_level == "WARNING"
    assert engine.is_closed


def test_any_key_of_the_pippy_block(
    capsys: pytest.CaptureFixture[str], engine: SpawnedEngine, text_model: Path
) -> None:
    status, _, _ = run(
        capsys, "generate", text_model, "--stages", 2, "--prompt", "ab", "--max-new-tokens", 5,
        "--pippy", "max_batch_tokens=96", "--pippy", "compile=true", "--pippy", "split=memory",
    )  # fmt: skip
    assert status == 0
    ((config, _, _),) = engine.started
    assert (config.pippy.max_batch_tokens, config.pippy.compile, config.pippy.split) == (96, True, "memory")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["max_batch_token=9"], "pippy.max_batch_token: unknown key (value 9); "),
        (["compile=perhaps"], "pippy.compile: "),
        (["chunks=2", "chunks=3"], "--pippy chunks: it was given before, as 2"),
    ],
)
def test_wrong_keys_of_the_pippy_block(
    capsys: pytest.CaptureFixture[str], engine: SpawnedEngine, text_model: Path, given: list[str], message: str
) -> None:
    options = [part for each in given for part in ("--pippy", each)]
    status, out, err = run(capsys, "generate", text_model, "--stages", 2, "--prompt", "ab", *options)
    assert (status, out) == (1, "")
    assert err.startswith(f"ts-pippy: error: {message}")
    assert not engine.started


@pytest.mark.parametrize(
    ("option", "value", "key"), [("--max-running", 3, "max_running_requests"), ("--interface", "eth1", "interface")]
)
def test_a_key_cannot_be_set_twice(
    capsys: pytest.CaptureFixture[str], text_model: Path, tmp_path: Path, option: str, value: object, key: str
) -> None:
    arguments = ["package", text_model, "--name", "m", "--stages", 1, "-o", tmp_path, option, value]
    status, out, err = run(capsys, *arguments, "--pippy", f"{key}=4")
    assert (status, out) == (1, "")
    assert err == f"ts-pippy: error: --pippy {key}: it was given before, as {value!r}\n"


@pytest.mark.parametrize("value", ["compile", "=true", "compile=[1"])
def test_settings_that_cannot_be_read(capsys: pytest.CaptureFixture[str], text_model: Path, value: str) -> None:
    assert "argument --pippy: " in refused(capsys, "plan", text_model, "--stages", 2, "--pippy", value)


def test_generate_as_text(capsys: pytest.CaptureFixture[str], engine: SpawnedEngine, text_model: Path) -> None:
    status, out, _ = run(capsys, "generate", text_model, "--stages", 1, "--prompt", "ab", "--max-new-tokens", 5)
    tokens, _ = continuation(list(b"ab"), SamplingParams(max_new_tokens=5), eos=())
    assert status == 0
    assert out == byte_tokenizer().decode(tokens) + "\n"


def test_generate_without_a_tokenizer(
    capsys: pytest.CaptureFixture[str], engine: SpawnedEngine, model_dir: Path
) -> None:
    status, out, _ = run(capsys, "generate", model_dir, "--stages", 1, "--input-ids", "[5]", "--max-new-tokens", 2)
    tokens, _ = continuation([5], SamplingParams(max_new_tokens=2), eos=())
    assert (status, out) == (0, f"{tokens}\n")
    status, out, err = run(capsys, "generate", model_dir, "--stages", 1, "--prompt", "text")
    assert (status, out) == (1, "")
    assert err == f"ts-pippy: error: {model_dir} has no tokenizer, so --prompt cannot be read; use --input-ids\n"


def test_unexpected_errors_are_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text_model: Path
) -> None:
    def breaks(*arguments: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(launch, "start_spawned", breaks)
    monkeypatch.setattr(loading, "check_early", lambda config, num_stages: None)
    monkeypatch.setattr(tracer, "Tracing", FakeTracing)
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2, raising=False)
    arguments = ["generate", str(text_model), "--stages", "1", "--prompt", "x"]
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (1, "")
    assert err == "ts-pippy: internal error: KeyError: 'surprise' (--debug shows more)\n"
    with pytest.raises(KeyError, match="surprise"):
        cli.main([*arguments, "--debug"])


def test_debug_shows_where_an_error_came_from() -> None:
    with pytest.raises(LoadError, match=r"^handler.model_path: not a directory"):
        cli.main(["plan", "/no/such", "--stages", "2", "--debug"])


def test_interrupting(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_plan", interrupted)
    assert run(capsys, "plan", "x", "--stages", 1) == (130, "", "ts-pippy: interrupted\n")


def test_plan_as_json_and_as_table(capsys: pytest.CaptureFixture[str], checkpoints: Checkpoints) -> None:
    directory = checkpoints("gpt2", layers=4)
    status, out, err = run(capsys, "plan", directory, "--stages", 2, "--split", "[1,3]", "--json")
    assert (status, err) == (0, "")
    plan = json.loads(out)
    assert (plan["model_type"], plan["dtype"], plan["split"]) == ("gpt2", "float32", [1, 3])
    assert [stage["num_layers"] for stage in plan["stages"]] == [1, 3]
    status, out, err = run(capsys, "plan", directory, "--stages", 2, "--dtype", "fp16")
    assert (status, err) == (0, "")
    assert "gpt2, float16, 2 stages, split: time" in out
    status, out, err = run(capsys, "plan", directory, "--stages", 5)
    assert (status, out) == (1, "")
    assert err == "ts-pippy: error: number of stages: got 5, allowed are 1 to 4, the model's layers\n"


def test_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    seen: list[archive.ArchiveOptions] = []
    monkeypatch.setattr(archive, "package", lambda options: seen.append(options) or Path("/store/n.mar"))
    base = ["package", model_dir, "--stages", 2, "--name", "n", "-o", model_dir.parent]
    assert run(capsys, *base) == (0, "/store/n.mar\n", "")
    more = ["--launch", "spawn", "--archive-format", "tgz", "--model-version", "3", "--copy-weights", "--force"]
    run(capsys, *base, *more, "--dtype", "half", "--split", "memory")
    plain = archive.ArchiveOptions(model_path=model_dir, name="n", num_stages=2, output=model_dir.parent)
    assert seen[0] == plain
    assert seen[1] == archive.ArchiveOptions(
        model_path=model_dir,
        name="n",
        num_stages=2,
        output=model_dir.parent,
        launch="spawn",
        archive_format="tgz",
        version="3",
        dtype="half",
        copy_weights=True,
        force=True,
        pippy={"split": "memory"},
    )
