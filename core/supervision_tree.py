"""The tree of supervised children: branches, their strategies, and which neighbours a strategy restarts. Pure.

    run (one_for_one, no restart budget)
    ├── buffer          one child with its own budget
    ├── trainer (gang)  trainer/0, trainer/1, ...
    └── rollout (quorum 2)
        ├── rollout/0   one child with its own budget
        └── ...

A tree can grow and shrink while its children run: `BranchSpec.members` is how a branch begins, `members()` how it is.

The words are OTP's (supervisor, strategy, intensity and period, permanent/transient/temporary); training needs gang and
quorum beyond them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

RestartType = Literal["permanent", "transient", "temporary"]
Strategy = Literal["one_for_one", "one_for_all", "rest_for_one", "gang"]
WhenHung = Literal["wait", "kill"]


class SupervisionError(ValueError):
    """A tree that cannot be, or an event that cannot happen in a child's state: the caller is wrong."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What the supervisor must know of one child."""

    name: str
    restart: RestartType = "permanent"
    """permanent: started again after any end; transient: not after exit status 0; temporary: never."""
    when_hung: WhenHung = "wait"
    """wait: it is left alone until it answers again or ends; kill: it is killed, and `restart` decides."""
    grace_s: float = 10.0
    """Between the request to end and the kill."""


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
    """So many members are enough: one that may not be restarted is given up while that many are left. 0: as many as it
    began with."""

    @property
    def enough(self) -> int:
        """So many members must be left when one of the first is given up. Those that came later are not needed."""
        return self.quorum or len(self.members)


Member = ChildSpec | BranchSpec


