"""A change of knobs that is to be made, whoever wanted it, and how the audit log puts it. Records only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.knobs import AuditRecord, ChangeRequest, KnobValue, Operator
from .knob_change import ChangeOptions
from .knob_plan import ChangePlan

AUTO = Operator(via="auto")
"""Nobody: an expiry, a resumed run."""


@dataclass(frozen=True, slots=True)
class Order:
    """See the module's head."""

    verb: str
    """"set", "undo", "expire", "resume"."""
    who: Operator
    reason: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What was asked for, for the audit log."""
    options: ChangeOptions = field(default_factory=ChangeOptions)
    for_steps: int = 0
    for_s: float = 0.0
    undoes: int = 0
    """Epoch of the change that it takes back."""

    @classmethod
    def of(cls, request: ChangeRequest, *, verb: str = "set") -> Order:
        """What a request orders."""
        asked: dict[str, Any] = {"values": request.values, "target": request.target}
        extra = {
            "expect": request.expect,
            "for_steps": request.for_steps,
            "for_s": request.for_s,
            "force": request.force,
            "not_before": request.not_before,
        }
        return cls(
            verb=verb,
            who=request.who,
            reason=request.reason,
            arguments=asked | {name: value for name, value in extra.items() if value},
            options=ChangeOptions(force=request.force, dry_run=request.dry_run, not_before=request.not_before),
            for_steps=request.for_steps,
            for_s=request.for_s,
        )

    def refused(self, why: str) -> AuditRecord:
        """Nothing was changed."""
        return self._record(dict(self.arguments), "refused", detail=why)

    def done(self, plan: ChangePlan, epoch: int, at: int) -> AuditRecord:
        """It was decided. `target`, `values` and `own` say all that is needed to do it again."""
        arguments: dict[str, object] = {**self.arguments, "target": plan.target, "values": dict(plan.common)}
        if plan.own:
            arguments["own"] = {owner: dict(values) for owner, values in plan.own.items()}
        if self.undoes:
            arguments["undoes"] = self.undoes
        return self._record(arguments, "done", epoch=epoch, at=at, plan=plan)

    def _record(
        self,
        arguments: dict[str, object],
        result: str,
        *,
        detail: str = "",
        epoch: int = 0,
        at: int = 0,
        plan: ChangePlan | None = None,
    ) -> AuditRecord:
        return AuditRecord(
            number=0,
            wall_s=0.0,
            verb=self.verb,
            who=self.who,
            arguments=arguments,
            result=result,
            detail=detail,
            reason=self.reason,
            epoch=epoch,
            at=at if plan is not None and plan.numbered else 0,
            moves=plan.moves if plan is not None else (),
        )


def pairs(values: Mapping[str, KnobValue]) -> str:
    """For people: "lr = 1e-06, temperature = 0.8"."""
    return ", ".join(f"{name} = {value}" for name, value in values.items())
