"""Reference log-probs of finished samples, from servers; failures are handled by the same policy as those of rewards.

A sample whose servers fail loses its group; failures in a row are an outage, and samples wait (`[reward]` sets how many
and for how long).
"""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from ...core.clock import Clock
from ...core.config import RewardSettings
from ...core.errors import MyxaError, ReferenceFailed, UserCodeError
from ...core.samples import F32, Prompt, Sample
from ..rewards.guard import MAX_PROBES, CallGuard, GaveUp, Tell
from .server import NoScore, Refused
from .wire import WantedScores, in_response, wanted_of

REMEDY = "start or mend the servers of algo.ref_urls; reward.max_error_rate says how many failures a run bears"
REFUSED = "serve a model over the policy's vocabulary, with a context longer than the longest sample by a token"
SERVED_AT = 1.0
"""Temperature of the log-probs that servers give for given tokens."""


class LogprobSource(Protocol):
    """A source of log-probs. Raises NoScore, Refused, ConfigError."""

    async def logprobs(self, wanted: WantedScores) -> F32: ...

    async def close(self) -> None: ...


class ServedReference:
    """One per rollout actor; `judged` may be called concurrently."""

    def __init__(self, servers: LogprobSource, settings: RewardSettings, clock: Clock) -> None:
        """`settings`: what failures mean."""
        self._servers = servers
        self._clock = clock
        self._guard = CallGuard(settings, "the reference model of algo.ref_urls", "reference")
        self._num_calls = 0
        self._call_s = 0.0
        """Seconds of calls that worked, since the last report."""

    async def judged(self, prompt: Prompt, sample: Sample) -> Sample:
        """The sample with its reference log-probs. Raises ReferenceFailed, and UserCodeError for a sample that was
        drawn at another temperature than the servers' log-probs are of."""
        wanted = wanted_of(sample)
        if wanted is None:
            return sample
        if sample.temperature not in (0.0, SERVED_AT):
            raise UserCodeError(
                f"workflow drew a sample at temperature {sample.temperature:g} (group {prompt.group_id}, sample "
                f"{sample.index}), and the reference log-probs of algo.ref_urls are those at temperature {SERVED_AT:g}",
                remedy="draw at temperature 1, or keep the reference model in the trainer: algo.ref_path",
            )
        logprobs = await self._asked(wanted, f"group {prompt.group_id}, sample {sample.index}", prompt.group_id)
        return replace(sample, reference_logprobs=in_response(sample, wanted, logprobs))

    async def _asked(self, wanted: WantedScores, place: str, group_id: int) -> F32:
        guard, num_failed, is_probe = self._guard, 0, False
        while True:
            try:
                is_probe = await guard.enter()
                started_s = self._clock.monotonic()
                found = await self._servers.logprobs(wanted)
            except GaveUp:
                raise _failure(f"is not asked any more; it last {guard.last_error}", place) from None
            except Refused as no:
                guard.refused(f"refused: {no}", group_id, is_probe=is_probe)
                raise _failure(f"refused: {no}", place, REFUSED) from no
            except NoScore as no:
                num_failed += 1
                if guard.failed(f"could not be asked: {no}", group_id, is_probe=is_probe) and num_failed <= MAX_PROBES:
                    is_probe = False
                    continue
                raise _failure(f"could not be asked: {no}", place) from no
            except MyxaError as error:
                guard.ends(str(error), is_probe=is_probe)
                raise ReferenceFailed(error.message, remedy=error.remedy) from error
            except BaseException:
                guard.abandon(is_probe=is_probe)
                raise
            guard.worked(group_id, is_probe=is_probe)
            self._num_calls += 1
            self._call_s += self._clock.monotonic() - started_s
            return found

    # -- what the actor asks, as of rewards

    @property
    def too_many_errors(self) -> str:
        """Empty, or the sentence that ends the run."""
        return self._guard.too_many_errors

    def allow(self, max_error_rate: float) -> None:
        """Another share of failed calls from now on."""
        self._guard.allow(max_error_rate)

    def listen(self, tell: Tell) -> None:
        """`tell` is called when calls stop and when they continue."""
        self._guard.listen(tell)

    def gauges(self) -> dict[str, float]:
        """What the monitor shows of it; seconds are the mean of calls since the last time."""
        values = self._guard.gauges()
        if self._num_calls:
            values["reference/s_mean"] = self._call_s / self._num_calls
        self._num_calls, self._call_s = 0, 0.0
        return values

    async def close(self) -> None:
        """End all connections."""
        await self._servers.close()


def _failure(words: str, place: str, remedy: str = REMEDY) -> ReferenceFailed:
    return ReferenceFailed(f"the reference model of algo.ref_urls {words} ({place})", remedy=remedy)
