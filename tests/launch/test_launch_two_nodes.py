"""`myxa launch` on two nodes that share a machine: two launchers, tcp with CURVE, one run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import tempfile
from pathlib import Path

import psutil
import pytest

from myxa.launch.control.client import ControlClient
from myxa.transport.node import JobKey

SPREAD = ("--set", 'roles.rollout.nodes="*"', "--set", "roles.trainer.nodes=[0, 1]")


def runtime_dirs() -> set[Path]:
    """Run-time directories of all runs on this machine; others than ours may come and go."""
    return set(Path(tempfile.gettempdir()).glob("myxa-*"))


def flags(folder: Path, rank: int, *more: str, num_nodes: int = 2) -> list[str]:
    place = ["--nnodes", str(num_nodes), "--node-rank", str(rank), "--rdzv-file", str(folder / "rdzv")]
    if rank == 0:
        place += ["--rdzv", "127.0.0.1:0"]
    key = ["--job-key", str(folder / "job.key"), "--lost-timeout", "4"]
    # Both read the same file, as on a shared file system, and node 0 names the run directory.
    return ["launch", *place, *key, "--set", f'run.dir="{folder}/runs"', *more]


def two(folder: Path, run, *more: str, toy: str = ""):
    text = '[run]\nname = "toy"\n[model]\npath = "/m"\n[data]\ntrain = "/d.jsonl"\n'
    for rank in range(2):
        (folder / f"node{rank}").mkdir()
        (folder / f"node{rank}/run.toml").write_text(text)
    # Node 1 comes first: it has to wait for the key, the endpoint and the registry.
    second = run(folder / "node1", *flags(folder, 1, *SPREAD, *more), toy=toy)
    first = run(folder / "node0", *flags(folder, 0, *SPREAD, *more), toy=toy)
    return first, second


def see(one, folder: Path) -> None:
    one.runs = folder / "runs"


def test_two_launchers_make_one_run_and_a_signal_on_any_of_them_ends_it(
    tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MYXA_PORTS", "20000-20999")
    before = runtime_dirs()
    (tmp_path / "rdzv").write_text("127.0.0.1:1\n")  # an earlier run was killed and left it
    first, second = two(tmp_path, run)
    with second as node1, first as node0:
        see(node0, tmp_path)
        see(node1, tmp_path)
        node0.until_serving("coordinator", "trainer/0", "trainer/1", "rollout/0", "rollout/1")
        assert stat.S_IMODE((tmp_path / "job.key").stat().st_mode) == 0o600
        assert "CURVE" not in node0.output
        check_ports([*node0.children(), *node1.children()])
        check_keys(node0, node1, tmp_path)
        logs = [node0.log(f"trainer.{rank}.0.log") for rank in range(2)]
        assert len({log.partition("'MASTER_PORT': '")[2].partition("'")[0] for log in logs}) == 1
        owners = {name: os.getpgid(node0.pid_of(name)) for name in ("trainer/0", "trainer/1")}
        assert {p.pid for p in node1.children()} >= {owners["trainer/1"]}, "rank 1 is node 1's child"
        os.kill(node0.pid_of("trainer/1"), signal.SIGKILL)
        node0.until_serving("trainer/0", "trainer/1", attempt=1)
        check_actors_come_and_go(node0, node1)
        children = node0.children() + node1.children()
        node1.signal(signal.SIGINT)
        assert node1.ended() == 130, node1.evidence()
        assert node0.ended() == 130, node0.evidence()
        node0.until_gone(children)
        assert (node0.dir / "coordinator.asked").read_text() == "Ctrl-C\n"
        assert (node0.dir / "monitor.stopped").exists()
        assert not (tmp_path / "rdzv").exists()
        assert runtime_dirs() <= before


def check_ports(processes: list[psutil.Process]) -> None:
    links = [link for process in processes for link in process.net_connections("tcp")]
    listening = {link.laddr.port for link in links if link.status == psutil.CONN_LISTEN}
    assert len(listening) >= 2 * len(("coordinator", "trainer/0", "trainer/1", "rollout/0", "rollout/1"))
    assert listening < set(range(20_000, 21_000))


def spec_of(process: psutil.Process) -> Path | None:
    path = process.environ().get("MYXA_WORKER_SPEC", "")
    return Path(path) if path else None


def check_keys(node0, node1, folder: Path) -> None:
    """The job's key stays with the launchers; each process has a key of its own."""
    public, secret = (folder / "job.key").read_text().split()
    specs: dict[str, dict[str, object]] = {}
    for process in [*node0.children(), *node1.children()]:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that was forked too late, and ends
            assert secret not in " ".join([*process.environ().values(), *process.cmdline()])
            path = spec_of(process)
            if path is not None and path.exists():
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
                assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
                spec = json.loads(path.read_text())
                specs[spec["actor"]["name"]] = spec
    assert {"trainer/0", "trainer/1", "rollout/0", "rollout/1", "coordinator"} <= set(specs)
    keys = [str(spec["key"]) for spec in specs.values()]
    assert len({key.split()[0] for key in keys}) == len(keys), "no two processes share a key"
    assert all(len(key.split()) == 2 and secret not in key and public not in key for key in keys)
    logs = [path.read_text() for path in (node0.dir / "logs").iterdir() if path.is_file()]
    secrets = [secret, *(key.split()[1] for key in keys)]
    assert not any(hidden in text for hidden in secrets for text in [*logs, node0.output, node1.output])


