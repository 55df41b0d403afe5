"""Sends a node's connections through proxies. The one place that knows how a transport finds its addresses."""

from __future__ import annotations

from typing import Any

from tests.faults.tcp_proxy import Proxy, Way

from myxa.transport.node import Node


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
    transport: Any = node._opened.transport
    straight = transport._address

    def roundabout(*args: Any) -> str:
        endpoint: str = straight(*args)
        wire = wires.get(endpoint.removeprefix("tcp://").rpartition(":")[0])
        return wire.through(endpoint) if wire is not None else endpoint

    transport._address = roundabout
