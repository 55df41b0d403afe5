"""What happens to other processes, told to the actors of this node that watch them and to those who iterate over it."""

from __future__ import annotations

import logging

from ..core.actor import PeerEvent
from ..core.failure_detector import Verdict
from ..core.ids import PeerKey
from .hosting import Hosting
from .monitors import Monitors
from .registry.directory import Directory

_log = logging.getLogger("myxa.transport")


class News:
    """Of one node."""

    def __init__(self, name: str, hosting: Hosting) -> None:
        self._name = name
        self._hosting = hosting
        self._monitors: Monitors | None = None
        self._directory = Directory()

    def read(self, directory: Directory) -> Monitors:
        """Who lives where, from now on; returns what iterators are made of."""
        self._directory = directory
        self._monitors = Monitors(directory.state_of)
        return self._monitors

    def tell(self, event: PeerEvent) -> None:
        """Something happened to an actor elsewhere."""
        self._hosting.tell(event)
        if self._monitors is not None:
            self._monitors.tell(event)

    def judged(self, key: PeerKey, verdict: Verdict, reason: str) -> None:
        """A process is suspect or hung, or has recovered: told of each of its actors; before there are any, under its
        node's name."""
        record = next((node for node in self._directory.nodes() if node.key == key), None)
        if record is not None:
            _log.info("%s: %s is %s: %s", self._name, record.name, verdict, reason)
            for name in tuple(actor.name for actor in record.actors) or (record.name,):
                self.tell(PeerEvent(verdict, name, key.epoch, reason))
