"""Which network interface the ranks of a host talk over, and whether another host can be reached.

Knows interfaces and addresses; no torch and no ranks.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from ts_pippy_handler.errors import ConfigError

RENDEZVOUS_PORT = 29400
"""Where torchrun meets by default."""
_PROBE_S = 2.0
_PROBE_PAUSE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface of this host."""

    name: str
    address: str
    """Its IPv4 address."""

    @property
    def is_loopback(self) -> bool:
        """Whether no other host can reach it."""
        return ipaddress.ip_address(self.address).is_loopback


def find_interface(wanted: str | None) -> Interface:
    """Return the interface of this host that ``pippy.interface`` means; loopback for None.

    Args:
        wanted: Name of an interface (``eth1``), its IPv4 address, or the network it is in (``10.0.0.0/24``), which
            means the right interface on every host, whatever its name there.

    Raises:
        ConfigError: If there is none, naming those that there are.
    """
    present = _present()
    if wanted is None:
        return next((one for one in present if one.is_loopback), Interface(name="lo", address="127.0.0.1"))
    network = _network(wanted)
    for one in present:
        if one.name == wanted or (network is not None and ipaddress.ip_address(one.address) in network):
            return one
    what = f"there is no {wanted!r} here" if network is None else f"no interface here has an address in {network}"
    if network is None and wanted in psutil.net_if_addrs():
        what = f"{wanted!r} has no IPv4 address"
    there = ", ".join(f"{one.name} ({one.address})" for one in present)
    raise ConfigError(f"pippy.interface: {what}, only {there or 'interfaces without an IPv4 address'}")


def _present() -> list[Interface]:
    return [
        Interface(name=name, address=each.address)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET
    ]


def _network(text: str) -> ipaddress.IPv4Network | None:
    with contextlib.suppress(ValueError):
        return ipaddress.IPv4Network(text, strict=False)
    return None


def split_endpoint(endpoint: str, default_port: int) -> tuple[str, int]:
    """Return host and port of ``HOST[:PORT]``.

    Raises:
        ValueError: If it is none.
    """
    host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", str(default_port))
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"must be HOST or HOST:PORT, got {endpoint!r}")
    return host, int(port)


def answers(host: str, port: int, timeout_s: float = _PROBE_S) -> bool:
    """Whether something takes connections there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=timeout_s):
        return True
    return False


def first_to_answer(hosts: Sequence[str], port: int, timeout_s: float) -> str:
    """Return the first of ``hosts`` that takes connections at ``port``; the first of all if none does in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for host in hosts:
            if answers(host, port, max(0.1, min(_PROBE_S, deadline - time.monotonic()))):
                return host
        time.sleep(_PROBE_PAUSE_S)
    return hosts[0]


def address_towards(host: str, port: int) -> str | None:
    """Return this host's IPv4 address on the way to another; None if there is no way."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        address: str = probe.getsockname()[0]
        return address
    return None
