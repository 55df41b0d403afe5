"""Sections of generation: `[rollout]`, `[engine]`, `[weights]`, and which keys of `[sglang]` a run sets itself.

SGLang is not imported: the names of its ServerArgs are checked against the installed version when a server starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ..sampling import MAX_STOP_STRINGS, wrong_stop_string
from .section import (
    CodeName,
    Conflict,
    CountInt,
    IntTuple,
    NonNegativeFloat,
    OtherPenalty,
    PathText,
    PositiveFloat,
    PositiveInt,
    ProgramName,
    RepetitionPenalty,
    Section,
    Table,
    Temperature,
    TextTuple,
    TopK,
    UnitFloat,
    as_array,
    as_table,
    check_json,
    check_urls,
    clashes,
    named,
)

WORKFLOW_BUILTINS = ("single_turn", "demonstration")


def _token_ids(value: tuple[int, ...]) -> tuple[int, ...]:
    if any(token < 0 for token in value):
        raise ValueError("token ids must not be negative")
    return value


def _stop_strings(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(value) > MAX_STOP_STRINGS:
        raise ValueError(f"has {len(value)} texts, at most {MAX_STOP_STRINGS} are looked for")
    for text in value:
        if wrong := wrong_stop_string(text):
            raise ValueError(f"{text!r} {wrong}")
    return value


class RolloutSettings(Section, frozen=True):
    """How answers are generated."""

    num_samples: PositiveInt = 8
    """Samples per prompt: the size of a group."""
    temperature: Temperature = 1.0
    """Sampling temperature; 0 = greedy (refused when the algorithm needs exploration)."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus: smallest set of tokens with at least this probability; 1 = off."""
    top_k: TopK = -1
    """Only the k most likely tokens; -1 = off."""
    min_p: UnitFloat = 0.0
    """Only tokens at least this probable, relative to the likeliest one; 0 = off."""
    max_new_tokens: PositiveInt = 256
    """Tokens a model turn may have at most."""
    min_new_tokens: CountInt = 0
    """Tokens of a model turn before which its end tokens are not drawn; a stop string ends it all the same."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Divides positive logits (and multiplies negative ones) of tokens that the turn has already; 1 = off."""
    frequency_penalty: OtherPenalty = 0.0
    """Taken off a token's logit for each time that the turn has it; 0 = off."""
    presence_penalty: OtherPenalty = 0.0
    """Taken off the logits of tokens that the turn has already; 0 = off."""
    stop_token_ids: Annotated[IntTuple, AfterValidator(_token_ids)] = ()
    """Token ids that end a turn, besides the model's end-of-sequence tokens."""
    stop: Annotated[TextTuple, AfterValidator(_stop_strings)] = ()
    """Texts that end a turn with the token that completes one; that token stays in the sample. Special tokens count
    as text."""
    deterministic: bool = False
    """Whether nothing but the run file decides what is drawn and trained: with `async.max_staleness = 0` two runs are
    equal to the bit (docs/engines.md). Each turn has a seed made of `run.seed`, draw, sample and turn. SGLang needs
    `sglang.enable_deterministic_inference` for it."""
    workflow: Annotated[CodeName, named(*WORKFLOW_BUILTINS), Field(min_length=1)] = "single_turn"
    """How a prompt becomes a sample: single_turn, demonstration (SFT, no engine), or your own function or class,
    `module:name` or `file.py:name`, which runs in worker processes."""
    workflow_args: Annotated[Table, AfterValidator(check_json)] = {}
    """Named arguments of a workflow of your own: JSON values."""
    max_turns: PositiveInt = 1
    """Model turns a workflow may take."""
    max_groups: PositiveInt = 64
    """Groups in flight per rollout actor."""
    timeout_s: PositiveFloat = 600.0
    """Seconds a workflow may take for one sample, waiting for weights included; of a class: its phase `run`."""
    setup_timeout_s: PositiveFloat = 120.0
    """Seconds for the phase `setup` of a workflow that is a class."""
    finalize_timeout_s: PositiveFloat = 60.0
    """Seconds for its phase `finalize`."""
    score_timeout_s: PositiveFloat = 60.0
    """Seconds for its phase `score`."""
    teardown_timeout_s: PositiveFloat = 30.0
    """Seconds for its `teardown`; also what all workflows get to clean up when their actor ends."""
    max_block_s: PositiveFloat = 5.0
    """Seconds for which an async workflow may hold the loop of its worker process by a call that blocks; then the call
    is interrupted, and the sample fails by its environment."""
    workers: Annotated[int, Field(ge=1, le=256)] = 4
    """Worker processes per rollout actor at most, for a workflow of your own; a further one is started when each has 32
    samples."""
    max_retries: CountInt = 2
    """How often a sample is tried again whose workflow failed by its environment, sandbox or network; then the group
    is finished without it."""
    pause_mode: Literal["in_place", "retract", "abort"] = "in_place"
    """What happens to running generations while weights are swapped: in_place (wait, keep KV), retract (KV is
    rebuilt), abort (returned to the buffer with their tokens)."""

    save_partials_s: NonNegativeFloat = 5.0
    """Seconds between two reports of the tokens so far to the buffer, so that a rollout actor that is killed costs no
    more than what came since; 0 = only groups that are handed back keep their tokens."""

    def conflicts(self) -> Iterator[Conflict]:
        """Arguments without a workflow that takes them, and a minimum length above the maximum."""
        return clashes(
            (self.min_new_tokens > self.max_new_tokens, "min_new_tokens max_new_tokens",
             f"is above max_new_tokens = {self.max_new_tokens}"),
            (self.workflow_args and self.workflow in WORKFLOW_BUILTINS, "workflow_args workflow",
             f'is for a workflow of your own; "{self.workflow}" takes none'),
        )  # fmt: skip


