"""Where a gang begins: all ranks at the checkpoint that rank 0 finds, whatever each of them sees; what is newer is put
away, and what a rank of an earlier life or attempt commits too late is not taken for the newest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from tests.integration.trainer_room import FixedStart
from tests.survival.checkpoint_maker import RunOnDisk, make_checkpoint

from myxa.actors.checkpoints.folder import look_at
from myxa.actors.trainer.start_point import StartPoint, restore
from myxa.core.config import RunConfig
from myxa.core.errors import MyxaError, TornCheckpoint, TrainError
from myxa.launch.actor_spec import ActorSpec
from myxa.launch.composition.trainer_parts import GangStart, checkpoint_options
from myxa.launch.launcher import LaunchOptions, with_start
from myxa.launch.node_place import find_place
from myxa.launch.run_dir import RunDir
from myxa.launch.run_lineage.next_run import begin_next_life
from myxa.launch.run_lineage.origin import Life, RunOrigin
from myxa.launch.run_lineage.resume_point import checkpoints_of, choose_point, earlier_ledger, named_checkpoint

NUM_RANKS = 2


class Ranks:
    """Threads that exchange words; `load` tells what each of them reads."""

    def __init__(self, load: Callable[[int, str], dict[str, Any]]) -> None:
        self._barrier = threading.Barrier(NUM_RANKS, timeout=20)
        self._said = [""] * NUM_RANKS
        self._load = load
        self.loaded: list[list[str]] = [[] for _ in range(NUM_RANKS)]

    def restore(self, finder: Any) -> list[Any]:
        finders = [finder, *(Nobody() for _ in range(1, NUM_RANKS))]
        with ThreadPoolExecutor(NUM_RANKS) as pool:
            return list(pool.map(self._one, range(NUM_RANKS), finders))

    def _one(self, rank: int, finder: Any) -> Any:
        try:
            return restore(rank, finder, cast("Any", Rank(self, rank)))
        except MyxaError as error:
            return error

    def exchange(self, rank: int, text: str) -> tuple[str, ...]:
        self._said[rank] = text
        self._barrier.wait()
        said = tuple(self._said)
        self._barrier.wait()
        return said

    def load(self, rank: int, folder: str) -> dict[str, Any]:
        """As backends do: what one rank finds torn is raised on all."""
        self.loaded[rank].append(folder)
        try:
            problem, extra = "", self._load(rank, folder)
        except TornCheckpoint as error:
            problem, extra = error.message, {}
        problems = self.exchange(rank, problem)
        if any(problems):
            raise TornCheckpoint("; ".join(filter(None, problems)))
        return extra


class Rank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def exchange(self, text: str) -> tuple[str, ...]:
        return self._ranks.exchange(self._rank, text)

    def load(self, folder: str) -> dict[str, Any]:
        return self._ranks.load(self._rank, folder)


class Nobody:
    def find(self, torn: Mapping[str, str]) -> StartPoint:
        raise AssertionError("a rank that looks for itself may find another one")

    def begun(self, start: StartPoint, version: int) -> None:
        raise AssertionError("rank 0 does this")


def version_of(_: int, folder: str) -> dict[str, Any]:
    return {"version": int(Path(folder).name.removeprefix("version_"))}


def damaged(
    *places: Path, who: int = -1, why: str = "checkpoint {} is torn: its bytes have changed"
) -> Callable[[int, str], dict[str, Any]]:
    """That rank (-1: each) finds these torn."""

    def read(rank: int, folder: str) -> dict[str, Any]:
        if Path(folder) in places and who in (-1, rank):
            raise TornCheckpoint(why.format(folder))
        return version_of(rank, folder)

    return read


def asked(attempt: int, resume: str = "") -> tuple[ActorSpec, RunConfig]:
    spec = ActorSpec(name="trainer/0", role="trainer", kind="torch", index=0, node=0, attempt=attempt)
    trainer = {"resume": resume}
    told = {"run": {"name": "small"}, "model": {"path": "/m"}, "data": {"train": "/d.jsonl"}, "trainer": trainer}
    return spec, RunConfig.model_validate(told)


def gang(run: Path, attempt: int, resume: str = "") -> GangStart:
    return GangStart(*asked(attempt, resume), run)


def versions_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("version_")) for path in folder.iterdir())


def test_a_manifest_without_a_version_leaves_it_to_the_folders_name(tmp_path: Path):
    ranks = Ranks(lambda *_: {"knobs": 1})
    found = ranks.restore(FixedStart(str(tmp_path / "version_00000007")))
    assert [extra for _, extra in found] == [{"knobs": 1, "version": 7}] * NUM_RANKS
    for error in ranks.restore(FixedStart(str(tmp_path / "best"))):
        assert str(error) == (
            f"checkpoint {tmp_path}/best does not say of which version it is -- name its folder version_N, as it was"
        )


@pytest.mark.parametrize("who", range(NUM_RANKS))
def test_what_one_rank_finds_torn_all_pass_over_and_nobody_finds_again(tmp_path: Path, who: int):
    """A moment's trouble of one disk: the gang goes back to 2; when it starts again, 3 would be read without trouble,
    but holds groups that are ready again."""
    run = RunOnDisk(tmp_path, steps=3)
    ranks = Ranks(damaged(run.place(3), who=who))
    answers = ranks.restore(gang(run.path, attempt=1))
    assert ranks.loaded == [[str(run.place(3)), str(run.place(2))]] * NUM_RANKS
    start, extra = answers[0]
    assert extra == {"version": 2}
    (text,) = start.passed_over
    assert "version_00000003" in text
    assert "its bytes have changed" in text
    assert versions_in(run.path / "checkpoints") == [1, 2]
    assert versions_in(run.path / "lives" / "1" / "undone") == [3], "nothing is deleted"
    assert gang(run.path, attempt=2).find({}).checkpoint == str(run.place(2))


def test_a_gang_that_finds_no_place_ends_on_every_rank(tmp_path: Path):
    answers = Ranks(version_of).restore(gang(tmp_path, attempt=0, resume=str(tmp_path / "nowhere")))
    assert all(isinstance(answer, TrainError) for answer in answers)
    assert all("no complete checkpoint" in str(answer) for answer in answers)


def test_the_one_that_was_named_is_not_passed_over(tmp_path: Path):
    run = RunOnDisk(tmp_path, steps=3)
    for finder in (gang(tmp_path / "other", attempt=0, resume=str(run.place(3))), FixedStart(str(run.place(3)))):
        ranks = Ranks(damaged(run.place(3)))
        answers = ranks.restore(finder)
        assert all("its bytes have changed" in str(answer) for answer in answers)
        assert ranks.loaded == [[str(run.place(3))]] * NUM_RANKS
    assert versions_in(run.path / "checkpoints") == [1, 2, 3]


def test_a_life_passes_over_what_it_finds_damaged_when_it_is_loaded(tmp_path: Path):
    """`myxa resume` looked at sizes: the ranks are the first who see the bytes."""
    run = RunOnDisk(tmp_path, steps=3)
    RunOrigin(lives=(Life(), Life(version=3))).save(run.path)
    spec, config = asked(attempt=0)
    options = checkpoint_options(spec, config, run.path)
    ranks = Ranks(damaged(run.place(3)))
    start, extra = ranks.restore(gang(run.path, attempt=0, resume=str(run.place(3))))[0]
    assert ranks.loaded == [[str(run.place(3)), str(run.place(2))]] * NUM_RANKS
    assert (extra, start.is_restart, start.life) == ({"version": 2}, False, 2)
    assert "have changed" in start.passed_over[0]
    assert versions_in(run.path / "lives" / "2" / "undone") == [3], "a rank that starts again does not read it again"
    origin = RunOrigin.load(run.path)
    assert origin.lives[-1].began_at == 2
    assert origin.in_words() == "life 2, from version 2"
    told = [text for kind, text in options.origin() if kind == "resumed"]
    assert told == ["life 2 continues from version 2 with "], "as it came to be, not as it was meant"
    assert gang(run.path, attempt=1, resume=str(run.place(3))).find({}).checkpoint == str(run.place(2))
    late = marked(run, 3, life=1, attempt=0)
    assert "went back to version 2" in origin.why_undone(look_at(late))


def test_a_life_all_of_whose_checkpoints_are_damaged_says_so_and_leaves_them(tmp_path: Path):
    run = RunOnDisk(tmp_path, steps=2)
    answers = Ranks(damaged(run.place(1), run.place(2), why="its bytes have changed")).restore(
        gang(run.path, attempt=0, resume=str(run.place(2)))
    )
    for answer in answers:
        assert all(str(answer).count(str(run.place(version))) == 1 for version in (1, 2)), "each once"
        assert str(answer).count("its bytes have changed") == 2 * NUM_RANKS
    assert answers[0].remedy == "start a new run with its config.toml"
    assert versions_in(run.path / "checkpoints") == [1, 2]


@pytest.mark.parametrize("attempt", [0, 1])
def test_what_the_ledger_cannot_go_back_to_is_passed_over_and_nothing_put_away(tmp_path: Path, attempt: int):
    """A checkpoint that would be refused by the ledger is no place to begin: each attempt would put more away."""
    run = RunOnDisk(tmp_path, steps=4)
    begin_next_life(RunDir(run.path), choose_point(run.path, None))
    begun = RunOrigin.load(run.path)
    assert begun.lives[-1].floor == 3, "it keeps what is needed to go back by one"
    ranks = Ranks(damaged(run.place(3), run.place(4)))
    answers = ranks.restore(gang(run.path, attempt, resume=str(run.place(4))))
    assert ranks.loaded == [[str(run.place(4)), str(run.place(3))]] * NUM_RANKS
    assert [type(answer) for answer in answers] == [TrainError] * NUM_RANKS
    assert answers[0].message.count(str(run.place(4))) == 2, "once by each rank"
    assert answers[0].message.count("goes back to version 3 at most") == 2
    assert f"`myxa resume {run.path} --from 2`" in answers[0].remedy
    assert versions_in(run.path / "checkpoints") == [1, 2, 3, 4]
    assert RunOrigin.load(run.path) == begun
    assert not choose_point(run.path, 2, reads_all=True).is_own_ledger, "as the remedy says"
    start, _ = Ranks(damaged(run.place(4))).restore(gang(run.path, attempt, resume=str(run.place(4))))[0]
    assert start.checkpoint == str(run.place(3))


def test_without_any_of_its_own_it_begins_as_at_first(tmp_path: Path):
    run = RunOnDisk(tmp_path, steps=2)
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    assert gang(fresh, attempt=1).find({}).checkpoint == ""
    assert gang(fresh, attempt=1, resume=str(run.path)).find({}).checkpoint == str(run.place(2))


def marked(run: RunOnDisk, version: int, life: int, attempt: int) -> Path:
    return make_checkpoint(run.place(version), version, extra={"version": version, "life": life, "attempt": attempt})


def test_what_a_rank_of_an_earlier_life_commits_too_late_is_nobodys(tmp_path: Path):
    """It hung in the kernel while its run was killed and went on from 3; then its disk answered."""
    run = RunOnDisk(tmp_path, steps=3)
    RunOrigin(lives=(Life(), Life(version=3))).save(run.path)
    marked(run, 9, life=1, attempt=0)
    start = gang(run.path, attempt=1).find({})
    assert (start.checkpoint, start.life) == (str(run.place(3)), 2)
    assert "life 2 went back to version 3" in start.passed_over[0]
    point = choose_point(run.path, None)
    assert point.version == 3
    assert "life 2 went back to version 3" in point.passed_over[0]
    assert "life 2 went back to version 3" in checkpoints_of(run.path)[0]["problem"]
    marked(run, 4, life=2, attempt=0)
    assert gang(run.path, attempt=1).find({}).checkpoint == str(run.place(4)), "its own life's is"


def test_nor_is_that_of_an_attempt_that_was_undone(tmp_path: Path):
    run = RunOnDisk(tmp_path, steps=3)
    marked(run, 3, life=1, attempt=0)
    again = gang(run.path, attempt=1)
    start = again.find({})
    again.begun(start, 3)
    marked(run, 8, life=1, attempt=0)
    assert gang(run.path, attempt=2).find({}).checkpoint == str(run.place(3))
    marked(run, 5, life=1, attempt=1)
    assert gang(run.path, attempt=2).find({}).checkpoint == str(run.place(5))


def test_a_run_that_is_named_is_gone_on_from_where_it_stands_itself(tmp_path: Path):
    run = RunOnDisk(tmp_path, steps=3)
    RunOrigin(lives=(Life(), Life(version=3))).save(run.path)
    late = marked(run, 9, life=1, attempt=0)
    for place in (run.path, run.path / "checkpoints"):
        resume, other = str(place), tmp_path / "other"
        assert gang(other, attempt=0, resume=resume).find({}).checkpoint == str(run.place(3))
        told = {
            "run": {"name": "small"}, "model": {"path": "/m"}, "data": {"train": "/d"}, "trainer": {"resume": resume},
        }  # fmt: skip
        config = RunConfig.model_validate(told)
        assert with_start(config, LaunchOptions(place=find_place(1, 0, None, {}))).trainer.resume == str(run.place(3))
        assert earlier_ledger(config, other) == run.ledger, "which cannot go on from version 9"
    assert named_checkpoint(late) == late, "a name of its own is taken at its word"
    (tmp_path / "wrote-none").mkdir()
    (tmp_path / "wrote-none" / "config.toml").write_text("")
    with pytest.raises(TrainError, match="wrote-none has no checkpoint: it wrote none -- set trainer.checkpoint_every"):
        named_checkpoint(tmp_path / "wrote-none")
    (run.path / "origin.json").write_text("{")
    with pytest.raises(TrainError, match="cannot be read"):
        named_checkpoint(run.path)
