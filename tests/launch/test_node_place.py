"""Rank, number of nodes and meeting point from flags, torchrun's and Slurm's variables."""

from __future__ import annotations

import pytest

from myxa.core.errors import ConfigError
from myxa.launch.node_place import NodePlace, find_place, first_host, parse_endpoint, parse_num_nodes
from myxa.transport.address import Endpoint

SLURM = {"SLURM_NODEID": "2", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "gpu[07-09,12]"}
TORCH_MASTER = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "fd00::7", "PET_MASTER_PORT": "9"}
TORCH = {"PET_NNODES": "3:5", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "head:1234"}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("host:1", Endpoint("host", 1)),
        ("10.0.0.1:65535", Endpoint("10.0.0.1", 65535)),
        ("tcp://host:80", Endpoint("host", 80)),
        ("host", Endpoint("host", 29400)),
        ("[::1]:7", Endpoint("::1", 7)),
        ("host:0", Endpoint("host", 0)),
    ],
)
def test_endpoints(text: str, want: Endpoint):
    assert parse_endpoint(text, where="x") == want
    assert parse_endpoint(str(want), where="x") == want


@pytest.mark.parametrize("text", ["", ":5", "a b:5", "host:99999", "host:x", "::1:5", "host:5/x", "[::1"])
def test_no_endpoints(text: str):
    with pytest.raises(ConfigError, match="--rdzv"):
        parse_endpoint(text, where="--rdzv")


def test_one_node_needs_nothing():
    assert find_place(None, None, None, {}) == NodePlace(0, 1, Endpoint("127.0.0.1", 0))


def test_slurm_tells_everything():
    assert find_place(None, None, None, SLURM) == NodePlace(2, 4, Endpoint("gpu07", 29400))


def test_torchruns_variables_win_over_slurms_and_flags_over_both():
    assert find_place(None, None, None, SLURM | TORCH) == NodePlace(1, 3, Endpoint("head", 1234), 5)
    assert find_place(2, 0, "h:9", SLURM | TORCH) == NodePlace(0, 2, Endpoint("h", 9))


@pytest.mark.parametrize("address", ["fd00::7", "[fd00::7]"])
def test_an_address_of_torchruns_may_be_of_ipv6(address: str):
    place = find_place(None, None, None, TORCH_MASTER | {"PET_MASTER_ADDR": address})
    assert place == NodePlace(1, 2, Endpoint("fd00::7", 9))


def test_ranks_that_another_program_left_do_not_count_where_the_number_of_nodes_is_given():
    left = {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "x", "NODE_RANK": "1"}
    assert find_place(1, None, None, left).is_alone
    assert find_place(None, None, None, left | SLURM) == find_place(None, None, None, SLURM)


@pytest.mark.parametrize(("text", "want"), [("1", (1, 0)), ("2:4", (2, 4)), ("3:3", (3, 3))])
def test_how_many_nodes_there_are_and_may_be(text: str, want: tuple[int, int]):
    assert parse_num_nodes(text) == want


@pytest.mark.parametrize("text", ["", "x", "2:", ":2", "4:2", "1:2:3", "-1"])
def test_no_numbers_of_nodes(text: str):
    with pytest.raises(ValueError, match="number of nodes|fewer"):
        parse_num_nodes(text)


def test_one_node_opens_no_port_unless_others_may_come():
    assert find_place(1, 0, None, {}).is_alone
    assert not find_place((1, 4), 0, "h:1", {}).is_alone
    assert not find_place(2, 0, "h:1", {}).is_alone
    with pytest.raises(ConfigError, match="--rdzv is not given"):
        find_place((1, 4), 0, None, {})


def test_a_file_may_say_where_node_0_is_met():
    assert find_place(2, 1, None, SLURM, has_file=True) == NodePlace(1, 2, None)
    assert find_place(2, 1, "h:5", SLURM, has_file=True) == NodePlace(1, 2, Endpoint("h", 5))


@pytest.mark.parametrize(
    ("host_list", "want"),
    [
        ("gpu[07-12,15],x1", "gpu07"),
        ("a,b", "a"),
        ("node-3", "node-3"),
        ("n[1-2]-ib", "n1-ib"),
        ("a.b.c", "a.b.c"),
        ("rack[0-1]n[04-07],x1", "rack0n04"),
        ("gpu[01-03,07],a1-b2", "gpu01"),
    ],
)
def test_first_hosts(host_list: str, want: str):
    assert first_host(host_list) == want


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [
        ((2, None, "h:1"), {}, "--node-rank is not given"),
        ((2, 2, "h:1"), {}, "--node-rank 2 is not among 2 nodes"),
        ((2, -1, "h:1"), {}, "--node-rank -1"),
        ((0, 0, "h:1"), {}, "--nnodes is 0"),
        ((2, 1, None), {}, "--rdzv is not given"),
        ((2, 1, "h:0"), {}, "port 0"),
        ((None, None, None), {"SLURM_NNODES": "two"}, "SLURM_NNODES='two'"),
        ((None, None, None), {"SLURM_NNODES": "2", "SLURM_PROCID": "5"}, "SLURM_PROCID 5 is not among 2 nodes"),
        (
            (None, None, None),
            {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "x"},
            "4 processes would start a whole run",
        ),
        (
            (None, None, None),
            TORCH_MASTER | {"PET_MASTER_PORT": "99999"},
            "PET_MASTER_ADDR: '[fd00::7]:99999' is no host and port",
        ),
        ((None, None, None), {"SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_NODELIST": "[]"}, "no list of hosts"),
    ],
)
def test_what_is_missing_or_impossible_is_named(args: tuple[int | None, int | None, str | None], env, said: str):
    with pytest.raises(ConfigError) as caught:
        find_place(*args, env)
    assert said in str(caught.value)


def test_tasks_of_a_step_of_slurms_are_nodes_also_on_one_host():
    step = {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "gpu07",
    }  # fmt: skip
    second = step | {"SLURM_PROCID": "1"}
    assert find_place(None, None, None, step) == NodePlace(0, 2, Endpoint("127.0.0.1", 29400))
    assert find_place(None, None, None, step, has_file=True) == NodePlace(0, 2, Endpoint("127.0.0.1", 0))
    assert find_place(None, None, None, second, has_file=True) == NodePlace(1, 2, None)
    spread = step | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]"}
    assert find_place(None, None, None, spread) == NodePlace(0, 2, Endpoint("gpu07", 29400))