class SupervisionTree:
    """Answers questions about a tree of branches. Raises SupervisionError for one that cannot be."""

    def __init__(self, root: BranchSpec) -> None:
        self.root = root
        self._above: dict[int, BranchSpec] = {}
        self._members: dict[str, list[Member]] = {}
        """Branch name -> who belongs to it now."""
        branches, children = list(_branches(root)), list(leaves_of(root))
        _check_names([branch.name for branch in branches], "branches")
        _check_names([child.name for child in children], "children")
        for branch in branches:
            self._enter(branch)
        self._count()

    def _enter(self, branch: BranchSpec) -> None:
        _check_branch(branch)
        self._members[branch.name] = list(branch.members)
        for member in branch.members:
            self._above[id(member)] = branch

    def _count(self) -> None:
        self.branches: tuple[BranchSpec, ...] = tuple(self._branches_under(self.root))
        self.children: Mapping[str, ChildSpec] = {child.name: child for child in self._leaves_under(self.root)}
        """In start order."""

    # -- growing and shrinking

    def check_room(self, branch_name: str, member: Member, *, without: Sequence[str] = ()) -> None:
        """Raises SupervisionError if `add` would, were the children `without` removed before: the branch is a gang,
        complete as it is, or a name is in use."""
        branch = self.branch(branch_name)
        if branch.strategy == "gang":
            raise SupervisionError(f"{branch_name} is a gang: no child can join it later")
        leaving = {self.member_of(child).name for child in without}
        if branch_name in leaving:
            raise SupervisionError(f"{branch_name} goes with {', '.join(without)}")
        branches = [each.name for each in self.branches if each.name not in leaving]
        children = [name for name in self.children if name not in without]
        below = [] if isinstance(member, ChildSpec) else [each.name for each in _branches(member)]
        _check_names([*branches, *below], "branches")
        _check_names([*children, *(child.name for child in leaves_of(member))], "children")

    def add(self, branch_name: str, member: Member) -> None:
        """One more member, started after the others of its branch. Raises as `check_room` does."""
        self.check_room(branch_name, member)
        for each in () if isinstance(member, ChildSpec) else _branches(member):
            self._enter(each)
        branch = self.branch(branch_name)
        self._members[branch_name].append(member)
        self._above[id(member)] = branch
        self._count()

    def remove(self, child: str) -> tuple[Member, ...]:
        """Forget a child, and the branch that was made for it alone; returns what was forgotten. Raises
        SupervisionError for a rank of a gang."""
        gone = tuple({id(each): each for each in (self.member_of(child), self.children[child])}.values())
        above = self._above[id(gone[0])]
        self._members[above.name] = [each for each in self._members[above.name] if each is not gone[0]]
        for each in gone:
            del self._above[id(each)]
        self._count()
        return gone

    def member_of(self, child: str) -> Member:
        """What goes when that child goes: the branch that was made for it alone, or the child itself. Raises
        SupervisionError for a rank of a gang."""
        if child not in self.children:
            raise SupervisionError(f"no child is named {child!r}")
        member = self.children[child]
        branch = self._above[id(member)]
        if branch.strategy == "gang":
            raise SupervisionError(f"{child} is a rank of {branch.name}: it cannot go alone")
        is_alone = len(branch.members) == len(self._members[branch.name]) == 1
        return branch if is_alone and branch is not self.root else member

    # -- questions

    def branch(self, name: str) -> BranchSpec:
        """The branch of that name; SupervisionError if there is none."""
        found = next((branch for branch in self.branches if branch.name == name), None)
        if found is None:
            raise SupervisionError(f"there is no branch {name!r}")
        return found

    def members(self, branch: BranchSpec) -> tuple[Member, ...]:
        """Who belongs to it now, in start order."""
        return tuple(self._members[branch.name])

    def above(self, member: Member) -> BranchSpec | None:
        """The branch that a member belongs to; None: it is the root."""
        return self._above.get(id(member))

    def came_later(self, member: Member) -> bool:
        """Whether it, or a branch above it, was added to a tree that began without it."""
        branch = self.above(member)
        if branch is None:
            return False
        return all(member is not each for each in branch.members) or self.came_later(branch)

    def needed(self, branch: BranchSpec, member: Member) -> int:
        """So many others of the branch must be left when that member is given up. One that came later is not needed as
        long as any is left: the run did without it before."""
        return branch.enough if any(member is each for each in branch.members) else branch.quorum or 1

    def leaves(self, member: Member) -> tuple[str, ...]:
        """Names of the children under it, in start order."""
        return tuple(child.name for child in self._leaves_under(member))

    def stages(self, branch: BranchSpec, failed: Member) -> tuple[tuple[str, ...], ...]:
        """Whom the branch's strategy restarts when that member fails, in the order in which they are to end: the
        children of a stage together, the next stage when the one before is gone."""
        members = self.members(branch)
        at = next(i for i, member in enumerate(members) if member is failed)
        match branch.strategy:
            case "one_for_one":
                return self.all_stages(failed)
            case "rest_for_one":
                return tuple(self._backwards(member) for member in reversed(members[at:]))
            case "one_for_all" | "gang":
                return self.all_stages(branch)

    def all_stages(self, member: Member) -> tuple[tuple[str, ...], ...]:
        """Everything under it in the order in which it is to end: last started first; a gang's children together, for
        each of them waits for the others."""
        if isinstance(member, ChildSpec) or member.strategy == "gang":
            return (self._backwards(member),)
        return tuple(self._backwards(each) for each in reversed(self.members(member)))

    def gangs(self, names: frozenset[str]) -> tuple[BranchSpec, ...]:
        """The gangs whose children are among `names`."""
        return tuple(b for b in self.branches if b.strategy == "gang" and names.issuperset(self.leaves(b)))

    def _backwards(self, member: Member) -> tuple[str, ...]:
        return self.leaves(member)[::-1]

    def _branches_under(self, branch: BranchSpec) -> Iterator[BranchSpec]:
        yield branch
        for member in self.members(branch):
            if isinstance(member, BranchSpec):
                yield from self._branches_under(member)

    def _leaves_under(self, member: Member) -> Iterator[ChildSpec]:
        if isinstance(member, ChildSpec):
            yield member
            return
        for each in self.members(member):
            yield from self._leaves_under(each)


def _branches(branch: BranchSpec) -> Iterator[BranchSpec]:
    yield branch
    for member in branch.members:
        if isinstance(member, BranchSpec):
            yield from _branches(member)


def leaves_of(member: Member) -> Iterator[ChildSpec]:
    """The children that a member begins with, in start order."""
    if isinstance(member, ChildSpec):
        yield member
        return
    for each in member.members:
        yield from leaves_of(each)


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
