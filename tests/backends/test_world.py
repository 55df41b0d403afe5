"""Meeting and losing ranks: every wait ends, and says who was missing."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.harness.ports import held_port

from myxa.actors.backends.torch_backend.world import Gang, World
from myxa.core.errors import LaunchError

Ranks = Callable[..., list[tuple[int, str]]]

HEAD = """
import os, pathlib, sys, threading, torch
from myxa.actors.backends.torch_backend.world import Gang, World
from myxa.core.errors import MyxaError, TrainError
size, port, timeout = (int(a) for a in sys.argv[1:4])
rank = int(sys.argv[5])
torch.set_num_threads(1)
place = pathlib.Path(sys.argv[4])  # imports may take longer than the timeout of the gang: start together
(place / str(rank)).touch()
while len(list(place.iterdir())) < size:
    threading.Event().wait(0.02)
def done(text):
    sys.stdout.write(text + chr(10)); sys.stdout.flush()
"""


def gang(ranks: Ranks, folder: Path, body: str, size: int, timeout_s: int) -> list[tuple[int, str]]:
    program, place = folder / "rank.py", folder / "place"
    program.write_text(f"def main():\n{textwrap.indent(HEAD + body, '    ')}\nif __name__ == '__main__':\n    main()\n")
    place.mkdir()
    return ranks(size, program, str(size), str(held_port()), str(timeout_s), str(place))


JOIN = """
try:
    world = World.join(Gang(rank, size, "127.0.0.1", port, timeout_s=timeout), torch.device("cpu"))
except MyxaError as error:
    done(f"{type(error).__name__}: {error}"); sys.exit(0)
"""


@pytest.mark.parametrize(
    ("rank", "cause"), [(0, "waited up to 1 s at .*; not there: rank 1, 2"), (1, "does not reach rank 0 at")]
)
def test_ranks_that_never_come_are_named(rank: int, cause: str) -> None:
    with pytest.raises(LaunchError, match=cause):
        World.join(Gang(rank, 3, "127.0.0.1", held_port(), timeout_s=1), torch.device("cpu"))


def test_agreed_errors_leave_the_gang_whole_and_one_rank_s_own_ends_it_at_once(ranks: Ranks, tmp_path: Path) -> None:
    body = (
        JOIN
        + """
try:
    with world.phase("save"):
        world.agree(OSError("disk full") if rank == 0 else None, "saving")
except (MyxaError, OSError) as error:
    done(f"{type(error).__name__}: {error}")
try:
    with world.phase("train step 4"):
        done(f"sum {int(world.sum(torch.ones(1)))}")
        if rank == 1:
            raise ValueError("this rank has a bad shard")
        world.sum(torch.ones(1))
except (MyxaError, ValueError) as error:
    done(f"{type(error).__name__}: {error}")
try:
    with world.phase("train step 5"):
        pass
except MyxaError as error:
    done(str(error))
(place / f"ended.{rank}").touch()
while rank == 0 and not all((place / f"ended.{other}").exists() for other in (1, 2)):  # it hosts the store
    threading.Event().wait(0.02)
world.close()
"""
    )
    results = gang(ranks, tmp_path, body, size=3, timeout_s=600)  # far: not the timeout may end it
    for rank, (status, output) in enumerate(results):
        assert status == 0, output
        assert ("OSError: disk full" if rank == 0 else "TrainError: saving failed on rank 0") in output, output
        assert "sum 3" in output, output
        assert f"rank {rank} cannot train step 5: it left the process group" in output, output
        if rank != 1:
            assert f"TrainError: rank {rank} of 3 failed to train step 4" in output, output
            assert "rank 1: ValueError: this rank has a bad shard" in output, output


@pytest.mark.parametrize(
    ("what_rank_one_does", "timeout_s"),
    [("os._exit(9)", 600), ("while not (place / 'told').exists(): threading.Event().wait(0.02)", 2)],
    ids=["dies", "does-not-come"],
)
def test_a_rank_that_is_lost_in_a_collective_is_named(
    ranks: Ranks, tmp_path: Path, what_rank_one_does: str, timeout_s: int
) -> None:
    body = (
        JOIN
        + f"""
try:
    with world.phase("train step 4"):
        world.sum(torch.ones(1))
        if rank == 1:
            {what_rank_one_does}
        world.sum(torch.ones(1))
except MyxaError as error:
    done(f"{{type(error).__name__}}: {{error}}")
    (place / "told").touch()
"""
    )
    (status, output), _ = gang(ranks, tmp_path, body, size=2, timeout_s=timeout_s)
    assert status == 0, output
    assert "TrainError: rank 0 of 2 failed to train step 4" in output, output
    assert "rank 1: silent, last seen at 'train step 4'" in output, output


def test_alone_needs_no_address_and_no_group() -> None:
    world = World.join(Gang(), torch.device("cpu"))
    with world.phase("count"):
        assert world.sum(torch.tensor([2.0])).item() == 2.0
        assert world.gather(torch.tensor([3, 4])).tolist() == [[3, 4]]
    assert not torch.distributed.is_initialized()
    world.close()


def test_errors_of_a_lone_rank_pass_as_they_are() -> None:
    world = World.join(Gang(), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="store"), world.phase("count"):
        raise RuntimeError("something about a store")
    with world.phase("count"):
        pass


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Gang(timeout_s=5)),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500", "LOCAL_RANK": "1"},
         Gang(1, 2, "h", 29500, 1, 5)),
    ],
)  # fmt: skip
def test_the_environment_of_torchrun_is_understood(environment: dict[str, str], expected: Gang) -> None:
    assert Gang.from_environment(environment, 5) == expected


@pytest.mark.parametrize(
    ("place", "cause"),
    [
        (Gang(2, 2, "127.0.0.1", 1), "outside a gang of 2"),
        (Gang(0, 2), "no meeting place"),
        (Gang(0, 2, "127.0.0.1", 70000), "no meeting place"),
    ],
)
def test_a_gang_that_cannot_meet_is_refused_at_once(place: Gang, cause: str) -> None:
    with pytest.raises(LaunchError, match=cause):
        World.join(place, torch.device("cpu"))
    with pytest.raises(LaunchError, match="RANK='x'"):
        Gang.from_environment({"RANK": "x"})
