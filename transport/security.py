"""The key of a job. tcp is always encrypted and admits only holders of this key; ipc lies in a 0700 directory.

One pair for the whole job: whoever holds it may be any node. Keys per node are a later refinement; the wire need not
change for them. CURVE of libzmq was preferred to TLS because it needs no certificates and no proxy process.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from ..core.errors import LaunchError


@dataclass(frozen=True, slots=True)
class JobKey:
    """A CURVE key pair, both halves as 40 characters of z85."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> JobKey:
        """A new pair. Raises LaunchError if libzmq was built without CURVE."""
        if not zmq.has("curve"):
            raise LaunchError("this libzmq has no CURVE", remedy="install pyzmq from a wheel")
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def parse(cls, text: str) -> JobKey:
        """From "public secret" as `text` gives it; raises LaunchError."""
        parts = text.split()
        try:
            public, secret = parts
            if len(z85.decode(public.encode())) != 32 or len(z85.decode(secret.encode())) != 32:
                raise ValueError("wrong length")
            if zmq.curve_public(secret.encode()).decode() != public:
                raise ValueError("the halves do not belong together")
        except (ValueError, KeyError, zmq.ZMQError) as error:
            raise LaunchError(f"this is no job key: {error}", remedy='two words of z85: "public secret"') from None
        return cls(public, secret)

    @property
    def text(self) -> str:
        """For an environment variable of a child; never for a log."""
        return f"{self.public} {self.secret}"

    def save(self, path: Path) -> None:
        """Write a new file that only its owner can read."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self.text + "\n")

    @classmethod
    def load(cls, path: Path) -> JobKey:
        """Read a file that `save` wrote; refuses one that others can read."""
        try:
            facts = path.stat()
            text = path.read_text()
        except OSError as error:
            remedy = "copy it from the registry's host"
            raise LaunchError(f"the job key cannot be read: {error}", remedy=remedy) from error
        if stat.S_IMODE(facts.st_mode) & 0o077:
            raise LaunchError(f"{path} can be read by others", remedy=f"chmod 600 {path}")
        return cls.parse(text)
