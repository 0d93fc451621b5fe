"""Every setting of the package, in one typed place: the ``pippy:`` and ``handler:`` blocks of model-config.yaml.

Unknown keys are refused with the nearest right one; values are checked here and never rewritten afterwards.
TorchServe's own keys (``minWorkers`` …) are checked for their spelling, and for what hangs: the frontend reads them
itself.
Knows nothing of torch: dtypes are names here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError, field_validator

from ts_pippy_handler import hub
from ts_pippy_handler.errors import ConfigError
from ts_pippy_handler.json_files import read_object
from ts_pippy_handler.validation import describe_errors, nearest, show

DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "half": "float16",
}
"""Accepted dtype names and the torch name each stands for."""

DEPRECATED_KEYS = {"model_name": "model_path", "index_file_name": "index_filename"}
"""Spellings of upstream's README for keys of the ``handler`` block."""

FRONTEND_KEYS = frozenset(
    "minWorkers maxWorkers batchSize maxBatchDelay responseTimeout startupTimeout deviceType parallelType "
    "parallelLevel deviceIds torchrun maxRetryTimeoutInSec clientTimeoutInMills jobQueueSize useJobTicket "
    "sequenceMaxIdleMSec sequenceTimeoutMSec maxSequenceJobQueueSize maxNumSequence continuousBatching "
    "sequenceBatching asyncCommunication useVenv pt2".split()
)
"""Top-level keys that TorchServe 0.12 reads itself (frontend ``ModelConfig.java``, and ``pt2`` in its base handler)."""

TORCHRUN_KEYS = frozenset(
    "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-conf rdzv-id max-restarts "
    "monitor-interval node-rank OMP_NUMBER_THREADS".split()
)
"""Keys of the ``torchrun`` block that TorchServe 0.12 parses (frontend ``ModelConfig.TorchRun``)."""

_BATCH_TOKENS_CPU = 96
"""More make the others of a batch wait and gain nothing (docs/performance.md)."""
_BATCH_TOKENS_GPU = 512


def _whole_number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a whole number")
    return value


Model = TypeVar("Model", bound=BaseModel)

Int = Annotated[int, BeforeValidator(_whole_number)]
Float = Annotated[float, BeforeValidator(_whole_number)]
Size = Annotated[ByteSize, BeforeValidator(_whole_number), Field(gt=0)]


