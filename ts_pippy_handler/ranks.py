"""Who the ranks are, who starts them, how they find each other and how they end.

Two launch modes meet here and nowhere else: under ``torchrun`` TorchServe started all ranks and the rendezvous is in
the environment; in ``spawn`` mode rank 0 starts the others itself and hosts the rendezvous on a port of its own. With
no rank variables and one stage there is nothing to join. This is the only module that reads rank variables.

Ranks never outlive rank 0 (see :mod:`~ts_pippy_handler.process`). Everything binds to loopback unless an interface is
configured.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist

from ts_pippy_handler import network
from ts_pippy_handler.config import PippyConfig
from ts_pippy_handler.errors import ConfigError, LoadError, PipelineError, PippyError, one_line
from ts_pippy_handler.process import PARENT_PID

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE = timedelta(days=3650)
"""A stage may wait this long for the next batch; ``transport`` bounds every other wait itself."""
_LEAVE_TIMEOUT_S = 5
_ASK_TIMEOUT_S = 10.0
_ROLL_CALL_TIMEOUT_S = 2.0
_STORE_POLL_S = 0.02
_OUTCOME_TIMEOUT_S = 3600.0
_FIND_TIMEOUT = timedelta(seconds=5)
_MEETING = "torch.rendezvous."
"""What the key of each rendezvous begins with in the store of torchrun's c10d backend."""
_GENERATION = "TS_PIPPY_GENERATION"


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process among the ranks."""

    rank: int
    """Global rank: which stage it runs."""
    local_rank: int
    """Rank on this host: which device it uses."""
    world_size: int
    local_world_size: int
    generation: int = 0
    """How often spawn mode has started the ranks anew."""

    @property
    def spans_hosts(self) -> bool:
        """Whether torchrun started ranks elsewhere, too."""
        return self.local_world_size < self.world_size

    @property
    def name(self) -> str:
        """Name of the rank's RPC agent, as upstream has it.

        RPC counts its meetings by the names that met, for the life of a process: a new generation needs new names.
        """
        return f"worker{self.rank}" + (f"-{self.generation}" if self.generation else "")


def place_from_environment() -> Place:
    """Return the place torchrun or :func:`spawn_peers` gave this process; alone when there are no rank variables."""
    environment = os.environ
    rank = int(environment.get("RANK", environment.get("LOCAL_RANK", "0")))
    world_size = int(environment.get("WORLD_SIZE", "1"))
    return Place(
        rank=rank,
        local_rank=int(environment.get("LOCAL_RANK", rank)),
        world_size=world_size,
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", world_size)),
        generation=int(environment.get(_GENERATION, "0")),
    )


def device_of(place: Place) -> torch.device:
    """Return the GPU of the local rank, or the CPU where there is none."""
    count = torch.cuda.device_count()
    return torch.device("cuda", place.local_rank % count) if count else torch.device("cpu")


def num_sharing(place: Place) -> int:
    """Return how many ranks of this host compute on the device of ``place``, itself included."""
    count = torch.cuda.device_count()
    if not count:
        return place.local_world_size
    return len(range(place.local_rank % count, place.local_world_size, count))


def set_threads(place: Place, threads_per_rank: int | None) -> int:
    """Set torch's compute threads from the configuration or from the cores this host's ranks share; return them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = threads_per_rank or max(1, cores // place.local_world_size)
    torch.set_num_threads(threads)
    return threads


def describe() -> dict[str, Any]:
    """Return what this process is: its id, and the device of its stage."""
    return {"pid": os.getpid(), "device": str(device_of(place_from_environment()))}


@dataclass
class Group:
    """The ranks that found each other. ``store`` is None for a single rank that needs no one."""

    place: Place
    store: dist.Store | None = None
    peers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    before_leaving: list[Callable[[], None]] = field(default_factory=list)
    """Called once, before anything of the group is left."""
    _is_joined: bool = False

    def wait_for_all(self, key: str, value: object, timeout_s: float = _OUTCOME_TIMEOUT_S) -> list[Any]:
        """Publish ``value`` under ``key`` and return every rank's, in order.

        Raises:
            LoadError: Naming the ranks that did not publish theirs in time, or died.
        """
        if self.store is None:
            return [value]
        self.store.set(f"ts_pippy/{key}/{self.place.rank}", json.dumps(value))
        keys = [f"ts_pippy/{key}/{rank}" for rank in range(self.place.world_size)]
        deadline = time.monotonic() + timeout_s
        while not self.store.check(keys):
            dead = [str(process.pid) for process in self.peers if process.poll() is not None]
            missing = [rank for rank in range(self.place.world_size) if not self.store.check([keys[rank]])]
            if dead and missing:
                raise LoadError(f"ranks {missing} ended before they were ready (pids {', '.join(dead)})")
            if time.monotonic() > deadline:
                raise LoadError(f"ranks {missing} of {self.place.world_size} did not appear within {timeout_s:g} s")
            time.sleep(_STORE_POLL_S)
        return [json.loads(self.store.get(each)) for each in keys]

    def hand_out(self, key: str, values: Sequence[bytes]) -> None:
        """Give every other rank its own value, by :meth:`receive`."""
        if self.store is not None:
            for rank, value in enumerate(values):
                self.store.set(f"ts_pippy/{key}/{rank}", value)  # type: ignore[arg-type]  # bytes are taken too

    def receive(self, key: str, timeout_s: float = _OUTCOME_TIMEOUT_S) -> bytes:
        """Wait for this rank's value.

        Raises:
            LoadError: If it does not come in time.
        """
        assert self.store is not None
        own = f"ts_pippy/{key}/{self.place.rank}"
        deadline = time.monotonic() + timeout_s
        while not self.store.check([own]):
            if time.monotonic() > deadline:
                raise LoadError(f"rank 0 did not send {key} within {timeout_s:g} s")
            time.sleep(_STORE_POLL_S)
        value: bytes = self.store.get(own)
        return value

    def outcome(self, key: str, error: BaseException | None, timeout_s: float = _OUTCOME_TIMEOUT_S) -> None:
        """Share whether this rank succeeded, and fail on all ranks if one did not.

        Raises:
            LoadError: With the reason of every rank that failed.
        """
        seen = self.wait_for_all(key, None if error is None else _account(error), timeout_s)
        failed: dict[str, list[str]] = {}
        for rank, reason in enumerate(seen):
            if reason is not None:
                failed.setdefault(reason, []).append(str(rank))
        if failed:
            parts = [f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {reason}" for reason, who in failed.items()]
            raise LoadError("; ".join(parts)) from error

    def fail(self, error: BaseException) -> None:
        """Leave the reason of this rank's failure where the others find it."""
        self.blame(f"rank {self.place.rank}: {_account(error)}")

    def blame(self, reason: str) -> None:
        """Leave a reason why the group cannot go on where its ranks find it."""
        if self.store is not None:
            self.store.set("ts_pippy/failure", reason)

    def failure(self) -> str | None:
        """Return the reason a rank left before it went, if any."""
        try:
            if self.store is not None and self.store.check(["ts_pippy/failure"]):
                return self.store.get("ts_pippy/failure").decode()
        except RuntimeError:  # the store went with its host
            pass
        return None

    def ask(self, function: Callable[..., T], *arguments: object, timeout_s: float = _ASK_TIMEOUT_S) -> list[T]:
        """Have every rank call a module's function, this one included; return what it says on each, in order.

        By RPC, beside the batches: from any thread, and also while a stage computes.

        Raises:
            PipelineError: If a rank is gone or does not answer in time.
        """
        own = self.place.rank
        if self.place.world_size == 1:
            return [function(*arguments)]
        from torch.distributed import rpc

        try:
            answers = {
                rank: rpc.rpc_async(replace(self.place, rank=rank).name, function, args=arguments, timeout=timeout_s)
                for rank in range(self.place.world_size)
                if rank != own
            }
            return [
                function(*arguments) if rank == own else answers[rank].wait() for rank in range(self.place.world_size)
            ]
        except RuntimeError as error:
            raise PipelineError(f"a rank did not answer {function.__name__!r}: {one_line(error, 200)}") from error

    def roll_call(self, timeout_s: float = _ROLL_CALL_TIMEOUT_S) -> list[dict[str, Any] | None]:
        """Return process id and device of every rank, in order; None for one that is gone or does not answer."""
        from torch.distributed import rpc

        own = self.place.rank
        asked: dict[int, Any] = {}
        for rank in range(self.place.world_size):
            if rank != own:
                with contextlib.suppress(RuntimeError):
                    asked[rank] = rpc.rpc_async(replace(self.place, rank=rank).name, describe, timeout=timeout_s)
        found: list[dict[str, Any] | None] = []
        for rank in range(self.place.world_size):
            answer: dict[str, Any] | None = None
            with contextlib.suppress(RuntimeError):
                answer = describe() if rank == own else asked[rank].wait() if rank in asked else None
            found.append(answer)
        return found

    def stop_watching(self) -> None:
        """Do what is to be done before anything of the group is left."""
        while self.before_leaving:
            self.before_leaving.pop()()

    def leave(self, *, is_broken: bool = False) -> None:
        """Leave the groups and end the peers this rank started; nothing of them remains.

        Args:
            is_broken: Whether peers may be dead; otherwise all ranks leave RPC together, which keeps the log quiet.
        """
        self.stop_watching()
        if is_broken:
            kill(self.peers)
        if self._is_joined:
            self._is_joined = False
            # Leaving together counts the groups that a process ever had; a rank that was started anew has had fewer
            # than rank 0, and both would wait for each other until the store's timeout.
            together = not is_broken and self.place.generation == 0
            with contextlib.suppress(RuntimeError):  # a peer that died meanwhile
                torch.distributed.rpc.shutdown(graceful=together, timeout=_LEAVE_TIMEOUT_S)
            dist.destroy_process_group()
        for process in self.peers:
            try:
                process.wait(_LEAVE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                kill([process])
        self.peers = []
        self.store = None


def open_store(place: Place, timeout_s: float, rendezvous_host: str | None = None) -> dist.Store:
    """Connect to the rendezvous store named by the environment.

    Args:
        place: This rank.
        timeout_s: How long to try.
        rendezvous_host: Where this host reached torchrun's rendezvous. torchrun names the store's host as that one
            calls itself, which others need not be able to resolve.

    Raises:
        LoadError: If nobody answers there in time.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        raise ConfigError(f"WORLD_SIZE is {place.world_size}, but MASTER_ADDR and MASTER_PORT do not say where to meet")
    if rendezvous_host is not None:
        address = network.first_to_answer([address, rendezvous_host], int(port), timeout_s)
    try:
        store = dist.TCPStore(
            address,
            int(port),
            is_master=False if _has_agent_store() else place.rank == 0,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        raise LoadError(
            f"rank {place.rank} of {place.world_size}: no rendezvous at {address}:{port} within {timeout_s:g} s"
        ) from error
    # A restarted group must not read what the group before it left in torchrun's store.
    return dist.PrefixStore(f"ts_pippy_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def find_meetings(host: str, port: int) -> list[str]:
    """Return the ids of the rendezvous of a torchrun that listens there; none if it does not, or has none yet."""
    with contextlib.suppress(RuntimeError):
        store = dist.TCPStore(host, port, is_master=False, timeout=_FIND_TIMEOUT, wait_for_workers=False)
        return sorted(key.removeprefix(_MEETING) for key in store.list_keys() if key.startswith(_MEETING))
    return []


def _has_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join(place: Place, config: PippyConfig, store: dist.Store | None = None) -> Group:
    """Bring this rank into RPC and the process group with all others.

    Raises:
        LoadError: Naming the ranks that did not appear within ``pippy.rpc_timeout``.
    """
    if place.world_size == 1:
        return Group(place)
    group = Group(place, store or open_store(place, config.rpc_timeout))
    bind(config.interface)
    group.wait_for_all("present", os.getpid(), config.rpc_timeout)
    connect(group, config)
    return group


def renumber(group: Group, rank: int) -> None:
    """Give this rank another number than torchrun did, before it is connected to the others."""
    group.place = replace(group.place, rank=rank)
    os.environ["RANK"] = str(rank)  # of which this process may be asked again


def connect(group: Group, config: PippyConfig) -> None:
    """Bring this rank into RPC and the process group with all others, who know their places."""
    from torch.distributed import autograd, rpc

    place = group.place
    assert group.store is not None
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("groups", group.store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=_IDLE,
    )
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=config.num_worker_threads,
        rpc_timeout=config.rpc_timeout,
        # The default shared-memory transport keeps a core busy on every idle rank.
        _transports=["uv"],
    )
    # What init_rpc does, but it would put a count of its calls in this process into the store's keys, and a peer that
    # was started anew cannot know that count.
    autograd._init(place.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own start-up calls what torch has deprecated
        rpc._init_rpc_backend(
            backend=rpc.BackendType.TENSORPIPE,  # type: ignore[attr-defined]
            store=dist.PrefixStore("rpc", group.store),
            name=place.name,
            rank=place.rank,
            world_size=place.world_size,
            rpc_backend_options=options,
        )
    group._is_joined = True


def bind(interface: str | None) -> network.Interface:
    """Make gloo, nccl and TensorPipe use one interface: loopback, or the configured one; return it.

    Raises:
        ConfigError: If it is not there.
    """
    found = network.find_interface(interface)
    # nccl alone takes a name for the beginning of one, unless told not to.
    variables = {"GLOO_SOCKET_IFNAME": "", "TP_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
    for variable, prefix in variables.items():
        os.environ[variable] = prefix + found.name
    if not found.is_loopback:
        logger.warning(
            "ranks listen on %s, interface %s: whoever reaches its ports can run code in them",
            found.address,
            found.name,
        )
    return found


def own_address() -> str:
    """Return the IPv4 address of this host that the other ranks reach: that of the interface the ranks talk over."""
    return network.find_interface(os.environ.get("GLOO_SOCKET_IFNAME")).address


def host_store(world_size: int, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """Host a rendezvous store on a loopback port chosen by the system; return it and the port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(world_size * 2)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
    return store, port


def spawn_peers(
    world_size: int, config: PippyConfig, job: str, stdout: IO[Any] | int | None = None, generation: int = 0
) -> Group:
    """Start ranks 1 … ``world_size - 1`` as children of this process, which becomes rank 0, and join them.

    Args:
        world_size: Number of ranks.
        config: Timeouts, threads and interface.
        job: What the children do, as text for ``ts_pippy_handler.worker``'s standard input.
        stdout: Where the children print; by default where this process does.
        generation: How many groups this process has started before.

    Raises:
        LoadError: If a child ends early or does not appear.
    """
    place = Place(rank=0, local_rank=0, world_size=world_size, local_world_size=world_size, generation=generation)
    if world_size == 1:
        return Group(place)
    store, port = host_store(world_size, config.rpc_timeout)
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        _GENERATION: str(generation),
    }
    group = Group(place, dist.PrefixStore("ts_pippy_0", store))
    try:
        group.peers = [_start(rank, rendezvous, job, stdout) for rank in range(1, world_size)]
        bind(config.interface)
        group.wait_for_all("present", os.getpid(), config.rpc_timeout)
        connect(group, config)
    except BaseException:
        kill(group.peers)
        raise
    return group


def _start(rank: int, rendezvous: Mapping[str, str], job: str, stdout: IO[Any] | int | None) -> subprocess.Popen[bytes]:
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), PARENT_PID: str(os.getpid())}
    process = subprocess.Popen(
        [sys.executable, "-m", "ts_pippy_handler.worker"],
        env={**os.environ, **rendezvous, **own},
        stdin=subprocess.PIPE,
        stdout=stdout,
    )
    assert process.stdin is not None
    process.stdin.write(job.encode())
    process.stdin.close()
    return process


def kill(peers: Sequence[subprocess.Popen[bytes]]) -> None:
    """End child ranks at once and reap them."""
    for process in peers:
        process.kill()
    for process in peers:
        process.wait()


def _account(error: BaseException) -> str:
    """Return an error's text; errors that are not ours may say little without their name."""
    return str(error) if isinstance(error, PippyError) else f"{type(error).__name__}: {one_line(error)}"


def lost(group: Group, error: BaseException) -> PipelineError:
    """Return the best account of why the pipeline broke: a rank's own last words before the symptom seen here."""
    return PipelineError(group.failure() or str(error))
