"""Every key is checked, and a wrong one is named with what was seen and what is allowed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ts_pippy_handler.config import (
    DEPRECATED_KEYS,
    DTYPES,
    FRONTEND_KEYS,
    TORCHRUN_KEYS,
    HandlerConfig,
    PippyConfig,
    load_config,
    parse,
)
from ts_pippy_handler.errors import ConfigError

GOOD_PIPPY: dict[str, list[Any]] = {
    "model_type": ["HF"],
    "chunks": [1, 64, None],
    "input_names": [["input_ids"], ["input_ids", "attention_mask", "position_ids"]],
    "rpc_timeout": [0.5, 1800],
    "num_worker_threads": [1, 1024],
    "split": ["time", "memory", [1], [10, 20]],
    "device_memory": ["measured", 1, [3, 10**12], {0: 8, 1: 5}, {1: 5}, None],
    "block_size": [1, 1024],
    "kv_cache_tokens": [1, 10**9, None],
    "max_batch_tokens": [1, 8192, None],
    "max_running_requests": [1, 500],
    "max_waiting_requests": [0, 10],
    "step_timeout": [0.1, 3600],
    "heartbeat_timeout": [1, 7.5, 600],
    "threads_per_rank": [1, 8, None],
    "pack_weights": [True, False],
    "native_attention": [True, False],
    "native_linear": [True, False],
    "compile": [True, False],
    "trace_cache": [True, False],
    "prefix_caching": [True, False],
    "interface": ["eth1", None],
}
GOOD_HANDLER: dict[str, list[Any]] = {
    "index_filename": ["model.safetensors.index.json", None],
    "dtype": [*DTYPES, None],
    "max_length": [1, 4096, None],
    "max_new_tokens": [1, 10_000],
    "manual_seed": [0, 2**63 - 1, None],
    "request_timeout": [0.5, 600, 1e6, None],
    "drain_timeout": [0.5, 3600],
    "max_stop_strings": [0, 64],
    "max_choices": [1, 128],
    "max_response_size": [65_536, 10**9],
    "grpc_streaming": [True, False],
    "trust_remote_code": [True, False],
    "download": [True, False],
    "revision": [None],
}
BAD_PIPPY: list[tuple[str, Any, str]] = [
    ("model_type", "ONNX", "pippy.model_type: must be .*HF.*, got 'ONNX'"),
    ("model_type", None, "pippy.model_type: only 'HF' can be split, got None"),
    ("chunks", 0, "pippy.chunks: must be a whole number, at least 1 and at most 64, got 0"),
    ("chunks", 65, "pippy.chunks: must be .* at most 64, got 65"),
    ("chunks", True, "pippy.chunks: must be a whole number, .*got True"),
    ("chunks", "two", "pippy.chunks: must be a whole number, .*got 'two'"),
    ("chunks", 1.5, "pippy.chunks: must be a whole number, .*got 1.5"),
    ("input_names", ["input_id"], "pippy.input_names: unknown model input 'input_id'; did you mean 'input_ids'"),
    ("input_names", "input_ids", "pippy.input_names: must be .*got 'input_ids'"),
    ("rpc_timeout", 0, "pippy.rpc_timeout: must be a number, above 0, got 0"),
    ("rpc_timeout", -1.5, "pippy.rpc_timeout: must be a number, above 0, got -1.5"),
    ("rpc_timeout", True, "pippy.rpc_timeout: must be a .*number.*got True"),
    ("rpc_timeout", float("nan"), "pippy.rpc_timeout: must be a number, .*got nan"),
    ("rpc_timeout", float("inf"), "pippy.rpc_timeout: must be a number, .*got inf"),
    ("num_worker_threads", 0, "pippy.num_worker_threads: must be a whole number, at least 1 and at most 1024, got 0"),
    ("split", "layers", "pippy.split: must be .*got 'layers'"),
    ("split", [], r"pippy.split: must be 'time', 'memory' or a list of the number of layers of each stage, got \[\]"),
    ("split", [3, 0], r"pippy.split: must be 'time', 'memory' or a list .*got \[3, 0\]"),
    ("split", [2.5, 1], r"pippy.split: must be .*got"),
    ("device_memory", "much", "pippy.device_memory: must be 'measured', a size such as 24GiB, a list .*got 'much'"),
    ("device_memory", 0, "pippy.device_memory: must be .*got 0"),
    ("device_memory", True, "pippy.device_memory: must be .*got True"),
    ("device_memory", ["24GiB", -1], "pippy.device_memory: must be .*got"),
    ("device_memory", [], r"pippy.device_memory: .*got \[\]"),
    ("device_memory", {-1: 5}, r"pippy.device_memory: .*got \{-1: 5\}"),
    ("block_size", 0, "pippy.block_size: must be a whole number, at least 1 and at most 1024, got 0"),
    ("block_size", 1025, "pippy.block_size: .* at most 1024, got 1025"),
    ("kv_cache_tokens", 0, "pippy.kv_cache_tokens: must be a whole number, at least 1, got 0"),
    ("max_batch_tokens", 0, "pippy.max_batch_tokens: must be a whole number, at least 1, got 0"),
    ("max_running_requests", 0, "pippy.max_running_requests: must be a whole number, at least 1, got 0"),
    ("max_waiting_requests", -1, "pippy.max_waiting_requests: must be a whole number, at least 0, got -1"),
    ("step_timeout", 0, "pippy.step_timeout: must be a number, above 0, got 0"),
    ("heartbeat_timeout", 0.5, "pippy.heartbeat_timeout: must be a number, at least 1, got 0.5"),
    ("heartbeat_timeout", float("inf"), "pippy.heartbeat_timeout: must be a number, .*got inf"),
    ("threads_per_rank", 0, "pippy.threads_per_rank: must be a whole number, at least 1, got 0"),
    ("pack_weights", "maybe", "pippy.pack_weights: must be true or false, got 'maybe'"),
    ("native_linear", "cc", "pippy.native_linear: must be true or false, got 'cc'"),
    ("native_attention", "cc", "pippy.native_attention: must be true or false, got 'cc'"),
    ("compile", "always", "pippy.compile: must be true or false, got 'always'"),
    ("trace_cache", "/tmp", "pippy.trace_cache: must be true or false, got '/tmp'"),
    ("prefix_caching", "maybe", "pippy.prefix_caching: must be true or false, got 'maybe'"),
    ("interface", 5, "pippy.interface: must be a text, got 5"),
]
BAD_HANDLER: list[tuple[str, Any, str]] = [
    ("model_path", 5, "handler.model_path: must be a text, got 5"),
    ("model_path", None, "handler.model_path: must be a text, got None"),
    ("model_path", "/no/such/place", "handler.model_path: not a directory; give the path .*, got '/no/such/place'"),
    ("index_filename", 5, "handler.index_filename: must be a text, got 5"),
    ("dtype", "float31", "handler.dtype: unknown dtype; did you mean 'float32'.*, got 'float31'"),
    ("dtype", "int8", "handler.dtype: unknown dtype; allowed: bf16, bfloat16, float, .*, got 'int8'"),
    ("dtype", 16, "handler.dtype: must be a text, got 16"),
    ("max_length", 0, "handler.max_length: must be a whole number, at least 1, got 0"),
    ("max_new_tokens", 0, "handler.max_new_tokens: must be a whole number, at least 1, got 0"),
    ("max_new_tokens", False, "handler.max_new_tokens: must be a whole number, .*got False"),
    ("request_timeout", 0, "handler.request_timeout: must be a number, above 0, got 0"),
    ("drain_timeout", 0, "handler.drain_timeout: must be a number, above 0, got 0"),
    ("max_stop_strings", -1, "handler.max_stop_strings: must be a whole number, at least 0 and at most 64, got -1"),
    ("max_choices", 0, "handler.max_choices: must be a whole number, at least 1 and at most 128, got 0"),
    ("max_response_size", 1, "handler.max_response_size: must be a whole number, at least 65536, got 1"),
    ("grpc_streaming", "maybe", "handler.grpc_streaming: must be true or false, got 'maybe'"),
    ("manual_seed", -1, "handler.manual_seed: must be a whole number, at least 0 and .*, got -1"),
    ("manual_seed", 2**63, f"handler.manual_seed: must be a whole number, .*below {2**63}, got {2**63}"),
    ("trust_remote_code", "perhaps", "handler.trust_remote_code: must be true or false, got 'perhaps'"),
    ("download", "perhaps", "handler.download: must be true or false, got 'perhaps'"),
    ("revision", "v2", "handler.revision: 'v2' is for a model named by its id, but handler.model_path is '.*'"),
]


def check(model_dir: Path, *, pippy: Any = None, handler: dict[str, Any] | None = None, **top: Any) -> Any:
    block = {"model_path": str(model_dir), **(handler or {})}
    return load_config({"handler": block, **({"pippy": pippy} if pippy is not None else {}), **top})


def refused(model_dir: Path, message: str, **blocks: Any) -> None:
    with pytest.raises(ConfigError, match=f"(?s)^{message}") as caught:
        check(model_dir, **blocks)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_the_tables_here_name_every_key() -> None:
    assert set(GOOD_PIPPY) == set(PippyConfig.model_fields) == {key for key, _, _ in BAD_PIPPY}
    handler = set(HandlerConfig.model_fields)
    assert {*GOOD_HANDLER, "model_path"} == handler == {key for key, _, _ in BAD_HANDLER}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in GOOD_PIPPY.items() for value in values])
def test_good_pippy_values(model_dir: Path, key: str, value: Any) -> None:
    assert getattr(check(model_dir, pippy={key: value}).pippy, key) == value


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in GOOD_HANDLER.items() for value in values])
def test_good_handler_values(model_dir: Path, key: str, value: Any) -> None:
    assert getattr(check(model_dir, handler={key: value}).handler, key) == value


@pytest.mark.parametrize(("key", "value", "message"), BAD_PIPPY)
def test_bad_pippy_values(model_dir: Path, key: str, value: Any, message: str) -> None:
    refused(model_dir, message, pippy={key: value})


@pytest.mark.parametrize(("key", "value", "message"), BAD_HANDLER)
def test_bad_handler_values(model_dir: Path, key: str, value: Any, message: str) -> None:
    refused(model_dir, message, handler={key: value})


def test_all_errors_are_told_at_once(model_dir: Path) -> None:
    refused(model_dir, "pippy.chunks: .*got 0; pippy.block_size: .*got -4$", pippy={"chunks": 0, "block_size": -4})


def test_defaults(model_dir: Path) -> None:
    config = check(model_dir)
    assert config.pippy == PippyConfig()
    assert (config.pippy.split, config.pippy.block_size, config.pippy.max_batch_tokens) == ("time", 16, None)
    assert config.handler.max_new_tokens == 256
    assert config.handler.torch_dtype_name is None


@pytest.mark.parametrize(
    ("name", "torch_name"),
    [
        ("float32", "float32"),
        ("fp32", "float32"),
        ("float", "float32"),
        ("float16", "float16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("bfloat16", "bfloat16"),
        ("bf16", "bfloat16"),
    ],
)
def test_dtype_names(model_dir: Path, name: str, torch_name: str) -> None:
    assert check(model_dir, handler={"dtype": name}).handler.torch_dtype_name == torch_name


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"pippy": {"chunk": 3}}, "pippy.chunk: unknown key \\(value 3\\); did you mean 'chunks'\\?$"),
        (
            {"pippy": {"zzz": 3}},
            "pippy.zzz: unknown key \\(value 3\\); allowed: block_size, chunks, .*trace_cache$",
        ),
        ({"pippy": {7: 3}}, "pippy.7: "),
        ({"handler": {"max_new_token": 3}}, "handler.max_new_token: unknown key .*did you mean 'max_new_tokens'"),
        ({"batchsize": 3}, "batchsize: unknown key \\(value 3\\); did you mean 'batchSize'\\?"),
        ({"qqqq": {"a": 1}}, "qqqq: unknown key .*allowed: .*batchSize.*may be named x-…"),
        ({"torchrun": {"nproc_per_node": 2}}, "torchrun.nproc_per_node: unknown key .*did you mean 'nproc-per-node'"),
        ({"continuousBatching": True, "maxWorkers": 2}, "maxWorkers: 2 workers with continuousBatching .*set .* to 1"),
        (
            {"continuousBatching": True, "minWorkers": 3, "maxWorkers": 3},
            "minWorkers: 3 workers with continuousBatching",
        ),
        ({"torchrun": 2}, "torchrun: must be a block of keys, got 2$"),
        ({"pippy": [1]}, r"pippy: must be a block of keys, got \[1\]$"),
    ],
)
def test_unknown_keys_get_a_suggestion(model_dir: Path, blocks: dict[str, Any], message: str) -> None:
    refused(model_dir, message, **blocks)


def test_a_long_value_is_cut_in_the_message(model_dir: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check(model_dir, handler={"dtype": "x" * 5000})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("mapping", [None, {}, [], "text"])
def test_no_configuration_at_all(mapping: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^model-config.yaml is empty or missing: the keys 'handler' and 'pippy' are"
    ):
        load_config(mapping)


@pytest.mark.parametrize("mapping", [{"minWorkers": 1}, {"handler": None}])
def test_no_handler_block(mapping: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^handler: missing; the block must give at least model_path$"):
        load_config(mapping)


def test_no_model_path() -> None:
    with pytest.raises(ConfigError, match=r"^handler.model_path: missing, a value is required$"):
        load_config({"handler": {"dtype": "fp32"}})


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^handler.model_path: the directory holds no config.json, .*Hugging Face"):
        load_config({"handler": {"model_path": str(tmp_path)}})


def test_frontend_keys_are_left_to_torchserve(model_dir: Path) -> None:
    torchrun = dict.fromkeys(TORCHRUN_KEYS, 1)
    others = dict.fromkeys(FRONTEND_KEYS - {"torchrun"}, "anything")
    assert check(model_dir, torchrun=torchrun, **others).pippy == PippyConfig()


def test_keys_of_the_users_own(model_dir: Path) -> None:
    assert check(model_dir, **{"x-mine": {"anything": [1]}}).pippy == PippyConfig()


@pytest.mark.parametrize("old", DEPRECATED_KEYS)
def test_upstreams_spellings_warn_and_work(model_dir: Path, old: str) -> None:
    new = DEPRECATED_KEYS[old]
    block = {"model_path": str(model_dir), "index_filename": "index.json"}
    block[old] = block.pop(new)
    with pytest.warns(DeprecationWarning, match=f"^handler.{old} is deprecated, write handler.{new}$"):
        config = load_config({"handler": block})
    assert config.handler.model_path == str(model_dir)
    assert config.handler.index_filename == "index.json"
    assert old in block, "the caller's mapping is not changed"


def test_both_spellings_at_once(model_dir: Path) -> None:
    message = "handler.model_name: the same as handler.model_path, which is there too; keep handler.model_path only"
    refused(model_dir, re.escape(message), handler={"model_name": "x"})


def test_a_relative_model_path_is_inside_the_archive(model_dir: Path) -> None:
    mapping = {"handler": {"model_path": model_dir.name}}
    config = load_config(mapping, model_dir=str(model_dir.parent))
    assert config.handler.model_path == str(model_dir)
    assert mapping == {"handler": {"model_path": model_dir.name}}
    absolute = load_config({"handler": {"model_path": str(model_dir)}}, model_dir="/elsewhere")
    assert absolute.handler.model_path == str(model_dir)


def test_settings_cannot_be_changed_afterwards(model_dir: Path) -> None:
    config = check(model_dir)
    with pytest.raises(ValueError, match="frozen"):
        config.pippy.chunks = 3
    with pytest.raises(ValueError, match="frozen"):
        config.handler = None


def test_a_checked_configuration_passes_again(model_dir: Path) -> None:
    config = check(model_dir, pippy={"split": [1, 2], "chunks": 3}, handler={"dtype": "bf16"})
    assert load_config(config.model_dump(exclude_none=True)) == config


def test_parse_without_a_prefix() -> None:
    with pytest.raises(ConfigError, match=r"^chunks: must be a whole number"):
        parse(PippyConfig, {"chunks": "x"})


@pytest.mark.parametrize(
    ("given", "understood"),
    [("24GiB", 24 << 30), (["16 GB", "512MiB"], [16 * 10**9, 512 << 20]), ({"1": "8GiB"}, {1: 8 << 30})],
)
def test_sizes_of_memory(model_dir: Path, given: Any, understood: Any) -> None:
    assert check(model_dir, pippy={"device_memory": given}).pippy.device_memory == understood
