"""Handlers: what a declaration means, what is inherited, what cannot be declared."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from myxa.actors import contracts
from myxa.core.actor import Actor
from myxa.core.errors import BadRequest
from myxa.core.handlers import (
    CallScope,
    call,
    current_caller,
    enter_scope,
    fresh_context,
    handlers_of,
    remaining_s,
)
from myxa.core.refs import Ref, make_ref, with_deadline


class Point(msgspec.Struct, frozen=True):
    x: int
    data: npt.NDArray[np.float32]


class Contract(Actor):
    @call(deadline=7, reentrant=True)
    async def add(self, a: int, b: int = 2) -> int:
        raise NotImplementedError

    @call()
    async def note(self, text: str) -> None:
        raise NotImplementedError

    @call(cancellable=False)
    async def put(self, point: Point) -> bool:
        raise NotImplementedError

    async def private(self) -> None:
        raise AssertionError


class Role(Contract):
    async def add(self, a, b=2):
        return a + b

    async def private(self):
        raise AssertionError


class Recorder:
    """A caller that writes down what it is asked to carry."""

    def __init__(self):
        self.asked = []

    async def request(self, target, spec, request, deadline_s):
        self.asked.append((target, spec.name, msgspec.structs.astuple(request), deadline_s))


def test_a_role_inherits_the_declarations_of_its_contract():
    specs = handlers_of(Role).by_name
    assert sorted(specs) == ["add", "note", "put"]
    assert specs["add"].declaration.deadline_s == 7
    assert specs["add"].declaration.is_reentrant
    assert not specs["put"].declaration.is_cancellable
    assert handlers_of(Role).names == handlers_of(Contract).names


@pytest.mark.parametrize(
    "contract", [c for c in vars(contracts).values() if isinstance(c, type) and issubclass(c, Actor)]
)
def test_the_contracts_of_the_house_compile(contract):
    table = handlers_of(contract)
    assert [s.index for s in table.specs] == list(range(len(table.specs)))
    assert issubclass(make_ref(Recorder(), contract, "x").__class__, Ref)


def broken(body: str, **names: Any) -> type:
    space = {"Actor": Actor, "call": call, **names}
    exec(compile(f"class Bad(Actor):\n{body}", "<bad>", "exec", dont_inherit=True), space)
    return space["Bad"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("  @call()\n  async def f(self, a) -> int: ...", "not annotated: a"),
        ("  @call()\n  async def f(self, a: int): ...", "not annotated: return"),
        ("  @call()\n  def f(self) -> int: ...", "is `async def`"),
        ("  @call()\n  async def f(self, *a: int) -> int: ...", "plain one"),
        ("  @call()\n  async def f(self, *, a: int) -> int: ...", "plain one"),
        ("  @call()\n  async def f(self, a: list[int] | tuple[int, ...]) -> int: ...", "cannot travel"),
    ],
)
def test_what_cannot_be_a_handler_is_refused_by_name(body, message):
    with pytest.raises(TypeError, match=rf"Bad\.f: .*{message}"):
        handlers_of(broken(body))


def test_an_override_with_other_parameters_is_refused():
    class Wrong(Contract):
        async def add(self, a, c=2):  # pyright: ignore[reportIncompatibleMethodOverride]  # on purpose
            return a + c

    with pytest.raises(TypeError, match=r"Wrong\.add: parameters differ from the declaration in Contract\.add"):
        handlers_of(Wrong)


async def test_references_bind_arguments_as_the_method_would():
    recorder = Recorder()
    ref = make_ref(recorder, Contract, "role/0")
    await ref.add(1)
    await ref.add(1, b=5)
    await with_deadline(ref, 0.5).add(a=3)
    await ref.note("x")
    assert recorder.asked == [
        ("role/0", "add", (1, 2), 7),
        ("role/0", "add", (1, 5), 7),
        ("role/0", "add", (3, 2), 0.5),
        ("role/0", "note", ("x",), 30.0),
    ]
    untyped: Any = ref
    for args, kwargs in (((), {}), ((1, 2, 3), {}), ((), {"c": 1})):
        with pytest.raises(BadRequest, match=r"role/0\.add"):
            await untyped.add(*args, **kwargs)
    assert not hasattr(ref, "private")
    for seconds in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="every wait has an end"):
            with_deadline(ref, seconds)
    with pytest.raises(TypeError, match="wants a reference"):
        with_deadline(Role(), 1)
    assert "role/0" in repr(ref)


def test_scopes_are_inherited_by_nested_calls_and_not_by_background_tasks():
    def inside() -> None:
        enter_scope(CallScope(deadline_at=10.0))
        assert remaining_s(30.0, now=4.0) == 6.0
        assert remaining_s(2.0, now=4.0) == 2.0
        assert remaining_s(None, now=4.0) == 6.0
        assert fresh_context().run(current_caller) is None
        assert fresh_context().run(remaining_s, None, 0.0) is None

    fresh_context().run(inside)
    assert remaining_s(None, now=4.0) is None
    assert asyncio.iscoroutinefunction(Role().add)
