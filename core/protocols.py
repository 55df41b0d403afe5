"""Contracts between roles and adapters: engines, trainer backends, weight channels, prompt sources, tokenizers.

Roles import these, never a concrete engine, backend or channel.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from .device_memory import AssetStore, Tag, TagReport
from .messages import EngineUsage, SamplingParams, TensorSpec, WeightManifest
from .samples import F32, I32, U8, FinishReason, Message, Prompt, TrainShard
from .weight_channel import SenderOrder, WeightProgress

A = TypeVar("A")

PauseMode = Literal["abort", "retract", "in_place"]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation by token ids."""

    request_id: str
    input_ids: I32
    """int32 [P]: the whole context, earlier turns and partial tokens included."""
    sampling: SamplingParams
    source: str = ""
    """Data that the prompt was drawn from, and its row: an engine that answers from recordings looks by these."""
    row: int = -1
    index: int = 0
    """Which rollout of its group wants it."""
    branch: int = 0
    """Which sample of that rollout."""
    num_routed: int = 0
    """Of how many of the first tokens the experts are known: an engine that tells them tells those behind."""
    turn: int = 0
    """Which turn of that sample, from 1."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a generation, in order without gaps; the last one has `finish`. Also a whole turn, or reply."""

    output_ids: I32
    """int32 [k]"""
    logprobs: F32
    """float32 [k]"""
    versions: I32
    """int32 [k]: stamped by the engine"""
    kept: I32 | None = None
    """int32 [k, any]: which tokens each was drawn from, filled up with -1; a row of -1: from all. None: all are."""
    experts: U8 | None = None
    """uint8 [any, bytes of a token]: experts of the tokens that follow the `num_routed` first ones of the context, up
    to the last token but one here; they come with the end. See `Sample.experts`. None: the engine does not tell."""
    finish: FinishReason | None = None
    matched: int | None = None
    """Token that stopped it, when finish == "stop". It is the last of the output ids."""
    matched_text: str = ""
    """Stop string that stopped it, if that did. The last of the output ids completes it."""
    is_model: bool = True
    """The model drew them; otherwise they are a reply, which is not learnt."""

    def first(self, num_tokens: int) -> Delta:
        """Its beginning."""
        part, left_out = slice(num_tokens), max(len(self.output_ids) - num_tokens, 0)
        return Delta(
            output_ids=self.output_ids[part],
            logprobs=self.logprobs[part],
            versions=self.versions[part],
            kept=None if self.kept is None else self.kept[part],
            experts=None if self.experts is None else self.experts[: max(len(self.experts) - left_out, 0)],
            is_model=self.is_model,
        )


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do and how it is."""

    kind: str
    vocab_size: int
    context_length: int
    """Longest P + new tokens it accepts."""
    max_running: int
    version: int
    running: int = 0
    waiting: int = 0
    usage: EngineUsage = EngineUsage()


class Engine(Protocol):
    """A rollout engine. All methods raise `EngineError` naming the engine when it misbehaves."""

    pause_mode: PauseMode
    """How running requests meet a commit. abort: they end with finish "abort"; retract: they wait and their KV is
    rebuilt; in_place: they wait and keep their KV."""

    async def start(self) -> EngineInfo:
        """Load the model; returns when requests are served. Raises ModelError for a bad folder."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Stream tokens. The last delta has `finish` ("abort" if aborted or paused so). Closing it early aborts."""
        ...

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all."""
        ...

    async def prepare_weights(self, manifest: WeightManifest) -> None:
        """Bring the bytes beside the old weights and check the digest; the old ones still serve."""
        ...

    async def commit_weights(self, version: int) -> None:
        """Serve `version` from the next token on. Raises EngineError if that version was not prepared."""
        ...

    def weight_progress(self) -> WeightProgress:
        """How far it is with a version that is being prepared or committed; costs nothing."""
        ...

    async def info(self) -> EngineInfo: ...

    async def until_lost(self) -> None:
        """Waits while the engine is well; raises EngineError as soon as it is known to serve no more (its process
        ended, its thread broke, it fell silent). Called once, after `start`; cancelled at the end."""
        ...

    async def close(self) -> None:
        """Release everything; never raises."""
        ...


@runtime_checkable
class TellsLoading(Protocol):
    """An engine that takes minutes to load, and says what it does meanwhile."""

    on_loading: Callable[[str], None]


@runtime_checkable
class ReleasesMemory(Protocol):
    """An engine whose memory leaves its device by tag and comes back. Only after `park`, and until `unpark`, may tags
    be away; nothing is asked to be generated meanwhile."""

    def memory_tags(self) -> tuple[TagReport, ...]:
        """What it holds, with sizes; before `start` what it is going to hold, as "discarded"."""
        ...

    def memory_pids(self) -> tuple[int, ...]:
        """Processes that hold it, this one left out unless it does."""
        ...

    async def park(self, within_s: float) -> None:
        """Wait until nothing runs in it, all requests having been aborted. Raises EngineError if that takes longer."""
        ...

    async def unpark(self) -> None:
        """Everything is back, and requests may come."""
        ...

    async def release_memory(self, tags: Collection[Tag]) -> None:
        """Have these leave. Tags that are away stay away."""
        ...

    async def restore_memory(self, tags: Collection[Tag]) -> None:
        """Have them back, contents of discarded ones undefined: weights must be loaded again."""
        ...


class NamedArray(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor on its way out of the trainer: raw little-endian bytes plus dtype and shape."""

    spec: TensorSpec
    data: memoryview


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank measured in one step; the leader gets values reduced over all ranks."""

    metrics: dict[str, float]


class PendingSave(Protocol):
    """One rank's part of a checkpoint whose content is copied away."""

    def write(self) -> None:
        """Write this rank's files; in any thread, not collective. Raises TrainError when the disk refuses."""
        ...

    def finish(self) -> None:
        """Once every rank has written: the checkpoint is there. Collective."""
        ...


