"""CurveKeys. The job's key lets a process join; every process then speaks under its own key.

    job key      a file (0600) that all launchers of a job hold: who holds it may join under any name, and the process
                 that hosts the registry proves itself with it
    own key      one per incarnation, never written by us: made by the process itself when it joins with the job's key,
                 or by the launcher for a process that it starts, which then never sees the job's key

CURVE of libzmq was preferred to TLS because it needs no certificates, no clock and no proxy process.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq
from zmq.utils import z85

from ..core.errors import LaunchError


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, both halves as 40 characters of z85."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> Self:
        """A new pair, whose public half begins with a letter or digit (flags). Raises LaunchError without CURVE."""
        if not zmq.has("curve"):
            raise LaunchError("this libzmq has no CURVE", remedy="install pyzmq from a wheel")
        public, secret = zmq.curve_keypair()
        while not public[:1].isalnum():
            public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def parse(cls, text: str, place: str = "this") -> Self:
        """From "public secret" as `text` gives it; raises LaunchError naming `place`."""
        parts = text.split()
        try:
            public, secret = parts
            if len(z85.decode(public.encode())) != 32 or len(z85.decode(secret.encode())) != 32:
                raise ValueError("wrong length")
            if zmq.curve_public(secret.encode()).decode() != public:
                raise ValueError("the halves do not belong together")
        except (ValueError, KeyError, zmq.ZMQError) as error:
            raise LaunchError(f"{place} is no job key: {error}", remedy='two words of z85: "public secret"') from None
        return cls(public, secret)

    @property
    def text(self) -> str:
        """For a file or a message that only its owner can read; never for a log."""
        return f"{self.public} {self.secret}"


@dataclass(frozen=True, slots=True)
class JobKey(KeyPair):
    """The pair that all launchers of a job hold, kept in a file."""

    def save(self, path: Path) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(self.text + "\n")

    @classmethod
    def load(cls, path: Path) -> JobKey:
        """Read a file that `save` wrote; refuses one that others can read."""
        try:
            facts = path.stat()
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            remedy = "copy it from the registry's host"
            raise LaunchError(f"the job key cannot be read: {error}", remedy=remedy) from error
        if stat.S_IMODE(facts.st_mode) & 0o077:
            remedy = f"chmod 600 {path}, or copy it: install -m 600 {path} job.key"
            raise LaunchError(f"{path} can be read by others", remedy=remedy)
        return cls.parse(text, str(path))


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """What a process needs to speak over tcp."""

    own: KeyPair
    joining: KeyPair
    """Under which it asks the registry to be let in."""
    registry: str

    @classmethod
    def of_registry(cls, job: KeyPair) -> CurveKeys:
        """Of the process that hosts the registry: it is known by the job's key."""
        return cls(own=job, joining=job, registry=job.public)

    @classmethod
    def to_join(cls, key: KeyPair, registry: str) -> CurveKeys:
        """With the job's key (`registry` "" or its public half), or with a key that was announced to the registry."""
        if key.public == (registry or key.public):
            return cls(own=KeyPair.generate(), joining=key, registry=key.public)
        return cls(own=key, joining=key, registry=registry)
