"""Control-plane records that travel between roles. Small; bulk data is in `core/samples.py`.

All are frozen msgspec structs: unknown fields are refused, types are checked when a message is decoded.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import msgspec

from .record import Record
from .samples import Group, Prompt, Sample


class EngineUsage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sums over finished requests since the engine's client began; 0 where the server does not report it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Of those that were drafted."""
    verified_steps: int = 0
    """Forward passes that judged a draft."""
    verified_tokens: int = 0
    """New tokens of the requests that had such passes."""

    def __add__(self, other: EngineUsage) -> EngineUsage:
        return EngineUsage(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    def rates_since(self, before: EngineUsage) -> dict[str, float]:
        """Metrics of what came since `before`; nothing of what the server does not do, or does not report."""
        new = {name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__}
        if min(new.values()) < 0:  # a server of several left, with its sums
            return {}
        rates = (
            ("prefix_cache_hit_rate", "cached_tokens", "prompt_tokens"),
            ("draft_acceptance_rate", "accepted_tokens", "drafted_tokens"),
            ("draft_accepted_length", "verified_tokens", "verified_steps"),
        )
        return {f"rollout/{name}": new[part] / new[total] for name, part, total in rates if new[total]}


ActivityKind = Literal[
    "compute", "wait-data", "wait-weights", "wait-capacity", "wait-memory", "wait-env", "paused", "other"
]
WeightChannel = Literal["shm", "disk", "tcp", "nccl", "cuda_ipc"]
RunPhase = Literal["starting", "running", "draining", "finished", "failed"]


NO_TOP_K = -1
"""`top_k` that leaves no token out."""


class SamplingParams(Record, frozen=True):
    """How tokens are drawn. Defaults are plain sampling from the model's own distribution."""

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = NO_TOP_K
    min_p: float = 0.0
    """Only tokens at least so likely, relative to the likeliest; 0: all."""
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    """No end token is drawn before so many."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens that the answer has already are divided by it, negative ones multiplied; 1: none."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time that the answer has it."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the answer has already."""
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end the answer with the token that completes one (see `core.stop_strings`); it stays in the answer."""
    ignore_eos: bool = False
    """No token ends the answer, those of `stop_token_ids` included: so SGLang takes it, and all engines with it."""
    seed: int | None = None
    """Per-request seed: same seed, prompt and weights give the same tokens whatever else runs. What an assignment or an
    evaluation has is the run's, from which each turn's own is derived."""

    def for_rest(self, *, num_done: int, limit: int) -> SamplingParams:
        """Of an answer that has `num_done` tokens, sent as its prompt, and may get `limit` more."""
        least = min(max(self.min_new_tokens - num_done, 0), limit)
        return msgspec.structs.replace(self, max_new_tokens=limit, min_new_tokens=least)


class Assignment(Record, frozen=True):
    """One group handed to a rollout actor. `attempt` fences: a put for an older attempt has no effect."""

    prompt: Prompt
    attempt: int
    num_samples: int
    sampling: SamplingParams
    partial: tuple[Sample, ...] = ()
    """Unfinished samples of an earlier attempt, continued with the tokens they have (finish == "abort")."""
    knobs: int = 0
    """Epoch of the live knobs that the group was dispatched under first; copied into the group."""


DrawBlock = Literal["", "staleness", "weights", "suspect", "data-exhausted", "paused", "finished", "disk"]
"""Why there is no work: disk: the ledger cannot be written; weights: this engine has not adopted the newest version,
one that has would get some; suspect: a group that may be what ends its actors is to be served alone, by this one."""


class DrawRequest(Record, frozen=True):
    """A rollout actor with room asks the buffer for work."""

    rollout: str
    epoch: int
    version: int
    """Weight version its engine serves now."""
    max_groups: int
    wait_s: float
    """Long poll: how long the buffer may hold the call when there is nothing to give."""
    holding: tuple[int, ...] | None = None
    """Groups the rollout actor still has. A group assigned to this incarnation that is not among them was
    lost on the way (its draw reply never arrived) and goes back to REQUEUED. None: unknown."""
    blocked_by: DrawBlock | None = None
    """The reason for no work that it knows: another one is answered at once. None: held whatever the reason."""
    lineage: int = 0
    """Of the weights that its engine serves (`WeightManifest.lineage`)."""
    room: int = 0
    """Groups that the actor could take in all, now and by draws to come; 0: no more than `max_groups`."""


class DrawReply(Record, frozen=True):
    """Work, or the reason why there is none."""

    assignments: tuple[Assignment, ...] = ()
    blocked_by: DrawBlock = ""


class PutResult(Record, frozen=True):
    """What became of a finished group."""

    outcome: Literal["ready", "filtered", "duplicate", "stale-attempt"]
    reason: str = ""


class Claim(Record, frozen=True):
    """Groups claimed for one step; no groups mean: not yet (ask again) or never (`finished`)."""

    step: int
    groups: dict[int, int] = {}
    """Group -> version of its oldest token, as admission counts it; in the order of their draws."""
    max_staleness: int = 0
    """The bound under which these groups were chosen."""
    finished: bool = False
    """No batch will ever come again: the data are exhausted or the run was stopped."""
    reason: str = ""
    """What became of the data, when it is finished."""
    blocked_by: Literal["", "wait-data", "paused", "disk"] = ""


class TensorSpec(Record, frozen=True):
    """Where one named tensor lies in what holds all of them."""

    name: str
    """HuggingFace parameter name."""
    dtype: str
    """"float32", "bfloat16", "float16", "int64", ..."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class WeightDelta(Record, frozen=True):
    """What changed from one version to the next, in a file (`actors/weights/channels/delta.py`)."""

    version: int
    base: int
    """The version that it changes."""
    path: str
    num_bytes: int
    """Of the file."""
    digest: str
    """Of the version that it makes, see `WeightManifest.digest`."""
    base_digest: str


class WeightManifest(Record, frozen=True):
    """One published weight version: where the bytes are and what they must hash to."""

    version: int
    channel: WeightChannel
    location: str
    """shm: /proc/<pid>/fd/<n>; disk, tcp: folder with safetensors files; nccl, cuda_ipc: sending ranks' actor names."""
    num_bytes: int
    tensors: tuple[TensorSpec, ...]
    """Empty for nccl and cuda_ipc: the senders' plans say it (`weight_channel.py`)."""
    digest: str
    """Digest of the bytes, see `actors/weights/channels/` (nccl, cuda_ipc: one per sender, with commas between)."""
    host: str
    """Boot id of the publishing host: shm is readable only there."""
    lineage: int = 0
    """Epoch of the trainer's leader that published it: a restarted one makes the same numbers of other weights."""
    deltas: tuple[WeightDelta, ...] = ()
    """Of a folder, which holds the base of the first; these, in order, make this version of it. Empty: it is whole."""


class StepReport(Record, frozen=True):
    """One trained step, sent by the trainer's leader to the coordinator and the monitor."""

    step: int
    """Version trained from."""
    version: int
    metrics: dict[str, float]
    lags: tuple[int, ...] = ()
    """Per group: `step - oldest version`."""
    group_ids: tuple[int, ...] = ()


class EngineStatus(Record, frozen=True):
    """What a rollout actor says of its engine."""

    rollout: str
    version: int
    running: int
    waiting: int
    draining: bool = False
    usage: EngineUsage = EngineUsage()


class RolloutNow(Record, frozen=True):
    """A rollout that is under way."""

    actor: str
    group_id: int
    """Of held-out prompts: their place in their set."""
    index: int
    """Which one of its group."""
    row: int
    """Of its prompt, in `source`."""
    source: str
    is_held_out: bool
    turn: int
    """The newest turn of the model that was begun; 0: none yet."""
    doing: str
    """"generate", "engine" (first token), "tool search", ...; empty: it waits for the others of its group."""
    since_s: float
    """For how many seconds."""
    began_s: float
    """How many seconds ago it began."""


class GatewayPlace(Record, frozen=True):
    """Where a gateway serves, and the keys that no rollout has; empty: there is none."""

    base_url: str = ""
    port: int = 0
    tasks_key: str = ""
    """For services that poll."""
    eval_key: str = ""
    """For requests that are recorded nowhere."""


class WeightAck(Record, frozen=True):
    """Answer to prepare or commit."""

    rollout: str
    version: int
    accepted: bool
    reason: str = ""
    is_whole: bool = False
    """Refused, and the weights that served before are whole and still serve."""


class EvalRequest(Record, frozen=True):
    """Ask a rollout actor to answer held-out prompts with pinned sampling."""

    prompts: tuple[Prompt, ...]
    num_samples: int
    sampling: SamplingParams
    name: str = ""
    """Of the evaluation set, whose answers may be judged by its own function."""
    pass_reward: float = 1.0
    """From which on an answer counts as solved."""


class EvalResult(Record, frozen=True):
    """Mean reward over held-out prompts, and the versions that took part."""

    mean_reward: float
    num_samples: int
    oldest_version: int
    newest_version: int
    num_errors: int = 0
    """Prompts that were not answered, or not judged."""
    num_left_out: int = 0
    """Held-out rows beyond `num_prompts`, which were not asked."""
    metrics: dict[str, float] = {}
    """By names without "eval/" and the set's name before them."""

    def __str__(self) -> str:
        return f"held-out reward {self.mean_reward:g}{self.left_out}"

    @property
    def left_out(self) -> str:
        """For texts: how many rows were not asked; empty if all were."""
        return f"; {self.num_left_out:,} held-out rows beyond num_prompts were left out" if self.num_left_out else ""


class BufferStats(Record, frozen=True):
    """Counts of groups by state and what admission allows now."""

    states: dict[str, int]
    """ledger state -> number of groups"""
    drawn: int
    trained: int
    dropped: dict[str, int]
    """reason -> number of groups"""
    slots_total: int
    slots_used: int
    max_staleness: int
    policy: str
    mean_tokens: dict[str, float] = {}
    """"trained", and each reason for dropping -> mean response tokens of a group: shows a bias for short answers"""
    complaint: str = ""
    """What a person should know now: no group could be used for a long time, or `disk`."""
    next_step: int = 0
    """The first step without a claim."""
    disk: str = ""
    """Why the ledger cannot be written and what to do; the run waits for it. The counts are those from before."""


class RunStatus(Record, frozen=True):
    """One line of truth about the run, served by the coordinator."""

    name: str
    phase: RunPhase
    version: int
    num_steps: int
    engines: tuple[EngineStatus, ...] = ()
    error: str = ""
    reason: str = ""
    """Why it ended, in one sentence."""
    eval_reward: float | None = None
    paused: str = ""
    """Why nothing is generated or trained now, until the run is resumed."""


class MetricPoint(Record, frozen=True):
    """Values that belong to one step or one moment."""

    source: str
    step: int
    wall_s: float
    values: dict[str, float]


class Event(Record, frozen=True):
    """Something a person may want to know: engine joined, group dropped, knob changed."""

    source: str
    wall_s: float
    kind: str
    text: str
    data: dict[str, Any] = {}


class Span(Record, frozen=True):
    """A stretch of an actor's time; feeds the Chrome trace and the time accounting."""

    source: str
    name: str
    activity: ActivityKind
    start_wall_s: float
    duration_s: float
    track: str = ""
    args: dict[str, Any] = {}


class SaidText(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A message of a conversation, for people."""

    role: str
    content: str
    name: str = ""
    thought: str = ""
    calls: tuple[str, ...] = ()
    """Tools that it calls, as JSON; of the model's own turns they are in the content."""
    call_id: str = ""
    """The call that it answers."""
    is_model: bool = False
    """The model of the run said it. What follows is of its tokens."""
    num_tokens: int = 0
    """0: not known."""
    num_learnt: int = 0
    """Tokens with a weight in the loss."""
    oldest_version: int = -1
    newest_version: int = -1
    reward: float | None = None
    """That this turn earned; None: rewards are of the whole rollout."""


class AnswerText(Record, frozen=True, kw_only=True):
    """One sample, for people."""

    index: int
    branch: int = 0
    """Number of the sample inside its rollout."""
    messages: tuple[SaidText, ...]
    """What was said after the group's prompt, or in a conversation of the sample's own."""
    tools: tuple[str, ...] = ()
    """Of a conversation of its own."""
    num_opening: int = 0
    """The first messages, which are the prompt of a conversation of its own."""
    num_shared: int = 0
    """The first turns of the model, which are learnt in another sample of the rollout: `shared_with`."""
    shared_with: int = -1
    """Its branch; -1: it is not known."""
    reward: float
    reward_parts: dict[str, float]
    finish: str
    num_tokens: int

    @property
    def text(self) -> str:
        """The model's last turn."""
        return next((message.content for message in reversed(self.messages) if message.is_model), "")


class GroupText(Record, frozen=True, kw_only=True):
    """A finished group, for people: a line of `samples.jsonl`."""

    step: int
    """The weight version that its step made, as in `metrics.jsonl`; of held-out prompts the one that answered; of
    groups that the filter left out the one that was to be made next."""
    oldest_version: int
    """Of its tokens; -1: no engine took part."""
    newest_version: int
    group_id: int
    """Of held-out prompts: their place in their set."""
    messages: tuple[SaidText, ...]
    """The prompt."""
    tools: tuple[str, ...] = ()
    """That the prompt offers: declarations as JSON."""
    label: str
    outcome: str
    """"kept", "filtered" or "held-out"."""
    reason: str
    is_held_out: bool
    eval_set: str
    """Name of the evaluation set; empty: the only one, of `eval.data`, or none."""
    source: str
    """Actor that reported it."""
    wall_s: float
    answers: tuple[AnswerText, ...]
    num_answers: int
    """Of the group; those beyond the first are left out."""

    @property
    def prompt(self) -> str:
        return "\n".join(f"{message.role}: {message.content}" for message in self.messages)

    @property
    def words(self) -> str:
        """All that is said."""
        texts = (message.content for answer in self.answers for message in answer.messages)
        return "\n".join([self.prompt, self.label, *texts])


class Telemetry(Record, frozen=True):
    """A bundle of telemetry from an actor to the monitor; lossy by contract."""

    metrics: tuple[MetricPoint, ...] = ()
    events: tuple[Event, ...] = ()
    spans: tuple[Span, ...] = ()
    samples: tuple[GroupText, ...] = ()
    dropped: dict[str, int] = {}
    """What the sender had to throw away since the last bundle, as `counts` names it -> how many."""
    sender: str = ""
    """One incarnation of the actor, whose bundles have rising numbers; empty: they have none."""
    number: int = 0

    def counts(self) -> Counter[str]:
        """Its records: "metrics", "spans", "samples" or "events KIND" -> how many."""
        counts = Counter(f"events {event.kind}" for event in self.events)
        counts.update(metrics=len(self.metrics), spans=len(self.spans), samples=len(self.samples))
        return +counts


DropReason = Literal[
    "reward-error",
    "reward-crash",
    "reference-error",
    "workflow-error",
    "policy-error",
    "environment-error",
    "prompt-too-long",
    "data-error",
    "template-error",
    "engine-error",
]
"""Why a rollout actor gives a group up."""


class GroupDropped(Record, frozen=True):
    """A rollout actor gives a group up: the ledger moves it to DROPPED and its slot is released."""

    group_id: int
    attempt: int
    rollout: str
    reason: DropReason
    detail: str = ""


class GroupFinished(Record, frozen=True):
    """A whole group with rewards, of that attempt."""

    group: Group
    attempt: int


class GroupReturned(Record, frozen=True):
    """A rollout actor hands a group back unfinished (drain, abort): another one continues it with its tokens."""

    group_id: int
    attempt: int
    rollout: str
    partial: tuple[Sample, ...] = ()
    goes_on: bool = False
    """It is not handed back: these are its tokens so far, from which another one continues if this actor dies."""
    has_died: bool = False
    """Its engine failed while it had the group, and the group may be the cause."""
