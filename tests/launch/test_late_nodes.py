"""`myxa launch --join`: a machine comes to a run that goes on, and goes again, in order or not; launchers with toys."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from myxa.core.errors import ConfigError, LaunchError
from myxa.launch.control.client import ControlClient
from myxa.launch.nodes.rendezvous import find_late_rendezvous
from myxa.transport.address import Rendezvous
from myxa.transport.node import JobKey
from myxa.transport.wire import Endpoints

RUN = """
[run]
name = "toy"
[model]
path = "/m"
[data]
train = "/d.jsonl"
[weights]
channel = "disk"
"""


@pytest.fixture
def stage(tmp_path: Path, run):
    with ExitStack() as stack:
        yield Stage(tmp_path, run, stack)


class Stage:
    def __init__(self, folder: Path, run, stack: ExitStack) -> None:
        self.folder = folder
        self._run = run
        self._stack = stack

    def first(self, *more: str, nnodes: str = "1:3"):
        """Node 0, with its actors up."""
        place = ["--nnodes", nnodes, "--node-rank", "0", "--rdzv", "127.0.0.1:0"]
        node0 = self.start("node0", *place, "--rdzv-file", str(self.folder / "rdzv"), *more)
        node0.until_serving("coordinator", "trainer/0", "rollout/0")
        node0.until(lambda: (node0.dir / "control.json").exists(), "the control socket")
        return node0

    def late(self, name: str, *more: str):
        return self.start(name, "--join", str(self.folder / "rdzv"), *more, text="[run]\nseed = 7\n")

    def start(self, name: str, *more: str, text: str = RUN):
        folder = self.folder / name
        folder.mkdir()
        (folder / "run.toml").write_text(text)
        flags = ["--job-key", str(self.folder / "job.key"), "--lost-timeout", "4"]
        launcher = self._run(folder, "launch", *flags, "--set", f'run.dir="{self.folder}/runs"', *more)
        one = self._stack.enter_context(launcher)
        one.runs = self.folder / "runs"  # as on a shared file system
        return one


def names(client: ControlClient) -> set[str]:
    return {actor["name"] for actor in client.ask("ps") if actor["state"] == "up"}


def test_late_nodes_get_their_actors_and_leave_at_a_signal_by_sigkill_by_drain_and_with_node_0(stage: Stage):
    node0 = stage.first(nnodes="1:2")
    client = ControlClient.of(node0.dir)
    JobKey.generate().save(stage.folder / "other.key")
    stranger = stage.late("stranger", "--rdzv-timeout", "4", "--job-key", str(stage.folder / "other.key"))
    late = stage.late("late")
    node0.until_serving("rollout/1")
    assert "this is node 1 of the run" in late.output, "whose run file counts, whatever that of this machine says"
    assert node0.pid_of("rollout/1") in {child.pid for child in late.children()}
    assert [a["node"] for a in client.ask("ps") if a["name"] == "rollout/1"] == [1]
    who_may_not_come_is_told_why(stage, stranger)
    children = late.children()
    late.signal(signal.SIGTERM)
    assert late.ended() == 0, late.output
    late.until_gone(children)
    assert (node0.dir / "rollout.1.drained").exists(), "its work was handed back"
    assert (node0.dir / "rollout.1.stopped").exists(), "it ended in good order"
    node0.until(lambda: "node 1 has left the run: SIGTERM" in launcher_log(node0), "the node to be let go")
    assert not (node0.dir / "coordinator.asked").exists(), "the run was not asked to end"
    assert names(client) >= {"rollout/0", "trainer/0"}
    assert "rollout/1" not in names(client)
    again = stage.late("again")
    node0.until_serving("rollout/1", attempt=1)
    assert "this is node 2 of the run" in again.output, "no number is given twice"
    children = again.children()
    again.signal(signal.SIGKILL)
    again.process.wait()
    again.until_gone(children)
    node0.until(lambda: "the launcher of node 2 is gone" in launcher_log(node0), "the loss to be seen")
    node0.until(lambda: "1 are left, 1 must be" in launcher_log(node0), "rollout/1 to be given up")
    more = client.ask("scale", 120, role="rollout", count=2, wait_s=60)
    assert [(actor["name"], actor["node"]) for actor in more["joining"]] == [("rollout/1", 0)], "nobody is sent there"
    assert more["is_done"], node0.evidence()
    other = stage.late("drained")
    node0.until_serving("rollout/2")
    children = other.children()
    gone = client.ask("drain", 120, target="node:3", wait_s=60)
    assert (set(gone["leaving"]), gone["is_done"]) == ({"rollout/2"}, True), node0.evidence()
    assert other.ended() == 0, other.output
    other.until_gone(children)
    assert names(client) >= {"rollout/0", "rollout/1"}
    last = stage.late("last")
    node0.until_serving("rollout/2", attempt=1)
    children = node0.children() + last.children()
    node0.signal(signal.SIGKILL)
    node0.process.wait()
    assert last.ended() == 3, last.output
    assert "node 0 is gone" in last.output
    node0.until_gone(children)


def who_may_not_come_is_told_why(stage: Stage, stranger) -> None:
    third = stage.late("third")
    for one, said in (
        (stranger, "job key"),
        (third, "the run has 2 nodes, as many as it may have (--nnodes)"),
    ):
        assert one.ended() == 3, one.output
        assert said in one.output
        assert "Traceback" not in one.output


def test_where_a_run_is_met(tmp_path: Path):
    file = tmp_path / "rdzv"
    file.write_text("h:5")
    assert find_late_rendezvous(str(file), None).file == file
    assert str(find_late_rendezvous("h:6", None).endpoint) == "h:6"
    with pytest.raises(ConfigError, match="there is no /no/run"):
        find_late_rendezvous("/no/run", None)
    with pytest.raises(ConfigError, match="port 0"):
        find_late_rendezvous("h:0", None)
    with pytest.raises(LaunchError, match="no live run"):
        find_late_rendezvous(str(tmp_path), None)
    Rendezvous(endpoints=Endpoints(), key_file="").save(tmp_path / "rdzv.json")
    with pytest.raises(LaunchError, match="was started for one machine"):
        find_late_rendezvous(str(tmp_path), None)
    Rendezvous(endpoints=Endpoints(tcp=("tcp://10.0.0.1:7", "")), key_file="/k").save(tmp_path / "rdzv.json")
    place = find_late_rendezvous(str(tmp_path), None)
    assert (str(place.endpoint), place.job_key) == ("10.0.0.1:7", Path("/k"))


def launcher_log(node0) -> str:
    return (node0.dir / "logs/launcher.0.log").read_text()
