"""The one exception tree. Every message names the place, the cause and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Literal

FailureKind = Literal["environment", "sandbox", "network", "policy", "user-code"]
"""Who is to blame for a workflow that failed."""


class MyxaError(Exception):
    """Root of all errors that myxa raises on purpose."""

    exit_code: int = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(f"{message} -- {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy

    def facts(self) -> dict[str, str | int]:
        """For programs: `type` (of this tree), `message`, `remedy`, `exit_code`."""
        kind = next(c.__name__ for c in type(self).__mro__ if c.__module__ == __name__)
        return {"type": kind, "message": self.message, "remedy": self.remedy, "exit_code": self.exit_code}


class ConfigError(MyxaError):
    """The run file, a flag or a path named in it is wrong."""

    exit_code = 2


class ModelError(MyxaError):
    """A model folder is incomplete or of a kind that is not known."""

    exit_code = 2


class TemplateError(ModelError):
    """A chat template cannot write what the run needs of it, whatever the data."""


class DataError(MyxaError):
    """A dataset file, line, column or prompt is wrong."""

    exit_code = 5


class PromptTooLong(DataError):
    """A prompt, or a demonstration with its prompt, does not fit into the engine's context."""


class UserCodeError(MyxaError):
    """A user's reward, workflow or filter raised, hung or returned nonsense."""

    exit_code = 5


class RewardError(UserCodeError):
    """A reward function raised, hung or returned nonsense."""


class DeadlyReward(RewardError):
    """A reward function ended the process that ran it, twice for the same completion."""


class ReferenceFailed(RewardError):
    """No server of the reference model gave the log-probs of a sample: as a failed reward."""


class MemberFailed(MyxaError):
    """A workflow failed for one member of a group, through its environment, sandbox, network or policy."""

    exit_code = 5

    def __init__(
        self, message: str, *, kind: FailureKind = "environment", remedy: str = "", is_bystander: bool = False
    ) -> None:
        """`is_bystander`: another sample's workflow ended the process that both ran in."""
        super().__init__(message, remedy=remedy)
        self.kind: FailureKind = kind
        self.is_bystander = is_bystander


class EngineError(MyxaError):
    """A rollout engine answered wrongly or not at all."""


class EngineLied(EngineError):
    """What an engine says cannot be true: stamps, tokens or log-probs. Nothing that it says is used any more."""


class RequestRefused(EngineError):
    """The engine is well, but the request itself cannot be served (too long, unknown token id); do not repeat it."""


class WeightsRefused(EngineError):
    """The engine did not take a weight version; the old one is whole and still serves."""


class TrainError(MyxaError):
    """A training step or a checkpoint failed."""


class TornCheckpoint(TrainError):
    """A checkpoint is not as it was written, or cannot be read; an older one may do."""


class StalenessError(MyxaError):
    """A group would break the staleness bound. Seeing it means a bug in the admission policy."""


class LedgerError(MyxaError):
    """An illegal transition of a sample."""


class DiskRefused(MyxaError):
    """A disk refuses to be written (full, quota, read-only, failing). Nothing took effect; repeating it is safe."""


class MemoryFault(MyxaError):
    """Device memory could not leave, come back, or be had; also what a driver answered to one of our calls."""


class OutOfDeviceMemory(MemoryFault):
    """The device has less free memory than was asked for."""


class LeaseRefused(MemoryFault):
    """The memory manager refused a lease; the message lists who holds what."""


class LaunchError(MyxaError):
    """Processes could not be started or did not meet in time."""

    exit_code = 3


class CallError(MyxaError):
    """A call to another actor did not end in a reply."""

    callee: str = ""
    """Name of the actor that was called; set by the runtime. Empty: raised by a handler or policy itself."""


class NotSent(CallError):
    """The call never left this process; repeating it is safe."""


class NotExecuted(CallError):
    """The callee refused the call before running it; repeating it is safe."""


class Overloaded(NotExecuted):
    """The callee's mailbox is full."""


class Draining(NotExecuted):
    """The callee is shutting down and takes no new calls."""


class NotReady(NotExecuted):
    """The callee is only coming up; it reports when it is there."""


class NoSuchActor(NotExecuted):
    """No actor of that name is known."""


class NoSuchMethod(NotExecuted):
    """The actor has no handler of that name."""


class BadRequest(NotExecuted):
    """The arguments do not fit the handler's declared types."""


class NotPermitted(NotExecuted):
    """The caller may not do this: its role only lets it look, or it named another actor as the sender."""


class StaleEpoch(NotExecuted):
    """The message was meant for an earlier incarnation of the callee."""


class ProtocolMismatch(NotExecuted):
    """The two processes run different versions of the runtime and do not talk to each other."""


class OutcomeUnknown(CallError):
    """The call may or may not have been executed."""


class DeadlineExceeded(OutcomeUnknown):
    """No answer arrived by the deadline."""


class PeerDied(OutcomeUnknown):
    """The callee's process ended while the call was pending."""


class RemoteError(CallError):
    """The handler raised. The remote error travels as text, never as a pickled object."""

    def __init__(self, message: str, *, remote_type: str = "", remote_traceback: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback


class MessageTooLarge(CallError):
    """A message exceeds its lane's limit and was not sent."""


class GatherError(CallError):
    """Too many members of a group that was called did not answer well."""

    def __init__(
        self,
        message: str,
        *,
        errors: Mapping[str, Exception] | None = None,
        unheard: tuple[str, ...] = (),
        remedy: str = "",
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.errors = dict(errors or {})
        """Member -> what it failed with, in the order of the members."""
        self.unheard = unheard
        """Members that had not answered when it ended (it ended with the first error)."""
        self.callee = ", ".join(self.errors)
        codes = [error.exit_code for error in self.errors.values() if isinstance(error, MyxaError)]
        self.exit_code = codes[0] if codes else self.exit_code


class raised_as:  # noqa: N801 -- read as a statement: with raised_as(...)
    """An error of these causes that is raised inside is raised as `kind` instead, which says
    what could not be done, then why."""

    def __init__(self, kind: type[MyxaError], what: str, *causes: type[BaseException], remedy: str = "") -> None:
        """`what`: empty where the cause says it; `remedy`: empty for the cause's own."""
        self._kind, self._what, self._causes, self._remedy = kind, what, causes, remedy

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, self._causes):
            why = error.message if isinstance(error, MyxaError) else str(error)
            if isinstance(error, OSError) and error.strerror and str(error.filename or "") in self._what:
                why = error.strerror  # the path is said already
            remedy = self._remedy or (error.remedy if isinstance(error, MyxaError) else "")
            raise self._kind(": ".join(filter(None, (self._what, why))), remedy=remedy) from error


def first_line(error: BaseException) -> str:
    """Of its text, for a message; the name of its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
