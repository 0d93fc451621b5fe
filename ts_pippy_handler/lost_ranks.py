"""Start the watchdog of a loaded group, and end what cannot go on.

Knows who is told of a verdict in each launch mode; :mod:`~ts_pippy_handler.watchdog` knows how it is found.
"""

from __future__ import annotations

import logging

import msgspec

from ts_pippy_handler import process, ranks
from ts_pippy_handler.config import PippyConfig
from ts_pippy_handler.engine import Engine
from ts_pippy_handler.errors import LoadError, PipelineError
from ts_pippy_handler.loading import LoadedRank
from ts_pippy_handler.watchdog import Hub, Invitation, Limits, Member, OnVerdict, Verdict

logger = logging.getLogger(__name__)


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
    group, place = loaded.group, loaded.group.place
    limits = Limits(silence_s=config.heartbeat_timeout, step_s=config.step_timeout, join_s=config.rpc_timeout)
    monitor: Hub | Member
    if place.rank == 0:
        monitor = Hub(ranks.own_address(), place.world_size, loaded.pulse, limits, on_verdict)
        group.hand_out("watchdog", [msgspec.json.encode(monitor.invitation)] * place.world_size)
    else:
        invitation = msgspec.json.decode(group.receive("watchdog", config.rpc_timeout), type=Invitation)
        try:
            monitor = Member(place.rank, invitation, loaded.pulse, limits, on_verdict)
        except OSError as error:
            raise LoadError(f"rank 0 takes no heartbeats at {invitation.address}:{invitation.port}: {error}") from error
    group.before_leaving.append(monitor.close)
    monitor.start()
