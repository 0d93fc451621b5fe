"""The ranks of several hosts introduce themselves, before they trust each other with a model.

torchrun numbers hosts by their names, and TorchServe answers from the first rank of its own host. So the host that
serves comes first here, whatever torchrun said; the others follow in its order. What a host lacks or has otherwise than
the others is told on all of them, within seconds.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ts_pippy_handler import identity, lost_ranks, ranks
from ts_pippy_handler.config import ServingConfig
from ts_pippy_handler.errors import ConfigError, LoadError, PippyError, one_line
from ts_pippy_handler.heartbeat import own_host
from ts_pippy_handler.ranks import Group, Place

logger = logging.getLogger(__name__)


class Introduction(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others of itself and its host."""

    host: str
    """Its name, for people."""
    host_id: str
    """Different for any two hosts."""
    address: str = ""
    serves: bool
    """Whether TorchServe is there."""
    facts: dict[str, str] = {}
    error: str | None = None
    """Why it cannot take part."""

    def __str__(self) -> str:
        return self.host + (f" ({self.address})" if self.address else "")


@dataclass(frozen=True, kw_only=True)
class Guest:
    """How a host that does not serve came to the meeting."""

    rendezvous_host: str
    """Where it reached torchrun's rendezvous."""


def join(place: Place, config: ServingConfig, guest: Guest | None = None) -> Group:
    """Bring this rank together with all others, of which some may be on other hosts.

    Args:
        place: As torchrun says; the group that is returned knows the right one.
        config: The checked configuration.
        guest: None where TorchServe or a script of the user's serves.

    Raises:
        ConfigError: On every rank, if the hosts do not fit together.
        LoadError: Naming the ranks that did not appear within ``pippy.rpc_timeout``.
    """
    if not place.spans_hosts:
        return ranks.join(place, config.pippy)
    store = ranks.open_store(place, config.pippy.rpc_timeout, None if guest is None else guest.rendezvous_host)
    group = Group(place, store)
    own = msgspec.to_builtins(_introduction(config, serves=guest is None))
    seen = [
        msgspec.convert(each, Introduction)
        for each in group.wait_for_all("introduction", own, config.pippy.rpc_timeout)
    ]
    check(seen)
    places = order(seen)
    ranks.renumber(group, places.index(place.rank))
    logger.info(
        "rank %d: %s; the ranks' hosts are %s",
        group.place.rank,
        seen[place.rank],
        ", ".join(str(seen[rank]) for rank in places),
    )
    lost_ranks.watch_loading(group, config.pippy)
    ranks.connect(group, config.pippy)
    return group


def order(seen: Sequence[Introduction]) -> list[int]:
    """Return torchrun's ranks in the order of the stages: those that serve first."""
    return sorted(range(len(seen)), key=lambda rank: (not seen[rank].serves, rank))


def check(seen: Sequence[Introduction]) -> None:
    """Check that the hosts fit together.

    Args:
        seen: Of each rank, in torchrun's order.

    Raises:
        LoadError: If a rank cannot take part.
        ConfigError: Naming the hosts, and what they do not have in common.
    """
    hosts: dict[str, Introduction] = {}
    for rank in order(seen):
        hosts.setdefault(seen[rank].host_id, seen[rank])
    found = list(hosts.values())  # one rank of each, that which serves first
    failed = {str(each): f"{each}: {each.error}" for each in seen if each.error is not None}
    if failed:
        raise LoadError("; ".join(failed.values()))
    if not any(each.serves for each in found):
        raise ConfigError(
            f"all hosts ({_names(found)}) run ts-pippy rank, but none serves; "
            "is torchrun.nnodes of TorchServe's model the number of all hosts?"
        )
    if len(found) > 1 and (deaf := [each for each in found if each.address.startswith("127.")]):
        raise ConfigError(
            f"the ranks are on {len(found)} hosts, {_names(found)}, but on {_names(deaf)} they would talk over "
            "loopback alone; set pippy.interface to the name, address or network of an interface that the hosts share, "
            "such as eth1 or 10.0.0.0/24"
        )
    facts: list[tuple[str, Mapping[str, str]]] = [(str(each), each.facts) for each in found]
    if (different := identity.differences(facts)) is not None:
        raise ConfigError(f"the hosts do not serve the same: {different}")


def _names(hosts: Sequence[Introduction]) -> str:
    return ", ".join(map(str, hosts))


def _introduction(config: ServingConfig, *, serves: bool) -> Introduction:
    """Return what this rank says; an error of its own is said too, for the others must not wait for it."""
    own = Introduction(host=socket.gethostname(), host_id=own_host(), serves=serves)
    try:
        own = msgspec.structs.replace(own, address=ranks.bind(config.pippy.interface).address)
        return msgspec.structs.replace(own, facts=identity.facts(config))
    except (PippyError, OSError) as error:
        return msgspec.structs.replace(own, error=str(error) if isinstance(error, PippyError) else one_line(error))