class PippyConfig(BaseModel):
    """The ``pippy:`` block: how the model is cut and how the ranks run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_type: Literal["HF"] = Field("HF", description="'HF', the only kind that can be split")
    """Kind of model. Only Hugging Face causal language models can be split."""
    chunks: Int | None = Field(None, ge=1, le=64)
    """Batches in flight at the same time; by default one per stage, so that every stage has work."""
    input_names: list[str] = Field(["input_ids"], description="a list of input names of the model")
    """Upstream's tracing arguments. Checked but no longer needed: attention and positions follow from the tokens."""
    rpc_timeout: Float = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds to wait for the other ranks to appear at start, and for a control call to be answered."""
    num_worker_threads: Int = Field(4, ge=1, le=1024)
    """Threads of each rank's RPC agent. It carries control messages only, so a few are enough."""
    split: Literal["time", "memory"] | list[Int] = Field(
        "time", description="'time', 'memory' or a list of the number of layers of each stage"
    )
    """Where to cut: stages equal in predicted time, for two prompt tokens to each new one (time), equal in weights
    (memory), or the number of layers of each stage. ``ts-pippy plan`` shows the cut and says why it is there."""
    device_memory: Literal["measured"] | Size | list[Size] | dict[Int, Size] | None = Field(
        None, description="'measured', a size such as 24GiB, a list of a size for each rank, or a map of ranks to sizes"
    )
    """Memory that weights, cache and computing of a stage may take; no stage then gets more layers than fit, and a
    model that fits no split is refused before its weights are read. A size is in bytes, or a text such as 24GiB or
    16GB, and is taken as it is. Measured, as for ranks that a map does not name: nine tenths of what is free on the
    rank's device when it starts, divided equally among the ranks that share it (on CPUs all ranks of a host)."""
    block_size: Int = Field(16, ge=1, le=1024)
    """Tokens per block of the key/value cache."""
    kv_cache_tokens: Int | None = Field(None, ge=1)
    """Tokens the key/value cache of every stage holds. By default what a quarter of the free memory of the
    smallest rank holds, with ``device_memory`` what weights and computing leave of it; at most what
    ``max_running_requests`` full windows need."""
    prefix_caching: bool = True
    """Whether requests that begin with the same tokens share their cache, in whole blocks: what one computed, running
    or finished, later ones need not. How fast a first token comes may tell a client what others asked."""
    max_batch_tokens: Int | None = Field(None, ge=1)
    """Prompt and decode tokens in one batch; longer prompts run in chunks. By default 96 on CPUs, which are busy with
    as many, and 512 on GPUs."""
    max_running_requests: Int = Field(64, ge=1)
    """Requests generating at the same time; more wait."""
    max_waiting_requests: Int = Field(256, ge=0)
    """Requests that may wait; more are refused with status 429."""
    step_timeout: Float = Field(120.0, gt=0, allow_inf_nan=False)
    """Seconds a rank may work on one batch. After that it counts as stuck: the stacks of all ranks are logged, and the
    ranks are started anew."""
    heartbeat_timeout: Float = Field(5.0, ge=1, allow_inf_nan=False)
    """Seconds without a heartbeat after which a rank counts as stopped or cut off, and the ranks are started anew. A
    thread of its own sends them, also while a rank computes."""
    threads_per_rank: Int | None = Field(None, ge=1)
    """Compute threads of each rank; by default the cores of this host divided among its ranks."""
    pack_weights: bool = True
    """Whether linear layers on a CPU keep their weights in the layout of faster kernels: about twice as fast, equal up
    to rounding. False computes with the kernels of plain torch."""
    native_linear: bool = True
    """Whether those kernels may be our own, compiled with the machine's C compiler while loading (under a second): in
    float32 on processors with AVX2 and no AVX-512, where they are faster. False, or no compiler: oneDNN's."""
    native_attention: bool = True
    """Whether attention of decode rows on a CPU is compiled with the machine's C compiler while loading (under a
    second), in float32 and where that is faster; equal up to rounding. False, or no compiler: torch's kernels."""
    compile: bool = False
    """Whether stages are compiled by torch.compile while loading: minutes the first time, seconds when the compiled
    code is found on disk. Needs a C++ compiler on a CPU. See docs/performance.md for what it gains."""
    trace_cache: bool = True
    """Whether the traced model is kept in the user's cache directory, so that its next start skips tracing. The weights
    are not part of it."""
    interface: str | None = None
    """Network interface the ranks talk over: its name, its IPv4 address, or its network such as 10.0.0.0/24, which is
    right on every host. Loopback by default. A trusted network only, since RPC executes what a peer sends."""

    def batch_tokens(self, *, on_cpu: bool) -> int:
        """Return ``max_batch_tokens``, or its default for the kind of device."""
        return self.max_batch_tokens or (_BATCH_TOKENS_CPU if on_cpu else _BATCH_TOKENS_GPU)

    def batches_in_flight(self, world_size: int) -> int:
        """Return ``chunks``, or its default: one batch for each stage."""
        return self.chunks or world_size

    def declared_memory(self, rank: int) -> int | None:
        """Return the bytes that ``device_memory`` declares for a rank, or None where they are measured."""
        declared = self.device_memory
        if isinstance(declared, list):
            return declared[rank]
        if isinstance(declared, dict):
            return declared.get(rank)
        return declared if isinstance(declared, int) else None

    @field_validator("input_names")
    @classmethod
    def _known_inputs(cls, names: list[str]) -> list[str]:
        allowed = {"input_ids", "attention_mask", "position_ids"}
        for name in names:
            if name not in allowed:
                raise ValueError(f"unknown model input {name!r}; {nearest(name, allowed)}")
        return names

    @field_validator("split")
    @classmethod
    def _positive_split(cls, split: str | list[int]) -> str | list[int]:
        if isinstance(split, list) and (not split or min(split) < 1):
            raise ValueError("must be 'time', 'memory' or a list of at least one layer per stage")
        return split

    @field_validator("device_memory")
    @classmethod
    def _some_memory(cls, memory: object) -> object:
        if isinstance(memory, (list, dict)) and not memory:
            raise ValueError("names no rank; leave it out for no limit")
        if isinstance(memory, dict) and min(memory) < 0:
            raise ValueError("ranks count from 0")
        return memory