class TrainBackend(Protocol):
    """One trainer rank. Methods block and are called from one worker thread, in the same order on every rank."""

    def setup(self) -> dict[str, Any]:
        """Join the process group, build model and optimizer. Returns facts for the log (parameters, dtype, device)."""
        ...

    def train(self, shard: TrainShard, knobs: dict[str, float]) -> StepStats:
        """One optimizer step per mini-batch of the shard. `knobs` overrides live values such as `lr`."""
        ...

    def judge_knobs(self, knobs: dict[str, float]) -> str:
        """Why a step with these values would be refused; empty if it would not. Asks no other rank and touches no
        tensor: may be called from any thread, while a step runs too."""
        ...

    def export_weights(self) -> list[NamedArray]:
        """HF-named tensors on rank 0 (empty list on other ranks). Collective: every rank must call it."""
        ...

    def export_device(self, *, to_all: bool = False) -> Iterator[tuple[str, Any]]:
        """(HuggingFace name, whole torch tensor on this rank's device, in the serving dtype) on sending ranks, always
        in the same order; nothing elsewhere. With `to_all` the whole model, on every rank. Collective: every rank must
        exhaust it. A tensor's values hold as long as the tensor is kept and nothing is trained."""
        ...

    def begin_save(self, folder: str, extra: dict[str, Any]) -> PendingSave:
        """A resumable checkpoint: its content is copied away when this returns. Collective."""
        ...

    def load(self, folder: str) -> dict[str, Any]:
        """Restore a checkpoint; returns `extra`. Collective. Raises TornCheckpoint on every rank if it is not as it was
        written, TrainError if it is of another model."""
        ...

    def exchange(self, text: str) -> tuple[str, ...]:
        """What every rank says, in the order of ranks, on every rank. Collective."""
        ...

    def export_hf(self, folder: str) -> None:
        """Write a HuggingFace-format folder (rank 0 writes). Collective."""
        ...

    def memory(self) -> AssetStore | None:
        """Its memory, if that can leave the device; None: it stays. Called after `setup`, in the backend's thread."""
        ...

    def close(self) -> None:
        """Leave the process group; never raises."""
        ...


