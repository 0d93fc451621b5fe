"""Start the watchdog of a loaded group, and end what cannot go on.

Knows who is told of a verdict in each launch mode; :mod:`~ts_pippy_handler.watchdog` knows how it is found.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import msgspec

from ts_pippy_handler import process, ranks
from ts_pippy_handler.config import PippyConfig
from ts_pippy_handler.engine import Engine
from ts_pippy_handler.errors import LoadError, PipelineError
from ts_pippy_handler.heartbeat import Pulse
from ts_pippy_handler.loading import LoadedRank
from ts_pippy_handler.ranks import Group
from ts_pippy_handler.watchdog import Hub, Invitation, Limits, Member, OnVerdict, Verdict

logger = logging.getLogger(__name__)

_LOADING_SILENCE_S = 30.0
"""Reading weights may keep the thread that sends heartbeats from running for seconds."""


def end_rank(verdict: Verdict) -> None:
    """End the rank that the verdict names, if it is on this host, and this process.

    Where torchrun started the ranks it ends the others, and TorchServe starts all anew; TorchServe also starts a rank 0
    anew that had started the others.
    """
    logger.error("the ranks end, because of %s", verdict)
    verdict.kill()
    process.end_process(1)


def end_child_of(engine: Engine) -> OnVerdict:
    """Return what rank 0 does about a verdict on a rank that it started itself: it starts the ranks anew.

    The engine may wait for that rank; its end closes the connection.
    """

    def end_child(verdict: Verdict) -> None:
        if verdict.rank == 0:
            end_rank(verdict)
        engine.loaded.group.blame(str(verdict))
        engine.report_lost(PipelineError(str(verdict)))
        verdict.kill()

    return end_child


def watch(loaded: LoadedRank, config: PippyConfig, on_verdict: OnVerdict = end_rank) -> None:
    """Watch the other ranks, together with them, until the group is left.

    Raises:
        LoadError: If rank 0 cannot be reached.
    """
    limits = Limits(silence_s=config.heartbeat_timeout, step_s=config.step_timeout, join_s=config.rpc_timeout)
    start = _monitor(loaded.group, loaded.pulse, limits, on_verdict, "watchdog")
    loaded.group.stop_watching()  # that of the time of loading
    start()


def watch_loading(group: Group, config: PippyConfig) -> None:
    """Watch the ranks of other hosts while all load, until :func:`watch` takes over.

    On one host the end of a process closes its connections; a network that is cut closes nothing.

    Raises:
        LoadError: If rank 0 cannot be reached.
    """
    silence_s = max(_LOADING_SILENCE_S, config.heartbeat_timeout)
    limits = Limits(silence_s=silence_s, step_s=math.inf, join_s=config.rpc_timeout)
    _monitor(group, Pulse(), limits, end_rank, "loading-watchdog")()


def _monitor(group: Group, pulse: Pulse, limits: Limits, on_verdict: OnVerdict, key: str) -> Callable[[], None]:
    """Make this rank's end of the watchdog, to be left with the group; return what starts it."""
    place = group.place
    monitor: Hub | Member
    if place.rank == 0:
        monitor = Hub(ranks.own_address(), place.world_size, pulse, limits, on_verdict)
        group.hand_out(key, [msgspec.json.encode(monitor.invitation)] * place.world_size)
    else:
        invitation = msgspec.json.decode(group.receive(key, limits.join_s), type=Invitation)
        try:
            monitor = Member(place.rank, invitation, pulse, limits, on_verdict)
        except OSError as error:
            raise LoadError(
                f"rank 0 takes no heartbeats at {invitation.address}:{invitation.port}: {error}; "
                "does a firewall stand between the hosts?"
            ) from error

    def start() -> None:
        group.before_leaving.append(monitor.close)
        monitor.start()

    return start
