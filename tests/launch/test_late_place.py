"""More or fewer rollout actors: who joins where, who leaves, and what is refused. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from myxa import __version__
from myxa.core.config import RunConfig, load_config
from myxa.core.errors import ConfigError, LaunchError
from myxa.launch.actor_spec import ActorSpec
from myxa.launch.contracts import EnlistReply, NodeFacts
from myxa.launch.supervisor.membership import Membership
from myxa.launch.supervisor.placement import (
    Present,
    check_leaver,
    distance_problem,
    place,
    scale,
    server_of,
    staff_node,
)

GPUS = ('roles.rollout.kind="sglang"', 'roles.rollout.devices="0-3"', 'roles.trainer.devices="4-7"',
        "roles.rollout.count=2", 'weights.channel="nccl"')  # fmt: skip


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "m"\n[data]\ntrain = "d.jsonl"\n')
    return load_config(file, overrides)


def present(config: RunConfig, num_nodes: int = 1, *, without: tuple[str, ...] = (), taken: tuple[str, ...] = ()):
    actors = tuple(actor for actor in place(config, num_nodes) if actor.name not in without)
    return Present(actors, tuple(range(num_nodes)), foreign_names=taken)


def where(actors: Iterable[ActorSpec]) -> list[tuple[str, int]]:
    return [(actor.name, actor.node) for actor in actors]


def test_more_get_the_next_free_numbers_and_are_as_the_first_ones(tmp_path: Path):
    run = config(tmp_path, "roles.rollout.count=2", "roles.rollout.threads=3", "roles.rollout.max_restarts=7")
    there = present(run)
    joining, leaving = scale(run, "rollout", 4, there)
    assert where(joining) == [("rollout/2", 0), ("rollout/3", 0)]
    assert leaving == []
    first = next(actor for actor in there.actors if actor.name == "rollout/1")
    assert [getattr(joining[0], name) for name in ("kind", "threads", "max_restarts", "devices")] == [
        getattr(first, name) for name in ("kind", "threads", "max_restarts", "devices")
    ]


def test_numbers_of_others_are_left_out_and_those_of_who_has_left_come_again(tmp_path: Path):
    run = config(tmp_path, "roles.rollout.count=2")
    there = present(run, without=("rollout/0",), taken=("rollout/2", "rollout/x"))
    assert where(scale(run, "rollout", 3, there)[0]) == [("rollout/0", 0), ("rollout/3", 0)]


def test_fewer_leave_from_the_highest_number(tmp_path: Path):
    run = config(tmp_path, "roles.rollout.count=12")
    assert scale(run, "rollout", 9, present(run)) == ([], ["rollout/11", "rollout/10", "rollout/9"])
    assert scale(run, "rollout", 12, present(run)) == ([], [])


def test_the_node_with_the_fewest_gets_the_next_one(tmp_path: Path):
    run = config(tmp_path, "roles.rollout.nodes=[0, 1, 2]", "roles.rollout.count=2")
    there = present(run, 3, without=("rollout/2", "rollout/3", "rollout/5"))
    joining, _ = scale(run, "rollout", 7, there)
    assert where(joining) == [("rollout/2", 1), ("rollout/3", 1), ("rollout/5", 2), ("rollout/6", 0)]
    alone = Present(there.actors, (0, 2))
    assert {node for _, node in where(scale(run, "rollout", 7, alone)[0])} == {0, 2}, "node 1 is lost"
    with pytest.raises(ConfigError, match="needs a node of roles.rollout.nodes, free are none"):
        scale(run, "rollout", 7, Present(there.actors, (3,)))


def test_a_gpu_that_was_left_is_used_again_and_one_that_is_in_use_never(tmp_path: Path):
    run = config(tmp_path, *GPUS)
    ((again,), _) = scale(run, "rollout", 2, present(run, without=("rollout/0",)))
    assert (again.name, again.devices, again.visible_devices) == ("rollout/0", (0, 1), (0, 1))
    with pytest.raises(ConfigError, match=r"needs 2 GPUs on .*, free are node 0: none.*--devices"):
        scale(run, "rollout", 3, present(run))
    ((third,), _) = scale(run, "rollout", 3, present(run), "8-9")
    assert third.devices == (8, 9)
    with pytest.raises(ConfigError, match=r"free are node 0: none"):
        scale(run, "rollout", 3, present(run), "4-5")


def test_the_gpus_of_who_is_still_leaving_are_in_use(tmp_path: Path):
    run = config(tmp_path, *GPUS)
    specs = {actor.name: actor for actor in place(run, 1)}
    one_leaves = Present(
        present(run, without=("rollout/1",)).actors, (0,), (specs["rollout/1"],), foreign_names={"rollout/2"}
    )
    with pytest.raises(ConfigError, match="free are node 0: none") as caught:
        scale(run, "rollout", 2, one_leaves)
    assert "wait until one that holds some is gone: rollout/0, rollout/1" in caught.value.remedy
    ((beside,), _) = scale(run, "rollout", 2, one_leaves, "8-9")
    assert (beside.name, beside.devices) == ("rollout/3", (8, 9)), "the names of both others are taken"


@pytest.mark.parametrize(
    ("role", "count", "overrides", "message"),
    [
        ("trainer", 2, (), "its ranks form one gang"),
        ("buffer", 2, (), "a run has exactly one"),
        ("rollout", 0, (), "too few: a run needs one"),
        ("rollout", 1, ("roles.rollout.count=3", "roles.rollout.quorum=2"), r"too few: roles.rollout.quorum = 2"),
        (
            "rollout", 3,
            ('roles.rollout.kind="sglang"', "roles.rollout.count=2", 'engine.attach=["http://a:1", "http://b:1"]'),
            "1 more rollout actors need a server each, free are none",
        ),
        (
            "rollout", 3,
            (*GPUS[:1], 'roles.rollout.devices="1-3"', 'roles.trainer.devices="0-3"', "roles.trainer.count=4",
             'weights.channel="cuda_ipc"'),
            "cuda_ipc",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_reason(tmp_path: Path, role, count, overrides, message):
    run = config(tmp_path, *overrides)
    with pytest.raises(ConfigError, match=message) as caught:
        scale(run, role, count, present(run), "8-9" if "cuda_ipc" in message else "")
    assert caught.value.remedy
    assert caught.value.exit_code == 2


FLEET = ('roles.rollout.kind="sglang"', "roles.rollout.count=2", 'engine.attach=["http://a:1", "http://b:1"]')


def test_an_attached_fleet_grows_by_servers_that_are_named(tmp_path: Path):
    run = config(tmp_path, *FLEET)
    there = present(run)
    assert [server_of(actor, run) for actor in there.actors if actor.role == "rollout"] == ["http://a:1", "http://b:1"]
    got, _ = scale(run, "rollout", 4, there, attach="http://c:1, http://d:1")
    assert [(actor.name, server_of(actor, run)) for actor in got] == [
        ("rollout/2", "http://c:1"), ("rollout/3", "http://d:1"),
    ]  # fmt: skip
    left = Present(tuple(a for a in there.actors if a.name != "rollout/1"), (0,))
    ((again,), _) = scale(run, "rollout", 2, left)
    assert server_of(again, run) == "http://b:1", "the run file's"
    ((again,), _) = scale(run, "rollout", 2, left, attach="http://b:1/")
    assert (again.name, server_of(again, run)) == ("rollout/1", "http://b:1/"), "it is free again"
    other = Present((*left.actors, replace(again, attach="http://c:1")), (0,))
    ((third,), _) = scale(run, "rollout", 3, other)
    assert server_of(third, run) == "http://b:1", "the one that nobody has"


@pytest.mark.parametrize(
    ("attach", "said"),
    [
        ("http://c:1", "2 more rollout actors need a server each, free are http://c:1 --"),
        ("http://c:1,http://d:1,http://e:1", "2 more rollout actors need a server each"),
        ("http://c:1,http://a:1/", "free are http://c:1 --.*rollout/0"),
        ("http://c:1,http://c:1", 'names "http://c:1" twice'),
        ("http://c:1,ftp://d", '"ftp://d" must look like http://host:port'),
    ],
)
def test_servers_that_cannot_be_are_refused(tmp_path: Path, attach: str, said: str):
    run = config(tmp_path, *FLEET)
    with pytest.raises(ConfigError, match=said):
        scale(run, "rollout", 4, present(run), attach=attach)
    plain = config(tmp_path)
    with pytest.raises(ConfigError, match="no attached servers"):
        scale(plain, "rollout", 2, present(plain), attach="http://c:1")


def test_a_late_node_is_staffed_whatever_the_role_s_nodes_say(tmp_path: Path):
    run = config(tmp_path, *GPUS)
    there = Present(present(run).actors, (0, 1), late={1})
    assert [(a.name, a.node, a.devices) for a in staff_node(run, 1, there)] == [
        ("rollout/2", 1, (0, 1)), ("rollout/3", 1, (2, 3)),
    ]  # fmt: skip
    ((beside,), _) = scale(run, "rollout", 3, there)
    assert beside.node == 1, "and `scale` knows it"
    full = Present((*there.actors, *staff_node(run, 1, there)), (0, 1), late={1})
    with pytest.raises(ConfigError, match=r"needs 2 GPUs on .*, free are node 1: none"):
        staff_node(run, 1, full)


GROUPS = (
    'roles.rollout.kind="sglang"', 'roles.rollout.devices="0-4"', "roles.rollout.count=2",
    "engine.groups.a={sglang={tp_size=2}}", "engine.groups.b={sglang={tp_size=3}}", 'roles.trainer.devices="7"',
)  # fmt: skip


def test_a_late_node_gets_one_of_each_shape_of_server_whatever_numbers_are_free(tmp_path: Path):
    run = config(tmp_path, *GROUPS, "roles.rollout.nodes=[0, 1]")
    there = Present(present(run, 2, without=("rollout/1", "rollout/3")).actors, (0, 1, 2), late={2})
    late = staff_node(run, 2, there)
    assert [(a.name, a.devices) for a in late] == [("rollout/4", (0, 1)), ("rollout/1", (2, 3, 4))]
    full = Present((*there.actors, *late), (0, 1, 2), late={2})
    with pytest.raises(ConfigError, match=r"needs 2 GPUs on .*, free are node 2: none"):
        staff_node(run, 2, full)


def test_a_new_actor_has_the_first_shape_that_free_gpus_fit(tmp_path: Path):
    run = config(tmp_path, *GROUPS)
    without = present(run, without=("rollout/0",))
    ((again,), _) = scale(run, "rollout", 2, without)
    assert (again.name, again.devices) == ("rollout/0", (0, 1))
    ((wide,), _) = scale(run, "rollout", 2, present(run, without=("rollout/1",)))
    assert (wide.name, wide.devices) == ("rollout/1", (2, 3, 4))
    more, _ = scale(run, "rollout", 3, without, "8-10")
    assert [(a.name, a.devices) for a in more] == [("rollout/0", (0, 1)), ("rollout/2", (8, 9))]
    ((only,), _) = scale(run, "rollout", 3, Present((*without.actors, again), (0,), foreign_names={"rollout/2"}), "8-9")
    assert only.name == "rollout/4", "a shape of three does not fit"
    with pytest.raises(ConfigError, match=r"needs 2 or 3 GPUs on .*, free are node 0: 8 --"):
        scale(run, "rollout", 3, present(run), "8")


def test_engines_beside_the_trainers_gpus_read_its_first_rank_where_that_hands_memory_out(tmp_path: Path):
    here = ('roles.rollout.kind="sglang"', 'roles.trainer.devices="0-3"', "roles.trainer.count=4",
            'weights.channel="cuda_ipc"')  # fmt: skip
    for devices, is_read in (("0", True), ("5", True), ("1", False)):
        run = config(tmp_path, *here, f'roles.rollout.devices="{devices}"')
        if is_read:
            assert scale(run, "rollout", 2, present(run), "8")[0][0].devices == (8,)
        else:
            with pytest.raises(ConfigError, match="was started with none that does"):
                scale(run, "rollout", 2, present(run), "8")


@pytest.mark.parametrize(
    ("channel", "is_same", "refused"), [("shm", False, True), ("shm", True, False), ("disk", False, False)]
)
def test_a_late_node_needs_a_way_for_new_weights(tmp_path: Path, channel: str, is_same: bool, refused: bool):
    run = config(tmp_path, f'weights.channel="{channel}"')
    said = distance_problem(run, is_same)
    assert bool(said) == refused
    if refused:
        assert "engines read memory of the trainer's machine" in said and 'weights.channel = "disk"' in said


def test_only_rollout_actors_can_be_drained(tmp_path: Path):
    run = config(tmp_path)
    with pytest.raises(ConfigError, match="no buffer can join or leave a run"):
        check_leaver(run, "buffer", 0)


def test_a_late_launcher_that_asks_again_is_told_the_same_number_and_another_one_the_next(tmp_path: Path):
    run = config(tmp_path, 'weights.channel="disk"')
    members = Membership(1, EnlistReply(config="c", program="p"), run)

    def facts(nonce: str, node: int = -1) -> NodeFacts:
        return NodeFacts(node=node, version=__version__, host="h", is_late=True, nonce=nonce)

    first = members.enlist(facts("a"), has_started=True)
    assert (first.node, first.config, first.program, where(first.actors)) == (1, "c", "p", [("rollout/0", 1)])
    assert members.enlist(facts("a"), has_started=True) == first
    assert members.enlist(facts("b"), has_started=True).node == 2
    assert members.join(facts("a", 1)) == ""
    assert members.join(facts("a", 1)) == "", "its answer was lost"
    assert "joined already" in members.join(facts("c", 1))
    members.lose(1)
    assert not members.is_staying(1), "it went before it was staffed"
    assert members.enlist(facts("a"), has_started=True).node == 3, "no number is given twice"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "2"}, f"it runs myxa 2, node 0 runs {__version__}"),
        ({"node": 2}, "there is no node 2 among 2 (--node-rank)"),
        ({"is_late": True}, "it was not given the number 1"),
    ],
)
async def test_a_node_that_does_not_fit_is_refused_with_both_values(tmp_path: Path, change: dict[str, Any], said: str):
    members = Membership(2, EnlistReply(), config(tmp_path))
    facts = {"node": 1, "version": __version__, "host": "h"}
    wrong = NodeFacts(**{**facts, **change})
    assert said in members.join(wrong)
    if not wrong.is_late:
        assert said in members.enlist(wrong, has_started=False).reason
    with pytest.raises(LaunchError, match="1 of 2 nodes did not join within 0.01 s.*was refused"):
        assert members.join(NodeFacts(**{**facts, "node": 0})) == ""
        await members.gather(0.01)


@pytest.mark.parametrize("first", [0, 1])
async def test_launchers_of_one_machine_whose_actors_use_the_same_gpu_end_the_run_at_once(tmp_path: Path, first: int):
    """As with one task a GPU, which other programs want. Tasks that see a GPU each may stay, whatever its number."""
    nodes = [NodeFacts(node=n, version=__version__, host="h", gpus=("GPU-a", f"GPU-{n}")) for n in (0, 1)]
    members = Membership(2, EnlistReply(), config(tmp_path))
    assert members.join(nodes[first]) == ""
    assert f"those of node {first} use the same GPUs (GPU-a)" in members.join(nodes[1 - first])
    with pytest.raises(LaunchError, match=rf"node {1 - first} \(h\) cannot take part: .*one launcher on each machine"):
        await members.gather(60.0)
    apart = Membership(2, EnlistReply(), config(tmp_path))
    assert [apart.join(replace(facts, gpus=facts.gpus[1:])) for facts in nodes] == ["", ""]
    await apart.gather(0.01)


def test_a_run_on_recorded_groups_has_no_rollout_actors_and_gets_none(tmp_path: Path):
    run = config(tmp_path, 'data.preset="recorded"', 'models.judge={path="j"}', "roles.rollout.count=3")
    there = present(run)
    assert [name for name, _ in where(there.actors)] == ["monitor", "buffer", "coordinator", "trainer/0"]
    with pytest.raises(ConfigError, match="no rollout actor takes part"):
        scale(run, "rollout", 1, there)
    with pytest.raises(ConfigError, match="no rollout actor takes part"):
        staff_node(run, 1, there)
