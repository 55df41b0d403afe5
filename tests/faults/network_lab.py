"""Two nodes on encrypted tcp per network fault, a proxy between them, all faults at the same time in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from tests.faults.depot import Depot, DepotContract
from tests.faults.fault_lab import FaultLab, begun
from tests.faults.fault_table import Fault
from tests.faults.operations import BULK_BYTES, CALLING, Plan, Result, begin, judged
from tests.faults.tcp_proxy import Proxy, Way

from myxa.core.refs import with_deadline
from myxa.transport.node import Node
from myxa.transport.wire import Endpoints

NEAR = "127.0.2.1"
STRIKE_S = 0.3
BULK_SPEED = 2e6
"""Bytes a second, so that a bulk transfer is still under way when the fault strikes."""
SLOWED = {
    "latency": ("latency_s", 0.15), "bandwidth": ("bytes_per_s", 1e6), "slicer": ("slice_bytes", 1000),
    "cut": ("limit_bytes", 200_000),
}  # fmt: skip
"""Fault -> what every way has then."""


class Wire:
    """The way from one node to another: a proxy for each lane, made when the first connection is."""

    def __init__(self) -> None:
        self.there = Way()
        self.back = Way()
        self._proxies: dict[str, Proxy] = {}

    def through(self, endpoint: str) -> str:
        """The proxy's endpoint for "tcp://host:port"."""
        proxy = self._proxies.get(endpoint)
        if proxy is None:
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            proxy = self._proxies[endpoint] = Proxy((host, int(port)), self.there, self.back)
        return f"tcp://{proxy.address[0]}:{proxy.address[1]}"

    def reset(self) -> int:
        return sum(proxy.reset() for proxy in self._proxies.values())

    def half_close(self, *, towards_target: bool) -> None:
        for proxy in self._proxies.values():
            proxy.half_close(towards_target=towards_target)

    def stall(self) -> None:
        """A black hole, for those who connect as well."""
        self.there.stall()
        self.back.stall()
        for proxy in self._proxies.values():
            proxy.hide()

    def heal(self) -> None:
        for proxy in self._proxies.values():
            proxy.show()
        self.there.heal()
        self.back.heal()

    @property
    def num_lines(self) -> int:
        """Connections made over it so far."""
        return sum(proxy.num_lines for proxy in self._proxies.values())

    async def close(self) -> None:
        for proxy in self._proxies.values():
            await proxy.close()


def detour(node: Node, wires: dict[str, Wire]) -> None:
    """From now on connections of `node` to a host of `wires` (an address such as "127.0.3.1") go over that wire."""
    transport: Any = node._transport
    straight = transport._address

    def roundabout(*args: Any) -> str:
        endpoint: str = straight(*args)
        wire = wires.get(endpoint.removeprefix("tcp://").rpartition(":")[0])
        return wire.through(endpoint) if wire is not None else endpoint

    transport._address = roundabout


