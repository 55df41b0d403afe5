"""Sections that describe the run, its data and how answers are made and judged.

Every field's docstring says what it is, its unit and what the special values mean; `docs/config.md` is generated
from them. Checks inside one section are here, checks between sections in `root.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from ..stop_strings import MAX_STOP_STRINGS, wrong_stop_string
from ..suggestion import nearest
from .conflict import Conflict
from .section import (
    CodeName,
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
    Temperature,
    TextTuple,
    TopK,
    UnitFloat,
)
from .tables import Table, check_json

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CODE_NAME = re.compile(r"[^:\s][^:]*:[A-Za-z_][A-Za-z0-9_.]*")

WORKFLOW_BUILTINS = ("single_turn", "demonstration")
FILTER_BUILTINS = ("zero_variance", "none")
SAMPLE_FILTER_BUILTINS = ("none", "truncated")


def check_code_name(value: str, builtins: tuple[str, ...]) -> str:
    """Accept a built-in name, `module:attr` or `file.py:attr`; raise ValueError otherwise."""
    if value in builtins or CODE_NAME.fullmatch(value):
        return value
    near = nearest(value, builtins)
    hint = f'; did you mean "{near}"?' if near else ""
    known = f"one of {', '.join(builtins)}, or " if builtins else ""
    raise ValueError(f"must be {known}module:function, or file.py:function{hint}")


class RunSettings(Section, frozen=True):
    """The run as a whole: its name, its folder, when it ends."""

    name: str = "run"
    """Name of the run; letters, digits, `.`, `_`, `-`, at most 64. The run directory is `<dir>/<name>-<stamp>`."""
    dir: PathText = "runs"
    """Folder in which run directories are made; if left out, `runs` in the current folder."""
    seed: CountInt = 1
    """Seed of everything random: data order, sampling, initial value head."""
    num_steps: CountInt = 100
    """Training steps (weight versions made) after which the run ends; 0 = until the data or `max_wall_s` ends it."""
    stop_reward: float = 0.0
    """Mean evaluation reward at which the run ends early; 0 = off."""
    max_wall_s: NonNegativeFloat = 0.0
    """Seconds of wall time after which the run ends in good order; 0 = no limit."""
    chaos: bool = False
    """Whether the run may be made to fail on purpose: by `myxa chaos`, and as the table [chaos] says."""
    preload: bool = True
    """Whether each node keeps a process with the imports done, from which its actors are forked: they start faster and
    share memory. A role with `python` or `env` of its own always gets a fresh interpreter; false: every actor does."""

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, value: str) -> str:
        if not RUN_NAME.fullmatch(value):
            raise ValueError("must be 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit")
        return value


class ModelSettings(Section, frozen=True):
    """The model that is trained."""

    path: Annotated[PathText, Field(min_length=1)]
    """HuggingFace folder: config.json, safetensors, tokenizer files."""


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
    stop_token_ids: IntTuple = ()
    """Token ids that end a turn, besides the model's end-of-sequence tokens."""
    stop: TextTuple = ()
    """Texts that end a turn with the token that completes one; that token stays in the sample. Special tokens count
    as text."""
    deterministic: bool = False
    """Whether nothing but the run file decides what is drawn and trained: with `async.max_staleness = 0` two runs are
    equal to the bit (docs/engines.md). Each turn has a seed made of `run.seed`, draw, sample and turn. SGLang needs
    `sglang.enable_deterministic_inference` for it."""
    workflow: CodeName = "single_turn"
    """How a prompt becomes a sample: single_turn, demonstration (SFT, no engine), or your own function or class,
    `module:name` or `file.py:name`, which runs in worker processes."""
    workflow_args: Table = {}
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
    samples in hand."""
    max_retries: CountInt = 2
    """How often a sample is tried again whose workflow failed by its environment, sandbox or network; then the group
    goes on without it."""
    pause_mode: Literal["in_place", "retract", "abort"] = "in_place"
    """What happens to running generations while weights are swapped: in_place (stand still, keep KV), retract (KV is
    rebuilt), abort (returned to the buffer with their tokens)."""

    save_partials_s: NonNegativeFloat = 5.0
    """Seconds between two tellings of the tokens so far to the buffer, so that a rollout actor that is killed costs no
    more than what came since; 0 = only groups that are handed back go on with their tokens."""

    @field_validator("stop_token_ids")
    @classmethod
    def _ids_are_not_negative(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(token < 0 for token in value):
            raise ValueError("token ids must not be negative")
        return value

    @field_validator("stop")
    @classmethod
    def _stop_strings_can_be_found(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > MAX_STOP_STRINGS:
            raise ValueError(f"has {len(value)} texts, at most {MAX_STOP_STRINGS} are looked for")
        for text in value:
            if wrong := wrong_stop_string(text):
                raise ValueError(f"{text!r} {wrong}")
        return value

    @field_validator("workflow")
    @classmethod
    def _workflow_is_named(cls, value: str) -> str:
        return check_code_name(value, WORKFLOW_BUILTINS)

    @field_validator("workflow_args")
    @classmethod
    def _args_are_json(cls, value: Table) -> Table:
        return check_json(value)

    def conflicts(self) -> Iterator[Conflict]:
        """Arguments that nobody takes, and a turn that would have to be longer than it may be."""
        if self.min_new_tokens > self.max_new_tokens:
            yield Conflict(("min_new_tokens", "max_new_tokens"), f"is above max_new_tokens = {self.max_new_tokens}")
        if self.workflow_args and self.workflow in WORKFLOW_BUILTINS:
            yield Conflict(
                ("workflow_args", "workflow"), f'is for a workflow of your own; "{self.workflow}" takes none'
            )


HTTP_URL = re.compile(r"https?://[^\s/]+(/\S*)?")


def check_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Addresses of different servers; raises ValueError otherwise."""
    for url in urls:
        if not HTTP_URL.fullmatch(url):
            raise ValueError(f'"{url}" must look like http://host:port')
    if len({url.rstrip("/") for url in urls}) != len(urls):
        raise ValueError("names a server twice")
    return urls