class HandlerConfig(BaseModel):
    """The ``handler:`` block: which model, and the defaults and limits of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model_path: str
    """Directory of the Hugging Face checkpoint: config.json, weights, and a tokenizer where text is used; or its id on
    the hub, ``ORGANISATION/NAME``, which is looked for in the hub's cache on this machine."""
    revision: str | None = None
    """Branch, tag or commit of a model named by its id; by default the main branch."""
    download: bool = False
    """Whether a model named by its id may be fetched from the hub where the cache lacks it."""
    index_filename: str | None = None
    """Index of a sharded checkpoint, relative to ``model_path``; found by itself when absent."""
    dtype: str | None = None
    """float32, float16 or bfloat16 (or fp32, fp16, bf16); by default the checkpoint's own."""
    max_length: Int | None = Field(None, ge=1)
    """Longest prompt in tokens; longer ones are refused with status 400, never cut. By default the model's window."""
    max_new_tokens: Int = Field(256, ge=1)
    """New tokens when a request does not say."""
    manual_seed: Int | None = Field(None, ge=0, lt=2**63)
    """Seed of sampled requests that bring none; without it every request draws its own."""
    request_timeout: Float | None = Field(600.0, gt=0, allow_inf_nan=False)
    """Seconds a request may take from its arrival, waiting included; None for no limit. Then it ends with the tokens it
    has and the finish reason ``abort``; a request may ask for less with ``timeout``."""
    drain_timeout: Float = Field(120.0, gt=0, allow_inf_nan=False)
    """Seconds that accepted requests have to finish once the model is drained (``ts-pippy drain``, or SIGUSR1 to
    rank 0); then they end with what they have and the finish reason ``abort``."""
    max_stop_strings: Int = Field(16, ge=0, le=64)
    """Stop strings of one request; more are refused with status 400."""
    max_choices: Int = Field(32, ge=1, le=128)
    """Continuations of one prompt (``n``); more are refused with status 400."""
    max_response_size: Int = Field(6_553_500, ge=65_536)
    """Bytes of an answer; the same as ``max_response_size`` of TorchServe's config.properties, which a handler is not
    told. TorchServe ends a worker that sends more, so a larger answer is replaced by an error with status 400."""
    grpc_streaming: bool = False
    """Whether gRPC clients may stream (in spawn mode). The frontend does not say which call a request came by, and a
    stream as the answer to ``Predictions`` instead of ``StreamPredictions`` ends the worker: allow it to clients that
    know the difference."""
    trust_remote_code: bool = False
    """Whether Python code shipped inside the checkpoint may run."""

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, name: str | None) -> str | None:
        if name is not None and name not in DTYPES:
            raise ValueError(f"unknown dtype; {nearest(name, DTYPES)}")
        return name

    @field_validator("model_path")
    @classmethod
    def _existing_model(cls, path: str) -> str:
        if not Path(path).is_dir():
            raise ValueError("not a directory; give the path of a downloaded Hugging Face checkpoint")
        if not (Path(path) / "config.json").is_file():
            raise ValueError("the directory holds no config.json, so it is not a Hugging Face checkpoint")
        return path

    @property
    def torch_dtype_name(self) -> str | None:
        """Torch's name of the configured dtype, or None for the checkpoint's own."""
        return None if self.dtype is None else DTYPES[self.dtype]


