"""Who stands under whom: children, branches with a strategy, and what a strategy does to a child's neighbours. Pure.

    run (one_for_one, no restarts of its own)
    ├── buffer          one child with a budget of its own
    ├── trainer (gang)  trainer/0, trainer/1, ...
    └── rollout (quorum 2)
        ├── rollout/0   one child with a budget of its own
        └── ...

The words are OTP's (supervisor, strategy, intensity and period, permanent/transient/temporary); gang and quorum are
what training needs beyond them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from .child_states import SupervisionError

RestartType = Literal["permanent", "transient", "temporary"]
Strategy = Literal["one_for_one", "one_for_all", "rest_for_one", "gang"]
WhenHung = Literal["wait", "kill"]


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What the supervisor must know of one child."""

    name: str
    restart: RestartType = "permanent"
    """permanent: started again after any end; transient: not after exit status 0; temporary: never."""
    when_hung: WhenHung = "wait"
    """wait: it is left alone until it answers again or ends; kill: it is killed, and `restart` decides."""
    grace_s: float = 10.0
    """Between being told to end and being killed."""


@dataclass(frozen=True, slots=True)
class BranchSpec:
    """Children (or branches) that share a strategy and a restart budget. Start order is the order of `members`."""

    name: str
    members: tuple[ChildSpec | BranchSpec, ...]
    strategy: Strategy = "one_for_one"
    """Who is restarted when a member fails: it alone; all; it and those started after it; gang: all, at the same time,
    as one attempt with one new rendezvous."""
    max_restarts: int = 3
    """Restarts that this branch may make within `period_s`; then the branch itself has failed, and its own branch
    decides (escalation)."""
    period_s: float = 300.0
    quorum: int = 0
    """So many members are enough: one that may not be restarted is given up while that many are left. 0: all."""


Member = ChildSpec | BranchSpec


class SupervisionTree:
    """Answers questions about a tree of branches. Raises SupervisionError for one that cannot be."""

    def __init__(self, root: BranchSpec) -> None:
        self.root = root
        self.children: Final[Mapping[str, ChildSpec]]
        self._above: dict[int, BranchSpec] = {}
        self.branches: Final[tuple[BranchSpec, ...]] = tuple(_branches(root))
        children = list(_leaves(root))
        _check_names([branch.name for branch in self.branches], "branches")
        _check_names([child.name for child in children], "children")
        for branch in self.branches:
            _check_branch(branch)
            for member in branch.members:
                self._above[id(member)] = branch
        self.children = {child.name: child for child in children}

    def above(self, member: Member) -> BranchSpec | None:
        """The branch that a member belongs to; None: it is the root."""
        return self._above.get(id(member))

    def leaves(self, member: Member) -> tuple[str, ...]:
        """Names of the children under it, in start order."""
        return tuple(child.name for child in _leaves(member))

    def stages(self, branch: BranchSpec, failed: Member) -> tuple[tuple[str, ...], ...]:
        """Whom the branch's strategy restarts when that member fails, in the order in which they are to end: the
        children of a stage together, the next stage when the one before is gone."""
        at = next(i for i, member in enumerate(branch.members) if member is failed)
        match branch.strategy:
            case "one_for_one":
                return self.all_stages(failed)
            case "rest_for_one":
                return tuple(self._backwards(member) for member in reversed(branch.members[at:]))
            case "one_for_all" | "gang":
                return self.all_stages(branch)

    def all_stages(self, member: Member) -> tuple[tuple[str, ...], ...]:
        """Everything under it in the order in which it is to end: last started first; a gang's children together, for
        each of them waits for the others."""
        if isinstance(member, ChildSpec) or member.strategy == "gang":
            return (self._backwards(member),)
        return tuple(self._backwards(each) for each in reversed(member.members))

    def gangs(self, names: frozenset[str]) -> tuple[BranchSpec, ...]:
        """The gangs whose children are among `names`."""
        return tuple(b for b in self.branches if b.strategy == "gang" and names.issuperset(self.leaves(b)))

    def _backwards(self, member: Member) -> tuple[str, ...]:
        return self.leaves(member)[::-1]


def _branches(branch: BranchSpec) -> Iterator[BranchSpec]:
    yield branch
    for member in branch.members:
        if isinstance(member, BranchSpec):
            yield from _branches(member)


def _leaves(member: Member) -> Iterator[ChildSpec]:
    if isinstance(member, ChildSpec):
        yield member
        return
    for each in member.members:
        yield from _leaves(each)


def _check_names(names: list[str], what: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SupervisionError(f"{what} named twice: {', '.join(twice)}")


def _check_branch(branch: BranchSpec) -> None:
    if not branch.members:
        raise SupervisionError(f"branch {branch.name} has no members")
    if not 0 <= branch.quorum <= len(branch.members):
        raise SupervisionError(f"branch {branch.name}: {branch.quorum} of {len(branch.members)} members is no quorum")
    if branch.max_restarts < 0 or branch.period_s <= 0:
        raise SupervisionError(f"branch {branch.name}: {branch.max_restarts} restarts in {branch.period_s:g} s")
    if branch.strategy != "gang":
        return
    if branch.quorum or not all(isinstance(m, ChildSpec) and m.restart == "permanent" for m in branch.members):
        raise SupervisionError(f"gang {branch.name}: all its members are permanent children, and it has no quorum")
