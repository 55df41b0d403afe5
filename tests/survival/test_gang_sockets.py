"""What a run on one machine listens at: nothing but loopback. torch's own store and gloo take every interface, and ask
nobody for a key."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta

import pytest
import torch
from tests.harness.ports import held_port
from tests.survival.lives import listening
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from myxa.actors.torch_store import find_store, host_store
from myxa.actors.weights.channels.process_group import ChannelGroup
from myxa.transport.address import own_address_towards

pytestmark = pytest.mark.timeout(300)


def test_e04_a_store_is_not_reached_by_another_address_of_the_host() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        other = probe.getsockname()[0]
    store = host_store("127.0.0.1", 0, 2, 5.0)
    TCPStore("127.0.0.1", store.port, 2, timeout=timedelta(seconds=5), wait_for_workers=False).set("a", "b")
    assert store.get("a") == b"b"
    if other != "127.0.0.1":
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, store.port), timeout=3)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_e04_a_weight_group_over_gloo_listens_at_the_address_of_its_store(address: str) -> None:
    before = set(listening([os.getpid()]))
    store = host_store(address, 0, 2, 10.0)
    flat, cancel = [torch.arange(4.0), torch.zeros(4)], threading.Event()

    def member(rank: int) -> None:
        own = find_store(address, store.port, 2, 10.0) if rank else store
        group = ChannelGroup.join(own, "g", rank, 2, torch.device("cpu"), 10.0, address=address)
        ends.append(group)
        met.wait(10)
        group.broadcast(flat[rank], cancel, 10.0)

    ends: list[ChannelGroup] = []
    met = threading.Event()
    threads = [threading.Thread(target=member, args=(rank,)) for rank in (0, 1)]
    for each in threads:
        each.start()
    while len(ends) < 2:
        threads[0].join(0.05)
        assert threads[0].is_alive()
    new = set(listening([os.getpid()])) - before
    met.set()
    for each in threads:
        each.join()
    assert flat[1].tolist() == [0, 1, 2, 3]
    assert len(new) >= 2
    assert {place.split()[0] for place in new} == {address}
    for each in ends:
        each.abort()


def test_a_store_listens_at_a_given_port_and_says_if_it_is_taken() -> None:
    port = held_port()
    store = host_store("localhost", port, 2, 5.0)
    assert store.port == port
    with pytest.raises(OSError, match="in use"):
        host_store("127.0.0.1", port, 2, 5.0)


def test_a_name_that_means_loopback_here_alone_is_met_on_every_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts gives the host's own name 127.0.1.1, other hosts know its address."""
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: real("127.0.1.1" if host == "node7" else host, *a, **k)
    )
    before = set(listening([os.getpid()]))
    monkeypatch.setattr("myxa.actors.torch_store.TCPStore", lambda *a, **k: (a, k))
    _, words = host_store("node7", 0, 2, 5.0)  # pyright: ignore[reportGeneralTypeIssues]
    new = set(listening([os.getpid()])) - before
    os.close(words["master_listen_fd"])
    assert {place.split()[0] for place in new} == {"0.0.0.0"}


def test_the_own_address_is_of_the_interface_that_leads_there() -> None:
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
    assert own_address_towards("localhost") in ("127.0.0.1", "::1")