def check_actors_come_and_go(node0, node1) -> None:
    """On the node with the fewest; logs and stacks are read from both."""
    node0.until(lambda: (node0.dir / "control.json").exists(), "the control socket")
    client = ControlClient.of(node0.dir)
    assert client.ask("drain", 120, target="rollout/1", wait_s=60)["is_done"], node0.evidence()
    more = client.ask("scale", 120, role="rollout", count=4, wait_s=60)
    assert more["is_done"], node0.evidence()
    assert [(actor["name"], actor["node"]) for actor in more["joining"]] == [
        ("rollout/1", 1), ("rollout/2", 0), ("rollout/3", 1),
    ]  # fmt: skip
    node0.until_serving("rollout/1", attempt=1)
    node0.until_serving("rollout/2", "rollout/3")
    child = os.getpgid(node0.pid_of("rollout/3"))
    assert child in {process.pid for process in node1.children()}, "it is node 1's child"
    (chunk,) = client.ask("logs", target="rollout/3", num_lines=5)
    assert any("rollout/3 serves as attempt 0" in line for line in chunk["lines"])
    (stack,) = client.ask("stack", target="rollout/3")
    assert (stack["how"], stack["pid"]) == ("process", child)
    assert {actor["name"] for actor in client.ask("ps") if actor["node"] == 1} >= {"rollout/1", "rollout/3"}


@pytest.mark.parametrize(
    ("rank", "is_taken", "said"),
    [(0, True, "in use"), (1, False, "")],
    ids=["port taken", "no node 0"],
)
def test_nodes_that_do_not_meet_are_told_where_and_why(tmp_path: Path, run, rank: int, is_taken: bool, said: str):
    if rank:
        JobKey.generate().save(tmp_path / "job.key")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        if is_taken:
            probe.listen()
        place = ["--nnodes", "3", "--node-rank", str(rank), "--rdzv", f"127.0.0.1:{port}", "--rdzv-timeout", "2"]
        with run(tmp_path, "launch", *place, "--job-key", str(tmp_path / "job.key")) as one:
            assert one.ended() == 3, one.evidence()
            assert f"127.0.0.1:{port}" in one.output
            assert said in one.output
            assert "Traceback" not in one.output


def test_a_node_that_cannot_take_part_is_not_waited_for(tmp_path: Path, run):
    """Its preflight fails; node 0 knows at once, long before the time for joining is over."""
    (tmp_path / "d.jsonl").write_text('{"prompt": "1", "label": "1"}\n')
    text = f'[run]\nname = "toy"\n[model]\npath = "/no/model"\n[data]\ntrain = "{tmp_path}/d.jsonl"\n'
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()
        (tmp_path / f"node{rank}/run.toml").write_text(text)
    there = ("--set", "roles.rollout.nodes=[1]", "--set", "roles.trainer.nodes=[1]", "--rdzv-timeout", "50")
    real = ("--program", "myxa.launch.program:build_actor")
    with (
        run(tmp_path / "node1", *flags(tmp_path, 1, *there, *real)) as node1,
        run(tmp_path / "node0", *flags(tmp_path, 0, *there, *real)) as node0,
    ):
        assert node1.ended() == 2, node1.evidence()
        assert "this node cannot take part" in node1.output
        assert "model.path" in node1.output
        assert node0.ended() == 3, node0.evidence()
        assert "node 1 (" in node0.output
        assert "cannot take part: " in node0.output
        assert "/no/model" in node0.output
        assert "did not join within" not in node0.output
