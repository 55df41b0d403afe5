"""An actor of your own with a live knob. docs/walk-knob.md says what boundaries and epochs are."""

from myxa.actors.knobs.owner import Knob, KnobOwner, OwnsKnobs
from myxa.core.knobs import KnobValue, Tunable

PENALTY = Tunable(
    name="length_penalty",
    kind="float",
    boundary="now",
    owner="judge",
    low=0.0,
    high=1.0,
    help="Reward taken off for every 100 tokens of an answer.",
)


class Judge(OwnsKnobs):
    def __init__(self) -> None:
        self.length_penalty = 0.1

    async def on_start(self) -> None:
        def use(value: KnobValue) -> None:
            self.length_penalty = float(value)

        knob = Knob(PENALTY, read=lambda: self.length_penalty, use=use)
        self.knob_owner = KnobOwner(self.ctx.name, [knob], last_boundary=lambda: -1, clock=self.ctx.clock)
