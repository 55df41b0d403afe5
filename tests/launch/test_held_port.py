"""A port that is held for later goes to nobody else meanwhile."""

from __future__ import annotations

import socket

import pytest

from myxa.actors.torch_store import find_store, host_store
from myxa.core.errors import LaunchError
from myxa.transport import address
from myxa.transport.address import PORTS, PORTS_VARIABLE, hold_port


def test_a_port_is_free_and_outside_the_range_that_connections_get(monkeypatch: pytest.MonkeyPatch):
    holders = [hold_port() for _ in range(30)]
    ports = {holder.getsockname()[1] for holder in holders}
    assert ports < set(PORTS) and len(ports) == 30
    for holder in holders:
        holder.close()
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("", port))
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setattr(address, "PORTS", [taken.getsockname()[1]] * 200)
        with hold_port() as holder:
            assert holder.getsockname()[1] not in address.PORTS, "where somebody listens"


def test_a_held_port_goes_to_nobody_but_the_store_that_it_is_held_for():
    with hold_port() as holder:
        port = holder.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = host_store("127.0.0.1", port, 1, 5.0)
        store.set("key", "value")
        assert find_store("127.0.0.1", port, 1, 5.0).get("key") == b"value"


def test_a_range_of_ports_is_kept_to_and_its_end_is_an_error(monkeypatch: pytest.MonkeyPatch):
    with hold_port() as first:
        port = first.getsockname()[1]
    monkeypatch.setenv(PORTS_VARIABLE, f"{port}-{port}")
    store = host_store("127.0.0.1", 0, 1, 5.0)
    assert store.port == port
    with pytest.raises(LaunchError, match=f"no port is free: MYXA_PORTS = {port}-{port}"):
        hold_port()


@pytest.mark.parametrize("text", ["29500", "29600-29500", "0-10", "1-70000", "a-b"])
def test_what_is_no_range_of_ports_is_refused(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv(PORTS_VARIABLE, text)
    with pytest.raises(LaunchError, match=f"MYXA_PORTS = {text} is no range"):
        hold_port()
