"""Held-out reward beside training."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from ...core.errors import ConfigError, MyxaError
from ...core.ids import LEADER
from ...core.messages import EvalRequest, EvalResult
from ...core.suggestion import suggest
from ..contracts import DataContract, RolloutContract, TrainerContract
from ..weights.rollout_update import Adopter, Adoption
from .run_state import RunContext


class Evaluator:
    """See the module's head."""

    def __init__(self, run: RunContext, adoption: Adoption, adopter: Adopter) -> None:
        self._ctx, self._options, self._state = run.ctx, run.options, run.state
        self._meter, self._telemetry, self._keep, self._until_answered = run.meter, run.telemetry, run.keep, run.ask
        self._adoption = adoption
        self._adopter = adopter
        self._turn = asyncio.Lock()
        self._is_waited_for = False

    async def attempt_anew(self) -> EvalResult | None:
        """Evaluate the run's present version, unless that was evaluated last. A failure is reported, not fatal."""
        async with self._turn:
            return await self._attempt()

    async def attempt_due(self) -> EvalResult | None:
        """The same, but for one that waits already: that will be of the newest version. Where evaluations take longer
        than the steps between them, they do not queue."""
        if self._is_waited_for:
            return None
        self._is_waited_for = True
        async with self._turn:
            self._is_waited_for = False
            return await self._attempt()

    async def _attempt(self) -> EvalResult | None:
        """In its turn: an evaluation that was under way may have been of the same version."""
        live = self._options
        if self._state.eval_version == self._state.known_version or not live.eval.has_prompts:
            return None
        if live.has_engines and not (live.takes_turns or self._adoption.serving):
            return None
        try:
            return await self._evaluated("")
        except MyxaError as err:
            self._telemetry.event("eval-failed", str(err))
            self._ctx.log.exception("evaluation")
            return None

    async def evaluate(self, name: str = "") -> EvalResult:
        """On the engine that serves the newest version; one at a time. `name`: of one set, else all of them, one after
        the other; the reward is then the mean over the sets. Raises ConfigError without held-out prompts, or for a set
        that there is not, EngineError and CallError when no engine answers."""
        self._chosen(name)  # before it waits
        async with self._turn:
            return await self._evaluated(name)

    async def _evaluated(self, name: str) -> EvalResult:
        lineage = self._adoption.lineage  # the trainer may go back meanwhile, and make the version again
        with self._meter.during("wait-data", "evaluation"):
            results = await self._ask_all(self._chosen(name))
        whole = _together(results)
        if not name:
            self._state.eval_reward = whole.mean_reward
            is_of_one = whole.oldest_version == whole.newest_version and lineage == self._adoption.lineage
            self._state.eval_version = whole.newest_version if is_of_one else -1
            await self._keep()
        if not name and list(results) != [""]:
            self._telemetry.metric(whole.newest_version, {"eval/reward": whole.mean_reward})
        text = (
            f"held-out reward {whole.mean_reward:.3f} over {whole.num_samples} samples "
            f"(versions {whole.oldest_version} to {whole.newest_version})"
        )
        if "" not in results:
            text += "; " + ", ".join(f"{one} {result.mean_reward:.3f}" for one, result in results.items())
        text += whole.left_out
        self._ctx.log.info("eval: %s", text)
        self._telemetry.event("eval", text)
        return whole

    def _chosen(self, name: str) -> Sequence[str]:
        if not self._options.eval.has_prompts:
            raise ConfigError("this run has no held-out prompts", remedy="name them in the run file as eval.data")
        sets = self._options.eval_sets
        if not name:
            return tuple(sets)
        if name not in sets:
            remedy = suggest(name, sets) if "" not in sets else "leave the name out: this run has one set, eval.data"
            raise ConfigError(f"there is no evaluation set {name!r}", remedy=remedy)
        return (name,)

    async def _ask_all(self, chosen: Sequence[str]) -> dict[str, EvalResult]:
        """Results of each set, each reported when it is there. Raises the first failure after the others were asked."""
        results: dict[str, EvalResult] = {}
        failures: list[MyxaError] = []
        for name in chosen:
            try:
                results[name] = result = await self._ask(name)
            except MyxaError as err:
                if name:
                    self._telemetry.event("eval-failed", f"set {name}: {err}")
                failures.append(err)
            else:
                self._telemetry.metric(result.newest_version, result.metrics)
        if failures:
            raise failures[0]
        return results

    async def _ask(self, name: str) -> EvalResult:
        live, buffer = self._options, self._ctx.ref(DataContract, "buffer")
        one, others = live.eval_sets[name], live.eval_sampling
        asked: RolloutContract | TrainerContract = self._ctx.ref(TrainerContract, LEADER)  # which compares pairs
        if live.has_engines:
            ready = await self._adopter.ready_engines()
            engine = max(ready, key=lambda n: self._adoption.serving.get(n, -1))
            asked = self._ctx.ref(RolloutContract, engine)
        num_prompts = one.num_prompts or live.eval.num_prompts
        prompts = await self._until_answered("buffer", lambda: buffer.eval_prompts(num_prompts, name))
        num_rows = await self._until_answered("buffer", lambda: buffer.num_held_out(name))
        request = EvalRequest(
            prompts=prompts,
            num_samples=one.num_samples or live.eval.num_samples,
            sampling=msgspec.structs.replace(
                others,
                temperature=live.eval.temperature if one.temperature < 0 else one.temperature,
                top_p=one.top_p,
                top_k=one.top_k,
                max_new_tokens=one.max_new_tokens or others.max_new_tokens,
            ),
            name=name,
            pass_reward=one.pass_reward,
        )
        result = await asked.evaluate(request)
        prefix = f"eval/{name}/" if name else "eval/"
        return msgspec.structs.replace(
            result,
            num_left_out=num_rows - len(prompts),
            metrics={prefix + key: value for key, value in result.metrics.items()},
        )


def _together(results: Mapping[str, EvalResult]) -> EvalResult:
    """Of all sets that were asked, each of the same weight."""
    all_results = list(results.values())
    mean_reward = sum(one.mean_reward for one in all_results) / len(all_results)
    return EvalResult(
        mean_reward=mean_reward,
        num_samples=sum(one.num_samples for one in all_results),
        oldest_version=min(one.oldest_version for one in all_results),
        newest_version=max(one.newest_version for one in all_results),
        num_errors=sum(one.num_errors for one in all_results),
        num_left_out=sum(one.num_left_out for one in all_results),
        metrics={key: value for one in all_results for key, value in one.metrics.items()},
    )
