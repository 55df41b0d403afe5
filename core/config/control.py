"""How a run is watched and changed while it goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, field_validator

from .conflict import Conflict
from .section import PathText, Section

ENDPOINT = re.compile(r"(?P<host>[^\s:/]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})")
NO_DASHBOARD = -1


class ControlSettings(Section, frozen=True):
    """How a run is watched and changed while it goes on; see docs/control.md."""

    socket: bool = True
    """Whether the launcher of node 0 opens the control sockets that `myxa get`, `set`, `ps` and the others speak to."""
    view_group: str = ""
    """Group of this host whose members may use the socket that only shows; empty = only the user of the run."""
    tcp: str = ""
    """Endpoint "HOST:PORT" for other hosts, encrypted (CURVE); port 0 takes any free one. Empty = none."""
    key_file: PathText = ""
    """Key pair of that endpoint, made by `myxa control keygen FILE`."""
    allow_file: PathText = ""
    """Public keys that may use that endpoint, one a line: "operate KEY NAME" or "view KEY NAME"."""
    dashboard_port: Annotated[int, Field(ge=NO_DASHBOARD, le=65535)] = NO_DASHBOARD
    """Port of the web dashboard on 127.0.0.1; 0 takes any free one, -1 = no dashboard."""

    autopilot: bool = False
    """Whether suggestions (`myxa suggest`) are approved by themselves: at most one in five steps, only for what lasts,
    never back and forth; pinned knobs are left alone."""

    @field_validator("tcp")
    @classmethod
    def _is_endpoint(cls, value: str) -> str:
        found = ENDPOINT.fullmatch(value)
        if value and (found is None or int(found["port"]) > 65535):
            raise ValueError('must look like "HOST:PORT"')
        return value

    def conflicts(self) -> Iterator[Conflict]:
        """The endpoint needs its keys, and the sockets."""
        if not self.tcp:
            return
        for name in ("key_file", "allow_file"):
            if not getattr(self, name):
                yield Conflict((name, "tcp"), f'must be set: tcp = "{self.tcp}" is encrypted')
        if not self.socket:
            yield Conflict(("socket", "tcp"), "must be true where tcp is set")
