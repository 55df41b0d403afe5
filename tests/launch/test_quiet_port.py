"""A port for later is one that the kernel gives to nobody meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from myxa.launch.nodes import rendezvous as module
from myxa.launch.nodes.rendezvous import quiet_port


def test_it_lies_outside_the_range_that_connections_get_and_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    said = tmp_path / "range"
    said.write_text("20000\t40000\n")
    monkeypatch.setattr(module, "EPHEMERAL", said)
    ports = {quiet_port() for _ in range(30)}
    assert all(port < 20000 or port > 40000 for port in ports)
    assert len(ports) > 20, "who asks at once gets another one"
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("", port))


def test_a_port_where_somebody_listens_is_not_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    said = tmp_path / "range"
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said.write_text(f"1024 {port - 1}")
        monkeypatch.setattr(module, "EPHEMERAL", said)
        monkeypatch.setattr(module, "HIGHEST", port + 1)
        assert {quiet_port() for _ in range(5)} == {port + 1}


def test_a_machine_that_leaves_no_room_gives_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    said = tmp_path / "range"
    said.write_text("1024 65535")
    monkeypatch.setattr(module, "EPHEMERAL", said)
    assert 1024 <= quiet_port() <= 65535
