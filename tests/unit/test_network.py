"""``pippy.interface`` means one interface on every host, and hosts that cannot be reached are told in time."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace

import pytest

from ts_pippy_handler import network
from ts_pippy_handler.errors import ConfigError

ADDRESSES = {"lo": ["127.0.0.1"], "eth0": ["192.168.1.5"], "eth1": ["10.0.0.3"], "wlan0": []}


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        name: [SimpleNamespace(family=socket.AF_INET, address=each) for each in addresses]
        for name, addresses in ADDRESSES.items()
    }
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: found)


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(
    ("wanted", "name"),
    [(None, "lo"), ("eth1", "eth1"), ("10.0.0.3", "eth1"), ("10.0.0.0/24", "eth1"), ("192.168.1.77/16", "eth0")],
)
def test_an_interface_is_meant_by_name_address_or_network(wanted: str | None, name: str) -> None:
    found = network.find_interface(wanted)
    assert (found.name, found.address) == (name, ADDRESSES[name][0])
    assert found.is_loopback == (wanted is None)


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ("eth9", "there is no 'eth9' here, only lo (127.0.0.1), eth0 (192.168.1.5), eth1 (10.0.0.3)"),
        ("10.1.0.0/24", "no interface here has an address in 10.1.0.0/24, only lo"),
        ("wlan0", "'wlan0' has no IPv4 address, only lo"),
    ],
)
def test_an_interface_that_is_not_here(wanted: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        network.find_interface(wanted)
    assert str(raised.value).startswith(f"pippy.interface: {reason}")


def test_endpoints() -> None:
    assert network.split_endpoint("10.0.0.1", 29400) == ("10.0.0.1", 29400)
    assert network.split_endpoint("host:5", 29400) == ("host", 5)
    for wrong in ("", ":5", "host:", "host:0", "host:70000", "host:x"):
        with pytest.raises(ValueError, match=r"^must be HOST or HOST:PORT, got "):
            network.split_endpoint(wrong, 29400)


def test_the_host_that_answers_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert network.answers("127.0.0.1", port)
        assert network.first_to_answer(["name.invalid", "127.0.0.1"], port, 10.0) == "127.0.0.1"
    assert not network.answers("127.0.0.1", port)
    started = time.monotonic()
    assert network.first_to_answer(["127.0.0.2", "127.0.0.1"], port, 0.3) == "127.0.0.2"
    assert time.monotonic() - started < 5