class WeightWriter(Protocol):
    """Trainer's end of a weight channel."""

    def publish(self, version: int, tensors: Sequence[NamedArray]) -> WeightManifest:
        """Write all tensors and return where they are. The bytes stay valid until `release(version)`."""
        ...

    def release(self, version: int) -> None: ...

    def answer(self, order: SenderOrder[A]) -> A:
        """A FetchRequest. Raises TrainError, for all others too."""
        ...

    def close(self) -> None:
        """Free everything; never raises."""
        ...


class WeightRebuilder(Protocol):
    """Rollout actor's end of versions that its engine cannot read as they were published."""

    at: str
    """What it does now; empty: nothing."""

    async def whole(self, manifest: WeightManifest) -> tuple[WeightManifest, str]:
        """What the engine can read: the same version, fetched, made of deltas and checked where that has to be; and why
        what was held did not do, if it did not. Raises EngineError."""
        ...

    async def close(self) -> None: ...


class WeightSender(Protocol):
    """A trainer rank's end of a channel between devices. Every method blocks and may be called from any thread;
    `publish` in the order of the backend's calls. Errors are TrainError."""

    def publish(self, version: int, export: Callable[[], Iterator[tuple[str, Any]]]) -> WeightManifest | None:
        """Copy a version (`export` is `TrainBackend.export_device`, over SHARED_CHANNELS with `to_all`; the first time
        it is gone through twice, on every rank) into staging memory, where it stays until `release`. None where nothing
        is kept: this rank does not send."""
        ...

    def release(self, version: int) -> None: ...

    def answer(self, order: SenderOrder[A]) -> A:
        """The verbs of `core/weight_channel.py`."""
        ...

    def close(self) -> None:
        """Give up all channels and memory; never raises, never waits."""
        ...


class WeightSenders(Protocol):
    """The senders as an engine reaches them, by actor name. Raise CallError when one cannot be asked, or refuses."""

    async def ask(self, sender: str, order: SenderOrder[A]) -> A: ...


class Tokenizer(Protocol):
    """Text <-> token ids by the model folder's own tokenizer and chat template."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    template_place: str
    """Where the chat template was found, for messages."""

    def render_text(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] = (),
        goes_on: bool = False,
    ) -> str:
        """A conversation as text. `goes_on`: the last turn stays open. Raises DataError: the template refuses it."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] = (),
        goes_on: bool = False,
    ) -> list[int]:
        """The same as token ids."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, no special tokens added; special tokens written out in the text are recognised."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


class PromptSource(Protocol):
    """One source of prompts: a pure function from draw number to prompt. The cursor is the ledger's."""

    def __len__(self) -> int:
        """Rows in one pass."""
        ...

    def prompt(self, draw: int) -> Prompt | None:
        """The prompt of a draw from 0 on (`group_id == draw`); None beyond the data. Raises DataError for a bad row."""
        ...

    def row_of(self, draw: int) -> int | None:
        """Row of one pass, from 0, without reading it: equal numbers bring equal prompts. None as `prompt` does."""
        ...


class PromptData(Protocol):
    """All data of a run: its sources by name, the only one called "", and the held-out sets."""

    @property
    def by_name(self) -> Mapping[str, PromptSource]:
        """In the order of names. Each source counts its own draws, from 0."""
        ...

    @property
    def weights(self) -> Mapping[str, float]:
        """What the run file says of the shares of several sources: none negative, not all 0."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal exactly when every draw of every source gives the same prompt: a ledger belongs to one."""
        ...

    def num_held_out(self, name: str = "") -> int:
        """Held-out rows of the set of that name (the only one is called ""); 0 without such a set."""
        ...

    def eval_prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]: ...
