"""Held-out reward beside training: one evaluation at a time, on the engine that serves the newest version."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from ...core.errors import ConfigError, MyxaError
from ...core.ids import LEADER
from ...core.messages import EvalRequest, EvalResult
from ...core.suggestion import suggest
from ..contracts import DataContract, RolloutContract, TrainerContract
from ..weights.rollout_update import Adopter, Adoption
from .run_state import RunContext


class Evaluator:
    """Of the coordinator; every result is reported as metrics and as the event `eval`."""

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
        options = self._options
        if self._state.eval_version == self._state.known_version or not options.eval.has_prompts:
            return None
        if options.has_engines and not (options.takes_turns or self._adoption.serving):
            return None
        try:
            return await self._evaluate("")
        except MyxaError as error:
            self._telemetry.event("eval-failed", str(error))
            self._ctx.log.exception("evaluation")
            return None

    async def evaluate(self, name: str = "") -> EvalResult:
        """`name`: of one set, else all of them, one after the other; the reward is then the mean over the sets. Raises
        ConfigError without held-out prompts, or for a set that there is not, EngineError and CallError when no engine
        answers."""
        self._sets(name)  # before it waits
        async with self._turn:
            return await self._evaluate(name)

    async def _evaluate(self, name: str) -> EvalResult:
        lineage = self._adoption.lineage  # the trainer may go back meanwhile, and make the version again
        with self._meter.during("wait-data", "evaluation"):
            results = await self._ask_all(self._sets(name))
        total = _combine(list(results.values()))
        if not name:
            is_of_one = total.oldest_version == total.newest_version and lineage == self._adoption.lineage
            self._state.eval_reward = total.mean_reward
            self._state.eval_version = total.newest_version if is_of_one else -1
            await self._keep()
        if not name and list(results) != [""]:
            self._telemetry.metric(total.newest_version, {"eval/reward": total.mean_reward})
        text = (
            f"held-out reward {total.mean_reward:.3f} over {total.num_samples} samples "
            f"(versions {total.oldest_version} to {total.newest_version})"
        )
        if "" not in results:
            text += "; " + ", ".join(f"{set_name} {result.mean_reward:.3f}" for set_name, result in results.items())
        text += total.left_out
        self._ctx.log.info("eval: %s", text)
        self._telemetry.event("eval", text)
        return total

    def _sets(self, name: str) -> Sequence[str]:
        """Of that name; empty: all. Raises ConfigError."""
        if not self._options.eval.has_prompts:
            raise ConfigError("this run has no held-out prompts", remedy="name them in the run file as eval.data")
        names = self._options.eval_sets
        if name and name not in names:
            remedy = suggest(name, names) if "" not in names else "leave the name out: this run has one set, eval.data"
            raise ConfigError(f"there is no evaluation set {name!r}", remedy=remedy)
        return (name,) if name else tuple(names)

    async def _ask_all(self, names: Sequence[str]) -> dict[str, EvalResult]:
        """Results of each set, each reported when it is there. Raises the first failure after the others were asked."""
        results: dict[str, EvalResult] = {}
        failures: list[MyxaError] = []
        for name in names:
            try:
                results[name] = result = await self._ask(name)
            except MyxaError as error:
                if name:
                    self._telemetry.event("eval-failed", f"set {name}: {error}")
                failures.append(error)
            else:
                self._telemetry.metric(result.newest_version, result.metrics)
        if failures:
            raise failures[0]
        return results

    async def _ask(self, name: str) -> EvalResult:
        options, buffer = self._options, self._ctx.ref(DataContract, "buffer")
        settings = options.eval_sets[name]
        evaluating: RolloutContract | TrainerContract = self._ctx.ref(TrainerContract, LEADER)  # which compares pairs
        if options.has_engines:
            engines = await self._adopter.ready_engines()
            engine = max(engines, key=lambda name: self._adoption.serving.get(name, -1))
            evaluating = self._ctx.ref(RolloutContract, engine)
        num_prompts = settings.num_prompts or options.eval.num_prompts
        prompts = await self._until_answered("buffer", lambda: buffer.eval_prompts(num_prompts, name))
        num_rows = await self._until_answered("buffer", lambda: buffer.num_held_out(name))
        request = EvalRequest(
            prompts=prompts,
            num_samples=settings.num_samples or options.eval.num_samples,
            sampling=msgspec.structs.replace(
                options.eval_sampling,
                temperature=options.eval.temperature if settings.temperature < 0 else settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                max_new_tokens=settings.max_new_tokens or options.eval_sampling.max_new_tokens,
            ),
            name=name,
            pass_reward=settings.pass_reward,
        )
        result = await evaluating.evaluate(request)
        prefix = f"eval/{name}/" if name else "eval/"
        return msgspec.structs.replace(
            result,
            num_left_out=num_rows - len(prompts),
            metrics={prefix + key: value for key, value in result.metrics.items()},
        )


def _combine(results: Sequence[EvalResult]) -> EvalResult:
    """Of all sets that were asked, each of the same weight."""
    return EvalResult(
        mean_reward=sum(result.mean_reward for result in results) / len(results),
        num_samples=sum(result.num_samples for result in results),
        oldest_version=min(result.oldest_version for result in results),
        newest_version=max(result.newest_version for result in results),
        num_errors=sum(result.num_errors for result in results),
        num_left_out=sum(result.num_left_out for result in results),
        metrics={key: value for result in results for key, value in result.metrics.items()},
    )
