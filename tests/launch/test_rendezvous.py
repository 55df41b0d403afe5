"""Where launchers meet: addresses of both kinds, and those that no other node could use."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from myxa.core.errors import LaunchError
from myxa.launch.node_place import NodePlace
from myxa.launch.nodes.rendezvous import host_rendezvous, join_rendezvous
from myxa.transport.address import Endpoint
from myxa.transport.security import JobKey


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="has no IPv6"))],
)
async def test_a_node_joins_by_the_address_that_node_0_has_written(host: str, tmp_path: Path) -> None:
    key, file = tmp_path / "job.key", tmp_path / "rdzv"
    for name in ("0", "1"):
        (tmp_path / name).mkdir(mode=0o700)
    async with (
        host_rendezvous(NodePlace(0, 2, Endpoint(host, 0), file=file, job_key=key), tmp_path / "0") as first,
        join_rendezvous(NodePlace(1, 2, None, file=file, job_key=key), tmp_path / "1", 20.0) as second,
    ):
        assert second.endpoint == file.read_text().strip() == first.endpoint
        assert second.address == first.address == {"localhost": "127.0.0.1"}.get(host, host)
        async with asyncio.timeout(10):
            assert await second.key_for("rollout/0")


async def test_a_key_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    """Its name is seen before its bytes, on NFS by seconds; also by node 0, where another run made it."""
    key, file = tmp_path / "job.key", tmp_path / "rdzv"
    key.touch(mode=0o600)
    for name in ("0", "1"):
        (tmp_path / name).mkdir(mode=0o700)

    async def joins() -> bool:
        async with join_rendezvous(NodePlace(1, 2, None, file=file, job_key=key), tmp_path / "1", 20.0):
            return True

    async def writes() -> None:
        await asyncio.sleep(0.3)
        JobKey.generate().save(tmp_path / "other.key")
        key.write_bytes((tmp_path / "other.key").read_bytes())

    async with asyncio.TaskGroup() as group:
        joining = group.create_task(joins())
        group.create_task(writes())
        async with host_rendezvous(NodePlace(0, 2, Endpoint("127.0.0.1", 0), file=file, job_key=key), tmp_path / "0"):
            assert await joining


async def test_a_key_that_stays_empty_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.key").touch(mode=0o600)
    with pytest.raises(LaunchError, match=r"job\.key with the job's key is empty"):
        async with join_rendezvous(
            NodePlace(1, 2, None, file=tmp_path / "rdzv", job_key=tmp_path / "job.key"), tmp_path, 0.3
        ):
            pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "no-such-host.invalid"])
async def test_node_0_is_met_at_one_address_that_others_can_use(host: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--rdzv.*IP address"):
        async with host_rendezvous(
            NodePlace(0, 2, Endpoint(host, 0), file=None, job_key=tmp_path / "job.key"), tmp_path
        ):
            pass


async def test_a_user_without_a_home_is_told_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container runs under any number, which no file of users knows."""
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(LaunchError, match="give --job-key"):
        async with host_rendezvous(NodePlace(0, 2, Endpoint("127.0.0.1", 0), file=None, job_key=None), tmp_path):
            pass