class EngineSettings(Section, frozen=True):
    """The rollout engine."""

    max_running: PositiveInt = 256
    """Sequences decoded together."""
    context_length: CountInt = 0
    """Longest prompt plus answer in tokens; 0 = what the model allows."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number type the engine computes in."""
    attach: TextTuple = ()
    """Addresses of running SGLang servers (rollout kind `sglang`), dealt out among the rollout actors: one each, or
    several behind one actor, which shares its requests out among them. Empty: every rollout actor launches its own."""
    router: str = ""
    """Address of an sglang-router in front of the attached servers: requests go through it, control goes to the
    servers. Empty: myxa's own least-loaded routing."""
    key_env: str = ""
    """Environment variable of the rollout actors that holds the key of the attached servers (their
    `--admin-api-key`); empty = they ask for none. Launched servers get a key of their own."""
    python: ProgramName = ""
    """Interpreter that has SGLang, for launched servers; empty = the rollout actor's own."""
    start_s: PositiveFloat = 600.0
    """Seconds a launched or attached server may take to load."""
    seed: CountInt = 0
    """Added to `run.seed` for sampling."""

    @field_validator("attach")
    @classmethod
    def _servers_are_named_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_urls(value)

    @field_validator("router")
    @classmethod
    def _router_is_http(cls, value: str) -> str:
        if value and not HTTP_URL.fullmatch(value):
            raise ValueError("must look like http://host:port")
        return value

    def conflicts(self) -> Iterator[Conflict]:
        """What only attached servers have."""
        if self.router and not self.attach:
            yield Conflict(("router", "attach"), "needs engine.attach: weights go to the servers themselves")
        if self.key_env and not self.attach:
            yield Conflict(("key_env", "attach"), "is for attached servers; launched ones get a key of their own")


class GuardSettings(Section, frozen=True):
    """Does the engine compute what the trainer computes? A few prompts are answered by an engine and scored by the
    trainer under the same weight version; their log-probs must agree, or the run is paused."""

    every: CountInt = 20
    """Weight versions between two checks, after one at the start; 0 = never, the default where
    `roles.rollout.kind = "recorded"`."""
    prompts: Annotated[int, Field(ge=1, le=1024)] = 8
    """Prompts per check, taken from the start of the training data."""
    max_new_tokens: PositiveInt = 64
    """Tokens per answer at most."""
    above: Literal["pause", "fail"] = "pause"
    """What happens above the bound: pause (nothing is generated or trained until the run is resumed or stopped) or
    fail (the run ends)."""
    bound: Literal["auto"] | NonNegativeFloat = "auto"
    """Mean absolute difference of log-probs (nats) above which the run is paused; "auto" = by precision, see
    docs/engines.md."""


class MonitorSettings(Section, frozen=True):
    """Where metrics, events and traces go."""

    tensorboard: bool = True
    """Whether TensorBoard files are written (needs the `tensorboard` extra; left out if it is not installed)."""
    prometheus_port: Annotated[int, Field(ge=-1, le=65535)] = 0
    """Port of the Prometheus page; 0 = any free port (told in the log), -1 = off."""
    trace: bool = True
    """Whether a Chrome trace (`trace.json`) is written."""
    samples_per_step: Annotated[int, Field(ge=0, le=64)] = 8
    """Groups of each step, and prompts of each set of an evaluation, whose prompt and answers are kept in
    `samples.jsonl` for `myxa samples`, page and report: at most half of them from those that the filter left out;
    0 = none."""
    samples_mb: PositiveInt = 256
    """MiB that `samples.jsonl` and `samples.1.jsonl` may have together; the oldest groups go."""
    sinks: TextTuple = ()
    """Further sinks: wandb, mlflow, the name of an installed package's entry point `myxa.sinks`, or your own
    `module:Class`. A package that one needs and the monitor's interpreter lacks refuses the start."""
    options: Table = {}
    """Named arguments of these sinks, a table for each, for example `[monitor.options.wandb]` with `project = "x"`."""

    @field_validator("sinks")
    @classmethod
    def _sinks_are_named_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("names a sink twice")
        return value

    def conflicts(self) -> Iterator[Conflict]:
        """Options without their sink, or not in a table."""
        for name, table in self.options.items():
            if name not in self.sinks:
                near = nearest(name, self.sinks)
                hint = f'; did you mean "{near}"?' if near else ""
                yield Conflict(("options", "sinks"), f'"{name}" is not among monitor.sinks{hint}')
            elif not isinstance(table, dict):
                yield Conflict(("options",), f'"{name}" must be a table of named arguments')