def _router(value: str) -> str:
    return check_urls((value,))[0] if value else value


class EngineSettings(Section, frozen=True):
    """The rollout engine."""

    max_running: PositiveInt = 256
    """Sequences decoded together."""
    context_length: CountInt = 0
    """Longest prompt plus answer in tokens; 0 = what the model allows."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number type the engine computes in."""
    attach: Annotated[TextTuple, AfterValidator(check_urls)] = ()
    """Addresses of running SGLang servers (rollout kind `sglang`), dealt out among the rollout actors: one each, or
    several behind one actor, which shares its requests out among them. Empty: every rollout actor launches its own."""
    router: Annotated[str, AfterValidator(_router)] = ""
    """Address of an sglang-router in front of the attached servers: requests go through it, control goes to the
    servers. Empty: myxa's own least-loaded routing."""
    key_env: str = ""
    """Environment variable of the rollout actors that holds the key of the attached servers (their
    `--admin-api-key`); empty = they ask for none. Launched servers get their own key."""
    python: ProgramName = ""
    """Interpreter that has SGLang, for launched servers; empty = the rollout actor's own."""
    start_s: PositiveFloat = 600.0
    """Seconds a launched or attached server may take to load."""
    seed: CountInt = 0
    """Added to `run.seed` for sampling."""

    def conflicts(self) -> Iterator[Conflict]:
        """What only attached servers have."""
        return clashes(
            (self.router and not self.attach, "router attach",
             "needs engine.attach: weights go to the servers themselves"),
            (self.key_env and not self.attach, "key_env attach",
             "is for attached servers; launched ones get their own key"),
        )  # fmt: skip


OWNED: Mapping[str, str] = {
    "model_path": "set model.path",
    "tokenizer_path": "set model.path: token ids travel, the server needs no tokenizer",
    "skip_tokenizer_init": "leave it out: token ids travel, the server needs no tokenizer",
    "host": "leave it out: a launched server listens on loopback only",
    "port": "leave it out: a free port is taken",
    "admin_api_key": "leave it out: a key is made for every server",
    "api_key": "leave it out: a key is made for every server",
    "weight_version": "leave it out: versions are the trainer's",
    "incremental_streaming_output": "leave it out: streams are always incremental",
    "context_length": "set engine.context_length",
    "dtype": "set engine.dtype",
    "max_running_requests": "set engine.max_running",
    "random_seed": "set engine.seed or run.seed",
    "device": "set roles.rollout.devices",
    "base_gpu_id": "set roles.rollout.devices",
    "gpu_id_step": "set roles.rollout.devices",
    **dict.fromkeys(
        ("nnodes", "node_rank", "dist_init_addr"), "attach to a server of several nodes with engine.attach"
    ),
    "config": "write the arguments into [sglang]",
}
"""ServerArgs field -> what to do instead of setting it in `[sglang]`."""