class Place:
    """The far side of one fault and the wires to it and back."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.host = f"127.0.3.{number}"
        self.joiner_host = f"127.0.4.{number}"
        self.requests = Wire()
        self.answers = Wire()
        self.registry = Wire()
        self.stock = folder / f"{number}.stock"
        self.far: Node


class NetworkLab(FaultLab):
    """A proxy on every way between the caller and its callees."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.places = {name: Place(number, self.folder) for number, name in enumerate(names, 1)}

    async def _open(self) -> None:
        await super()._open()
        self.near = await self._attach("near", NEAR, 1, self.host.rendezvous)
        detour(self.near, {place.host: place.requests for place in self.places.values()})
        for number, place in enumerate(self.places.values()):
            place.far = await self._attach(f"far/{number}", place.host, 2 + number, self.host.rendezvous)
            detour(place.far, {NEAR: place.answers})
            await place.far.start(Depot(place.stock), f"depot/{number}")
        await self.near.wait_for(*map(self.depot, self.places), timeout_s=10)
        await asyncio.gather(*(self.probe(name) for name in self.places))

    async def _attach(self, name: str, host: str, rank: int, rdzv, timeout_s: float = 10.0) -> Node:
        node = await Node.attach(
            name=name, rdzv=rdzv, key=self.key, node_rank=rank, tcp=f"{host}:0", timeout_s=timeout_s
        )
        self.nodes.append(node)
        return node

    async def _close(self) -> None:
        await super()._close()
        for place in self.places.values():
            for wire in (place.requests, place.answers, place.registry):
                await wire.close()

    def depot(self, name: str) -> str:
        return f"depot/{self.names.index(name)}"

    def num_lines(self, name: str) -> int:
        return self.places[name].requests.num_lines

    async def probe(self, name: str) -> None:
        """Everything works, on both lanes."""
        depot = with_deadline(self.near.ref(DepotContract, self.depot(name)), 10)
        await depot.whoami()
        await begin("bulk", self.near, self.depot(name), "probe", Plan())

    # -- one fault

    async def run(self, name: str, fault: Fault) -> dict[str, Result]:
        place = self.places[name]
        if not fault.strikes:
            self._apply(name, place)
        elif "bulk" in fault.cells and name != "reset of answers":
            place.requests.there.bytes_per_s = BULK_SPEED
            place.registry.there.latency_s = (
                STRIKE_S / 3.3
            )  # three messages of handshake, then the request is on its way
        tasks = {
            kind: begin(kind, self.near, self.depot(name), f"{kind}-{place.host}", fault.plan)
            for kind in CALLING
            if kind in fault.cells
        }
        if "join" in fault.cells:
            work = self._join(place, fault.plan.join_s)
            tasks["join"] = asyncio.get_running_loop().create_task(judged("join", work))
        if fault.strikes:
            await asyncio.sleep(STRIKE_S)
            await begun(place.stock, {kind: f"{kind}-{place.host}" for kind in tasks})
            self._apply(name, place)
        if fault.lasts_s:
            await asyncio.sleep(fault.lasts_s)
            self._heal(place)
        results = {kind: await task for kind, task in tasks.items()}
        self._heal(place)
        await self.probe(name)
        await self._join(place, 10.0)
        if "put" in fault.cells:  # whatever became of it: put again, it is there once
            again = begin("put", self.near, self.depot(name), results["put"].token, Plan(busy_s=fault.plan.busy_s))
            assert (await again).outcome == "done"
        return results

    async def _join(self, place: Place, timeout_s: float) -> None:
        proxy = place.registry.through(self.host.rendezvous.endpoints.tcp[0])
        address = Endpoints(node_rank=-1, tcp=(proxy, ""))
        rdzv = msgspec.structs.replace(self.host.rendezvous, endpoints=address, socket_dir="")
        node = await self._attach(f"joiner/{place.number}", place.joiner_host, 99, rdzv, timeout_s)
        await node.close(grace_s=0.2)

    def _apply(self, name: str, place: Place) -> None:
        ways = [way for wire in (place.requests, place.answers, place.registry) for way in (wire.there, wire.back)]
        if name in SLOWED:
            for way in ways:
                setattr(way, *SLOWED[name])
        elif name.removeprefix("long ") in ("hole for requests", "hole"):
            for wire in (place.requests, place.registry, *([] if "requests" in name else [place.answers])):
                wire.stall()
        elif name == "hole for answers":
            place.answers.stall()
        elif name == "request lost":
            place.requests.there.is_discarding = True
        elif name == "answer lost":
            place.answers.there.is_discarding = True
        elif name == "slow":
            pass  # the handlers are
        else:
            self._strike(name, place)

    def _strike(self, name: str, place: Place) -> None:
        if name == "reset of requests":
            assert place.requests.reset() == 2
            place.registry.reset()
        elif name == "reset of answers":
            assert place.answers.reset() >= 1
        else:
            for wire in (place.requests, place.registry):
                wire.half_close(towards_target={"half-close, callee": True, "half-close, caller": False}[name])
        place.registry.heal()

    def _heal(self, place: Place) -> None:
        for wire in (place.requests, place.answers, place.registry):
            if wire.there.is_discarding:
                assert wire.reset()
            wire.heal()


assert BULK_BYTES > BULK_SPEED * STRIKE_S