class ServingConfig(BaseModel):
    """Both blocks, checked together."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pippy: PippyConfig = PippyConfig()
    handler: HandlerConfig


def load_config(mapping: Mapping[str, Any] | None, *, model_dir: str | None = None) -> ServingConfig:
    """Check a parsed model-config.yaml and return its settings.

    Args:
        mapping: The whole file as TorchServe hands it to a handler (``context.model_yaml_config``).
        model_dir: Directory of the extracted archive; a relative ``handler.model_path`` is looked up there.

    Raises:
        ConfigError: Naming the path of each wrong key, the value seen, and what is allowed.
    """
    if not isinstance(mapping, Mapping) or not mapping:
        raise ConfigError("model-config.yaml is empty or missing: the keys 'handler' and 'pippy' are read from it")
    _check_top_level(mapping)
    pippy = _block(mapping, "pippy", required=False)
    handler = _block(renamed(mapping), "handler", required=True)
    path = handler.get("model_path")
    if model_dir is not None and isinstance(path, str) and not Path(path).is_absolute():
        inside = Path(model_dir) / path
        handler["model_path"] = path if hub.is_id(path) and not inside.is_dir() else str(inside)
    handler = locate(handler)
    if pippy.get("model_type", "HF") in (None, ""):
        raise ConfigError(f"pippy.model_type: only 'HF' can be split, got {show(pippy['model_type'])}")
    return ServingConfig(pippy=parse(PippyConfig, pippy, "pippy"), handler=parse(HandlerConfig, handler, "handler"))


def locate(handler: dict[str, Any]) -> dict[str, Any]:
    """Return the ``handler`` block with the directory of the model in the place of its id.

    Raises:
        ConfigError: If there is none, or a directory is given together with a revision.
    """
    path, revision, download = handler.get("model_path"), handler.get("revision"), handler.get("download", False)
    if not isinstance(path, str) or not isinstance(revision, str | None) or not isinstance(download, bool):
        return handler  # its own check says what is wrong
    if Path(path).is_dir() or not hub.is_id(path):
        if revision is not None:
            raise ConfigError(
                f"handler.revision: {show(revision)} is for a model named by its id, "
                f"but handler.model_path is {show(path)}"
            )
        return handler
    return {**handler, "model_path": hub.find(path, revision, download=download), "revision": None}


def parse(model: type[Model], values: Mapping[str, Any], prefix: str = "") -> Model:
    """Validate ``values`` as ``model``.

    Raises:
        ConfigError: Naming every wrong key under ``prefix``.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(describe_errors(error, model, values, prefix)) from None


def _check_top_level(mapping: Mapping[str, Any]) -> None:
    allowed = FRONTEND_KEYS | {"pippy", "handler"}
    for key in mapping:
        if str(key) not in allowed and not str(key).startswith("x-"):
            raise ConfigError(
                f"{key}: unknown key (value {show(mapping[key])}); {nearest(key, allowed)} "
                "(a block of your own handler may be named x-…)"
            )
    torchrun = _block(mapping, "torchrun", required=False)
    for key, value in torchrun.items():
        if key not in TORCHRUN_KEYS:
            raise ConfigError(f"torchrun.{key}: unknown key (value {show(value)}); {nearest(key, TORCHRUN_KEYS)}")
    _check_workers(mapping)


def _check_workers(mapping: Mapping[str, Any]) -> None:
    """Refuse several workers under continuous batching, where each stops the requests of the others.

    A worker of TorchServe 0.12 that waits for its first request holds the lock of the model's queue, which a worker
    with open requests needs for each further pass (``Model.pollInferJob`` of its frontend).
    """
    if mapping.get("continuousBatching") is not True:
        return
    for key in ("minWorkers", "maxWorkers"):
        value = mapping.get(key)
        if isinstance(value, int) and value > 1:
            raise ConfigError(
                f"{key}: {value} workers with continuousBatching make each other's requests stand still in "
                "TorchServe 0.12, whose idle worker holds the lock that a busy one needs; set minWorkers and "
                "maxWorkers to 1, or serve in spawn mode (asyncCommunication), which may have several"
            )


def _block(mapping: Mapping[str, Any], name: str, *, required: bool) -> dict[str, Any]:
    block = mapping.get(name)
    if block is None:
        if required:
            raise ConfigError(f"{name}: missing; the block must give at least model_path")
        return {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"{name}: must be a block of keys, got {show(block)}")
    return dict(block)


def renamed(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parsed model-config.yaml with deprecated keys under their present names; warns of each.

    Raises:
        ConfigError: If a key is there under both names.
    """
    if mapping.get("handler") is None:
        return dict(mapping)
    handler = _block(mapping, "handler", required=False)
    for old, new in DEPRECATED_KEYS.items():
        if old not in handler:
            continue
        if new in handler:
            raise ConfigError(f"handler.{old}: the same as handler.{new}, which is there too; keep handler.{new} only")
        warnings.warn(f"handler.{old} is deprecated, write handler.{new}", DeprecationWarning, stacklevel=3)
        handler[new] = handler.pop(old)
    return {**mapping, "handler": handler}


def written_config(model_path: str) -> dict[str, Any]:
    """Return a checkpoint's config.json as it stands.

    Raises:
        CheckpointError: If the file is missing or no JSON object.
    """
    return read_object(Path(model_path) / "config.json")


def written_layers(model_path: str) -> int | None:
    """Return the number of layers that a checkpoint's config.json says, under one of its usual names; None without one.

    Raises:
        CheckpointError: If the file is missing or no JSON object.
    """
    written = written_config(model_path)
    found = next((written[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if key in written), None)
    return found if isinstance(found, int) else None