_ALONE = "a launched server answers requests alone; start such servers yourself and name them in engine.attach"
_WHOLE = "the trainer publishes whole weights, never adapters"
CANNOT: Mapping[str, str] = {
    **dict.fromkeys(("disaggregation", "encoder_", "language_only"), _ALONE),
    **dict.fromkeys(("enable_lora", "lora_", "max_lora"), _WHOLE),
    "is_embedding": "a run needs servers that generate",
    **dict.fromkeys(("grpc_mode", "smg_grpc_mode"), "requests and control go over HTTP"),
    **dict.fromkeys(("ssl_", "enable_ssl"), "a launched server speaks plain HTTP on loopback"),
    "fastapi_root_path": "routes are asked for at the server's root",
    "enable_multimodal": "prompts and samples are text",
    "chat_template": "prompts are rendered by the run, token ids travel; set data.chat_template",
    "preferred_sampling_params": "each request says how it is sampled; set [rollout]",
    "revision": "model.path is a folder; download that revision into it",
}
"""Beginning of a ServerArgs field -> why a run cannot do what it asks for, and what to do instead. The empty value, or
what switches it off, says nothing and is allowed."""
OFF = (False, "", "null", 0)


def owned_conflicts(table: Mapping[str, Any]) -> Iterator[Conflict]:
    """One per key of `[sglang]` that is not the user's to set, and per value that no argument can have."""
    for key, value in table.items():
        if key in OWNED:
            yield Conflict((f"sglang.{key}",), f"is myxa's own; {OWNED[key]}")
        elif value not in OFF and (why := next((why for start, why in CANNOT.items() if key.startswith(start)), "")):
            yield Conflict((f"sglang.{key}",), f"is nothing that a run can do: {why}")
        elif not _is_argument(value):
            yield Conflict((f"sglang.{key}",), "must be text, a number, a boolean, or an array or table of those")


def _is_argument(value: object) -> bool:
    inner = as_array(value) or list((as_table(value) or {}).values())
    return all(map(_is_argument, inner)) and isinstance(value, str | bool | int | float | list | dict)


ChannelName = Literal["auto", "shm", "disk", "nccl", "cuda_ipc"]


class WeightSettings(Section, frozen=True):
    """How new weights get from the trainer to the engines."""

    channel: ChannelName = "auto"
    """shm (shared memory, for embedded engines on the trainer's nodes), disk (folders), nccl (broadcast from the
    trainer's GPU into the servers'; by gloo where the trainer is on CPUs), cuda_ipc (servers whose GPUs
    each have a trainer rank read the memory of that rank). "auto": cuda_ipc where both roles name a same GPU and every
    engine's GPU has a rank (disk where only some have), nccl where the roles' GPUs are others, else shm or disk."""
    bucket_mb: Annotated[int, Field(ge=1, le=65536)] = 2048
    """MiB of weights sent at once. A server needs up to twice that beside its weights while it loads."""
    verify_every: CountInt = 0
    """Weight versions (nccl, cuda_ipc) after which some weights are read back from each server and compared; 0 =
    never. Digests of what was received are always compared where the server reports them."""
    join_s: PositiveFloat = 30.0
    """Seconds a server may take to join the trainer's process group."""
    transfer_s: PositiveFloat = 30.0
    """Seconds one transfer may take; a failed one is repeated once through a new group."""
    adopt_at_once: PositiveInt = 1
    """Engines that bring a new version in at the same time; the others serve meanwhile. More: all have it sooner, and
    fewer generate while they wait for it."""
    stall_s: NonNegativeFloat = 20.0
    """Seconds without any progress after which an engine's update is given up and the engine rebuilt, before the
    deadline of the whole phase; 0 = the deadlines only."""
    served_folder: PathText = ""
    """Model folder that the servers were started with, if it is not `model.path`; if its weights are FP8 in blocks,
    weights are quantised likewise on the way (nccl, cuda_ipc)."""
