"""Sections that describe the run, its processes and generation.

Every field's docstring says what it is, its unit and what the special values mean; `docs/config.md` and the schema for
editors are made of them. Checks inside one section are here, checks between sections in `root.py`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from ..sampling import MAX_STOP_STRINGS, wrong_stop_string
from ..suggestion import nearest
from ..supervision import WhenHung
from .hub import ModelPath
from .section import (
    HTTP_URL,
    IS_FROZEN,
    CodeName,
    Conflict,
    CountInt,
    EnvTable,
    IntTuple,
    JsonTable,
    Means,
    NonNegativeFloat,
    OtherPenalty,
    PathText,
    PositiveFloat,
    PositiveInt,
    ProgramName,
    RepetitionPenalty,
    Section,
    Table,
    TableName,
    Temperature,
    TextTuple,
    TopK,
    UnitFloat,
    as_table,
    check_name_text,
    check_once,
    check_urls,
    clashes,
    code_names,
    has_shell_variable,
)
from .servers import GroupSettings, ServerShape

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _run_name(value: str) -> str:
    if not RUN_NAME.fullmatch(value):
        raise ValueError("must be 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    return value


class RunSettings(Section, frozen=True):
    """The run as a whole: its name, its folder, when it ends."""

    name: Annotated[str, AfterValidator(_run_name)] = "run"
    """Name of the run; letters, digits, `.`, `_`, `-`, at most 64. The run directory is `<dir>/<name>-<stamp>`."""
    dir: PathText = "runs"
    """Folder in which run directories are made; if left out or empty, `runs` in the current folder."""
    seed: CountInt = 1
    """Seed of everything random: data order, sampling, initial value head."""
    num_steps: CountInt = 100
    """Training steps (weight versions made) after which the run ends; 0 = until the data or `max_wall_s` ends it."""
    stop_reward: float = 0.0
    """Mean evaluation reward at which the run ends early; 0 = off."""
    max_wall_s: NonNegativeFloat = 0.0
    """Seconds of wall time after which the run ends regularly; 0 = no limit."""
    preload: bool = True
    """Whether each node keeps a process with the imports done, from which its actors are forked: they start faster and
    share memory. A role with its own `python` or `env` always gets a fresh interpreter; false: every actor does."""


class ModelSettings(Section, frozen=True):
    """The model that is trained."""

    path: Annotated[ModelPath, Field(min_length=1)]
    """HuggingFace folder (config.json, safetensors, tokenizer files), or a model of the hub: `org/name`,
    `org/name@revision`."""


class GuardSettings(Section, frozen=True):
    """Does the engine compute what the trainer computes? In each step whose tokens are all of the version that it is
    made from, as those of the first step are, both log-probs of a token must agree, or the run is paused."""

    above: Literal["pause", "fail"] = "pause"
    """What happens above the bound: pause (nothing is generated or trained until the run is resumed or stopped) or
    fail (the run ends)."""
    bound: Literal["auto"] | NonNegativeFloat = "auto"
    """Mean absolute difference of log-probs (nats) above which the run is paused; "auto" = by precision, see
    docs/engines.md; 0 = none."""


class MonitorSettings(Section, frozen=True):
    """Where metrics, events and traces go."""

    tensorboard: bool = True
    """Whether TensorBoard files are written (needs the `tensorboard` extra; left out if it is not installed)."""
    trace: bool = True
    """Whether a Chrome trace (`trace.json`) is written."""
    samples_per_step: Annotated[int, Field(ge=0, le=64)] = 8
    """Groups of each step, and prompts of each set of an evaluation, whose prompt and answers are kept in
    `samples.jsonl` for `myxa samples`, page and report: at most half of them from those that the filter left out;
    0 = none."""
    samples_mb: PositiveInt = 256
    """MiB that `samples.jsonl` and `samples.1.jsonl` may have together; the oldest groups go."""
    sinks: Annotated[TextTuple, AfterValidator(check_once), Means("code")] = ()
    """Further sinks: wandb, mlflow, or your own `module:Class` or `file.py:Class`. A package that one
    needs and the monitor's interpreter lacks refuses the start."""
    options: Annotated[Table, Means("code")] = {}
    """Named arguments of these sinks, a table for each, for example `[monitor.options.wandb]` with `project = "x"`."""

    def conflicts(self) -> Iterator[Conflict]:
        """Options without their sink, or not in a table."""
        for name, table in self.options.items():
            if name not in self.sinks:
                near = nearest(name, self.sinks)
                hint = f'; did you mean "{near}"?' if near else ""
                yield Conflict("options", f'"{name}" is not among monitor.sinks{hint}')
            elif (arguments := as_table(table)) is None:
                yield Conflict("options", f'"{name}" must be a table of named arguments')
            elif has_shell_variable(" ".join(f"={value}" for value in arguments.values())):
                yield Conflict(f"options.{name}", "has a variable of the environment, which is not replaced")


NO_DASHBOARD = -1


class ControlSettings(Section, frozen=True):
    """How a live run is watched and changed; see docs/control.md."""

    socket: bool = True
    """Whether the launcher of node 0 opens the control socket that `myxa get`, `set`, `ps` and the others speak to."""
    dashboard_port: Annotated[int, Field(ge=NO_DASHBOARD, le=65535)] = NO_DASHBOARD
    """Port on 127.0.0.1 of the web dashboard and of `/metrics` for Prometheus; 0 takes any free one, -1 = none."""


DEVICE_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
RANK_ENV = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that say which rank a process is, and where all ranks meet."""
MAX_DEVICES = 64

RoleName = Literal["coordinator", "buffer", "monitor", "memory", "gateway", "trainer", "rollout", "model"]


def parse_devices(text: str) -> tuple[int, ...]:
    """GPU numbers of `"0-3,6"`; empty for `"cpu"`. Raises ValueError saying what is wrong."""
    if text == "cpu":
        return ()
    devices: list[int] = []
    for part in text.split(","):
        match = DEVICE_RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError('must be "cpu" or GPU numbers like "0-3" or "0,2,5"')
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first:
            raise ValueError(f'range "{part.strip()}" runs backwards')
        if last >= MAX_DEVICES:
            raise ValueError(f"GPU {last} is beyond the {MAX_DEVICES} a node can have")
        devices.extend(range(first, last + 1))
    if len(set(devices)) != len(devices):
        raise ValueError("names a GPU twice")
    return tuple(devices)


def _devices(text: str) -> str:
    parse_devices(text)
    return text


class RoleSettings(Section, frozen=True):
    """One role: how many actors, where, with which interpreter, and how failures are met."""

    count: Annotated[int, Field(ge=1, le=1024)] = 1
    """Actors on each of `nodes`."""
    nodes: Literal["*"] | IntTuple = (0,)
    """Node numbers on which the actors run, or "*" for every node."""
    python: ProgramName = ""
    """Python interpreter of the role's processes; empty = the launcher's own."""
    env: EnvTable = {}
    """Further environment variables of the role's processes."""
    max_restarts: CountInt = 3
    """Restarts of one actor, or of all trainer ranks together, after which the run ends. Counted from 0 after
    15 minutes without one. The first restart is immediate, and so is one after 20 s of uptime; otherwise the pause
    is 1 s, doubled each time up to 30 s, less up to half of it at random."""
    when_hung: WhenHung = "wait"
    """A process whose event loop does not answer: wait (it is named in the log and left alone) or kill (it is
    killed, with its stacks in its log; then `max_restarts` decides)."""
    devices: Annotated[str, AfterValidator(_devices)] = "cpu"
    """"cpu", or GPU numbers per node like "0-3" or "0,2"."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads for torch in each process (OMP_NUM_THREADS); numpy has one in actors that are forked (`run.preload`)."""

    @property
    def device_ids(self) -> tuple[int, ...]:
        """GPU numbers; empty on CPU."""
        return parse_devices(self.devices)

    def conflicts(self) -> Iterator[Conflict]:
        """GPUs that are named twice."""
        devices, visible = self.device_ids, self.env.get("CUDA_VISIBLE_DEVICES")
        is_other = visible is not None and visible.replace(" ", "") != ",".join(map(str, devices))
        cause = f"must be left out: it is made from devices = {self.devices}"
        yield from clashes((devices and is_other, "env.CUDA_VISIBLE_DEVICES", cause))

    @field_validator("nodes")
    @classmethod
    def _nodes_are_named_once(cls, value: str | tuple[int, ...]) -> str | tuple[int, ...]:
        if isinstance(value, tuple):
            if not value:
                raise ValueError("must name at least one node")
            if min(value) < 0:
                raise ValueError("node numbers must not be negative")
            if len(set(value)) != len(value):
                raise ValueError("names a node twice")
        return value


class SingleRole(RoleSettings, frozen=True):
    """A role of which a run has exactly one actor: coordinator (run state, weight versions), buffer (prompt cursor,
    ledger, finished groups) or monitor (metrics, events, traces)."""

    count: Annotated[int, Field(ge=1, le=1)] = 1
    """Always 1."""
    when_hung: WhenHung = "kill"
    """A process whose event loop does not answer: kill (the next one continues from its journal or ledger) or wait. A
    group filter that computes for longer than ten seconds at a time needs wait in the buffer."""

    @field_validator("nodes")
    @classmethod
    def _one_node(cls, value: str | tuple[int, ...]) -> str | tuple[int, ...]:
        if value == "*" or len(value) != 1:
            raise ValueError("this role has one actor in the whole run: name exactly one node")
        return value


class MemoryRole(RoleSettings, frozen=True):
    """The memory manager of runs whose trainer and engine take turns (`memory.share = "switch"`), on the first of
    `nodes`, and its agents on the others; else not started."""

    count: Annotated[int, Field(ge=1, le=1)] = 1
    """Always 1."""
    when_hung: WhenHung = "kill"
    """A process whose event loop does not answer: kill (tenants report to the next one what they hold) or wait."""


class GatewayRole(SingleRole, frozen=True):
    """One address for agents and people, in front of those of all rollout actors (docs/agents.md)."""

    count: Annotated[int, Field(ge=0, le=1)] = 0
    """1 = the run has one address (`agents.json`); 0 = each rollout actor has its own (`agents.N.json`)."""
    host: str = "127.0.0.1"
    """Address that it listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Its port; 0 = any free one, which it has again when it is started again."""
    when_hung: WhenHung = "kill"
    """A process whose event loop does not answer: kill (clients ask the next one again) or wait."""


class TrainerRole(RoleSettings, frozen=True):
    """The gang of trainer ranks; `count` ranks on each node."""

    kind: Literal["torch", "megatron"] = "torch"
    """Training backend: torch (plain, replicated or sharded) or megatron (every parallelism; see `[megatron]`)."""
    when_hung: WhenHung = "kill"
    """A rank whose event loop does not answer: kill (its mates would wait for it in a collective) or wait."""

    def conflicts(self) -> Iterator[Conflict]:
        """Variables that would make a process another rank."""
        yield from super().conflicts()
        for name in set(RANK_ENV) & set(self.env):
            yield Conflict(f"env.{name}", "must be left out: it is made from count and nodes")

    @property
    def rank_devices(self) -> tuple[int, ...]:
        """GPU of each rank of a node, by local rank; empty on CPU."""
        devices = self.device_ids
        return tuple(devices[local % len(devices)] for local in range(self.count)) if devices else ()


class RolloutRole(RoleSettings, frozen=True):
    """Rollout actors; `count` on each node, one engine each."""

    kind: Literal["embedded", "sglang"] = "embedded"
    """Engine: embedded (CPU, in the process) or sglang (a server that the actor launches, see `[sglang]`, or attaches
    to, see `engine.attach`)."""
    quorum: CountInt = 0
    """The run continues without actors that may not be restarted (any more), or whose node is lost, while so many are
    left; 0 = all that it began with must be. Those that came later (`myxa scale`, `myxa launch --join`) are never
    needed, as long as any is left."""


class RolesSettings(Section, frozen=True):
    """All roles. `roles["trainer"]` and `roles.trainer` are the same."""

    coordinator: SingleRole = SingleRole()
    buffer: SingleRole = SingleRole()
    monitor: SingleRole = SingleRole()
    memory: MemoryRole = MemoryRole()
    gateway: GatewayRole = GatewayRole()
    trainer: TrainerRole = TrainerRole()
    rollout: RolloutRole = RolloutRole()

    def __getitem__(self, name: str) -> RoleSettings:
        """The role of that name; KeyError for an unknown one."""
        if name not in type(self).model_fields:
            raise KeyError(name)
        role: RoleSettings = getattr(self, name)
        return role

    def by_name(self) -> Iterator[tuple[str, RoleSettings]]:
        """All roles with their names, in the order in which they are started."""
        for name in type(self).model_fields:
            yield name, self[name]


ShareMode = Literal["none", "switch"]
CommunicatorWay = Literal["auto", "keep", "reload"]


class MemorySettings(Section, frozen=True):
    """How trainer and engine share the memory of devices that both of them name."""

    share: ShareMode = "none"
    """none (each has its own memory, both run at the same time) or switch (they take turns: a memory manager has
    one of them leave the devices before the other comes back; nothing that is generated is lost)."""
    communicators: CommunicatorWay = "auto"
    """What becomes of the trainer's communicators while it is off the device: keep (they stay) or reload (a proxy
    backend, which a C++ compiler builds once, drops and rebuilds them). "auto": reload on GPUs where there is a
    compiler, else keep. A trainer of one rank has none to give back."""
    host_pool_gb: NonNegativeFloat = 0.0
    """GiB of host memory per trainer rank for what leaves its device, taken once at start and pinned on GPUs; what does
    not fit is refused. 0 = what leaves by being copied (parameters, optimizer, reference model) and 5 % more: with one
    Megatron rank in bfloat16 14 bytes a parameter."""
    capacity_mb: CountInt = 0
    """MiB of each node's stand-in device in runs on the CPU (memory of the host), which must be set there."""
    reserve_mb: CountInt = 1024
    """MiB of each GPU that are never granted: contexts, workspaces, fragments. The stand-in device has no such."""
    workspace_mb: CountInt = 0
    """MiB of each device that a trainer rank needs beside parameters, gradients and optimizer in its turn:
    activations and logits of its largest micro-batch. The engine makes that much room, too. Must be set on GPUs."""
    switch_s: PositiveFloat = 120.0
    """Seconds one change of hands may take; then the lease is refused with who holds what, and asked for again. When
    that was refused three times the trainer gang fails. The start of an engine has `engine.start_s` more."""


# -- generation --------------------------------------------------------------------------------------------------------

WORKFLOW_BUILTINS = ("single_turn", "demonstration", "preference")
AGENT_WORKFLOW = "agent"
ENVIRONMENT_WORKFLOW = "environment"
WORKFLOW_NAMES = (*WORKFLOW_BUILTINS, AGENT_WORKFLOW, ENVIRONMENT_WORKFLOW)


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
    replay_sampling: bool = False
    """Whether the engine tells which tokens `top_p`, `top_k` and `min_p` left, and log-probs, the trainer's too, are
    those of a softmax over these. Embedded engine and torch trainer."""
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
    workflow: Annotated[CodeName, code_names(*WORKFLOW_NAMES), Field(min_length=1)] = "single_turn"
    """How a prompt becomes a sample: single_turn, demonstration and preference (SFT, pairs: no engine), agent (a
    program or service that talks to the policy by HTTP, see `[agent]`), environment (one of `[environments]`), or your
    own function or class, `module:name` or `file.py:name`, which runs in worker processes."""
    workflow_args: JsonTable = {}
    """Named arguments of a workflow of your own: JSON values."""
    max_turns: PositiveInt = 1
    """Model turns of `ctx.episode` and of environments. Agents over HTTP are bounded by `timeout_s` instead."""
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
    """Worker processes per rollout actor at most, for a workflow of your own (a further one is started when each has 32
    samples) or for each environment (when each has `concurrency` sessions)."""
    max_retries: CountInt = 2
    """How often a sample is tried again whose workflow failed by its environment, sandbox or network; then the group
    is finished without it."""
    pause_mode: Literal["in_place", "retract", "abort"] = "in_place"
    """What happens to running generations while weights are swapped: in_place (wait, keep KV), retract (KV is
    rebuilt, in SGLang that of prompts only with sglang.disable_radix_cache), abort (returned to the buffer with their
    tokens)."""

    save_partials_s: NonNegativeFloat = 5.0
    """Seconds between two reports of the tokens so far to the buffer, so that a rollout actor that is killed costs no
    more than what came since; longer where reports of all actors would take over a tenth of the buffer's time; 0 = only
    groups that are handed back keep their tokens."""

    relations = (f"workflow_args needs workflow!={','.join(WORKFLOW_NAMES)}: that is for a workflow of your own",)

    def conflicts(self) -> Iterator[Conflict]:
        """A minimum length above the maximum."""
        cause = f"is above max_new_tokens = {self.max_new_tokens}"
        return clashes((self.min_new_tokens > self.max_new_tokens, "min_new_tokens", cause))


def _router(value: str) -> str:
    return check_urls((value,))[0] if value else value


SHELL_WORDS = ("|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1", "&>")


def _command(value: str) -> str:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError(f"is no command: {error}") from None
    for word in () if "-c" in words or IS_FROZEN.get() else words:
        if has_shell_variable(word) or word in SHELL_WORDS or word.startswith("~/"):
            raise ValueError(f"has {word}, which only a shell understands: write sh -c '...'")
    return value


SandboxName = Literal["none", "rlimits", "bubblewrap", "docker"]


class AgentSettings(Section, frozen=True):
    """Agents that talk to the policy by HTTP, with `rollout.workflow = "agent"` (docs/agents.md)."""

    command: Annotated[str, AfterValidator(_command)] = ""
    """A program that is started for each rollout. OPENAI_BASE_URL, OPENAI_API_KEY, MYXA_TASK_FILE and others are in its
    environment (docs/agents.md)."""
    dir: PathText = ""
    """Folder that the program starts in; empty = that of the run file."""
    url: Annotated[str, AfterValidator(_router)] = ""
    """Instead of `command`: address of a service that gets each task by POST, with the key of its session."""
    polls: bool = False
    """Whether agents fetch tasks from POST /v1/tasks/next: `workers` programs of `command`, or services elsewhere."""
    workers: Annotated[int, Field(ge=1, le=256)] = 2
    """With `polls` and `command`: programs per rollout actor, each started once."""
    silence_s: PositiveFloat = 120.0
    """Seconds without a request after which a service is given up; its sample is tried again."""
    reward: Literal["verifier", "exit", "file"] = "verifier"
    """Where nothing was sent to /v1/session/reward: verifier (the run's reward function), exit (1 for status 0, else
    0) or file (what the program wrote into $MYXA_REWARD_FILE)."""
    sandbox: SandboxName = "none"
    """Where the program runs (docs/agents.md): rlimits or bubblewrap (it reads all files, and writes to its scratch
    folder alone), docker (in `image`)."""
    image: str = ""
    """Image of the containers, with docker; it must be on the machine."""
    network: Literal["gateway", "all"] = "gateway"
    """What a program in a sandbox reaches: the gateway alone, or everything, as with docker."""
    memory_gb: NonNegativeFloat = 0.0
    """GiB of address space for each process in a sandbox; with docker, of memory for all of them; 0 = no limit."""
    cpu_s: NonNegativeFloat = 0.0
    """Seconds of CPU time for each process in a sandbox; 0 = no limit."""
    env: EnvTable = {}
    """Further variables of the program's environment."""
    host: str = "127.0.0.1"
    """Address that each rollout actor listens on, for `gateway.eval_requests` too; it must be within reach of
    `roles.gateway`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first rollout actor; the next ones add their number; 0 = any free one."""

    relations = (
        "command needs !url: use one of them",
        "polls needs !url: a service polls, or gets tasks at its url",
        "reward=verifier for url polls: a service has no exit status and no file; it posts to /v1/session/reward",
        "image needs sandbox=docker",
        "image for sandbox=docker",
        "network=all for sandbox=docker: a container reaches the gateway by the network of its host",
        "sandbox for memory_gb cpu_s: without one there are no limits",
        "command for sandbox: a service has its own place",
    )


class GatewaySettings(Section, frozen=True):
    """People and programs that ask the policy beside training, with whatever workflow (docs/agents.md)."""

    eval_requests: Annotated[int, Field(ge=0, le=4096)] = 0
    """Requests with the run's eval key that a rollout actor answers at a time; 0 = there is no such key. They are
    neither recorded nor trained on."""


KINDS_WITH_ROWS = ("verifiers", "reasoning_gym")
EnvironmentKind = Literal["gym", "verifiers", "reasoning_gym", "openenv", "mcp"]


EnvironmentId = Annotated[
    str, AfterValidator(lambda value: value if HTTP_URL.fullmatch(value) else check_name_text(value)), Means("code")
]


class EnvironmentSettings(Section, frozen=True):
    """An environment in worker processes of its own, for `rollout.workflow = "environment"` (docs/rewards-and-data.md).
    `NAME` is its own: letters, digits, `_`, `-`, at most 64."""

    kind: EnvironmentKind
    """gym (Gymnasium's interface), verifiers, reasoning_gym, openenv (a server of it), or mcp (tools of servers)."""
    id: EnvironmentId = ""
    """Which one. gym: `file.py:Class`, `module:Class` or an id that Gymnasium knows; verifiers: an installed
    taskset, or `file.py:Class`; reasoning_gym: the task's name; openenv: the server's address; mcp: empty."""
    args: JsonTable = {}
    """Its named arguments: JSON values. mcp: `servers`, each with a `command` or a `url`."""
    python: ProgramName = ""
    """Interpreter that has its package, and this myxa. Empty = the rollout actor's."""
    env: EnvTable = {}
    """Further variables of its workers' environment."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 8
    """Sessions that a worker has at a time. `rollout.workers` is the number of workers."""
    setup_s: PositiveFloat = 120.0
    """Seconds that it may take until the first turn."""
    step_s: PositiveFloat = 60.0
    """Seconds from a turn of the model to the next. All turns together have `rollout.timeout_s`."""
    finalize_s: PositiveFloat = 60.0
    """Seconds for its work after the last turn."""
    score_s: PositiveFloat = 60.0
    """Seconds to say the reward."""
    teardown_s: PositiveFloat = 30.0
    """Seconds to clean up, in whatever way a session ended."""
    silence_s: PositiveFloat = 30.0
    """Seconds without a sign of life after which a worker is killed; its sessions are tried again in others. After half
    of them code that holds the loop of all sessions is interrupted: its session fails."""
    malformed_reward: float = 0.0
    """Reward that a turn gets for a tool call that cannot be read, added to the environment's."""

    relations = ("id for kind!=mcp",)

    def conflicts(self) -> Iterator[Conflict]:
        """What each kind needs."""
        return clashes(
            (self.kind == "openenv" and not self.id.startswith(("http://", "https://")), "id",
             "must be the address of a server: http://host:port"),
            (self.kind == "mcp" and not self.args.get("servers"), "args",
             'must name servers: args = { servers = { NAME = { command = ["..."] } } }, or url = "http://..."'),
        )  # fmt: skip


class EngineSettings(Section, frozen=True):
    """The rollout engine."""

    max_running: PositiveInt = 256
    """Sequences decoded together."""
    context_length: CountInt = 0
    """Longest prompt plus answer in tokens; 0 = what the model allows."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number type the engine computes in."""
    attach: Annotated[TextTuple, AfterValidator(check_urls)] = ()
    """Addresses of running SGLang servers (rollout kind `sglang`), one for each rollout actor. Empty: every rollout
    actor launches its own."""
    router: Annotated[str, AfterValidator(_router)] = ""
    """Address of an sglang-router in front of the attached servers: requests go through it, control goes to the
    servers. Empty: each actor's requests go to its own server."""
    key_env: str = ""
    """Environment variable of the rollout actors that holds the key of the attached servers (their
    `--admin-api-key`); empty = they ask for none. Launched servers get their own key."""
    python: ProgramName = ""
    """Interpreter that has SGLang, for launched servers; empty = the rollout actor's own."""
    start_s: PositiveFloat = 600.0
    """Seconds a launched or attached server may take to load."""
    groups: dict[TableName, GroupSettings] = {}
    """Launched servers of several kinds or shapes, each group a table `[engine.groups.NAME]`: see there."""

    relations = (
        "router needs attach: weights go to the servers themselves",
        "key_env needs attach: launched servers get their own key",
    )

    def actors(self, sglang: Mapping[str, Any]) -> tuple[tuple[ServerShape, ...], ...]:
        """The servers of each rollout actor; actors take these shapes in turn. `sglang`: the table of that name."""
        if not self.groups:
            return ((ServerShape("regular", "sglang", sglang),),)
        shapes = [
            ServerShape(group.kind, f"engine.groups.{name}.sglang", {**sglang, **group.sglang})
            for name, group in self.groups.items()
            for _ in range(group.servers)
        ]
        paired = tuple(shape for shape in shapes if shape.kind != "regular")
        return (*((shape,) for shape in shapes if shape.kind == "regular"), *((paired,) if paired else ()))

    def shapes(self, sglang: Mapping[str, Any]) -> tuple[ServerShape, ...]:
        """Each shape once."""
        return tuple({shape.key: shape for servers in self.actors(sglang) for shape in servers}.values())


class FrozenModelSettings(RolloutRole, frozen=True):
    """A model of the run's own beside the policy: a judge, a user simulator, an opponent. `NAME` is its own: lower-case
    letters, digits, `_`, `-`, at most 32. Its actors never get new weights."""

    kind: Literal["embedded", "sglang"] = "embedded"
    """Engine: embedded (CPU, in the process) or sglang (a server that the actor launches or attaches to)."""
    path: Annotated[ModelPath, Field(min_length=1)]
    """HuggingFace folder (config.json, safetensors, tokenizer files), or a model of the hub: `org/name`,
    `org/name@revision`."""
    engine: EngineSettings = EngineSettings()
    """As `[engine]`."""
    sglang: Table = {}
    """As `[sglang]`."""
    chat_template_kwargs: JsonTable = {}
    """As `data.chat_template_kwargs`, for its own chat template."""
    temperature: Temperature = 1.0
    """Sampling temperature where a request says none."""
    max_new_tokens: PositiveInt = 256
    """Tokens that an answer may have at most."""
    max_requests: PositiveInt = 64
    """Requests of a rollout actor that are under way; others wait."""
    timeout_s: PositiveFloat = 120.0
    """Seconds that a request may take, deaths of its actor included; then its sample's environment has failed."""


ChannelName = Literal["auto", "shm", "disk", "tcp", "nccl", "cuda_ipc"]
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
"""Of a server's address: paths mean the same to it."""


class WeightSettings(Section, frozen=True):
    """How new weights get from the trainer to the engines."""

    channel: ChannelName = "auto"
    """shm (shared memory, for embedded engines on the trainer's nodes), disk (folders), tcp (folders that each rollout
    actor fetches from the trainer, without a common file system), nccl (broadcast from the trainer's GPU into the
    servers'; by gloo where the trainer is on CPUs), cuda_ipc (servers on the trainer's nodes read the memory of the
    rank on their GPU, or of the node's first; with many experts several times as fast as nccl). "auto": cuda_ipc where
    both roles name a same GPU (disk where servers are attached or take turns and some GPU has no rank), nccl where the
    roles' GPUs are others, else shm or disk."""
    bucket_mb: Annotated[int, Field(ge=1, le=65536)] = 2048
    """MiB of weights sent at once. A server needs up to twice that beside its weights while it loads."""
    join_s: PositiveFloat = 30.0
    """Seconds a server may take to join the trainer's process group."""
    transfer_s: PositiveFloat = 30.0
    """Seconds one transfer may take; a failed one is repeated once through a new group. tcp: to fetch a version; disk,
    tcp: for a server to read it."""
    adopt_at_once: CountInt = 0
    """Engines that bring a new version in at the same time; the others serve meanwhile. More: all have it sooner, and
    fewer generate while they wait for it. 0 = one in eight, at most 16."""
    stall_s: NonNegativeFloat = 20.0
    """Seconds without any progress after which an engine's update is given up and the engine rebuilt, before the
    deadline of the whole phase; 0 = the deadlines only."""
    full_every: Annotated[int, Field(ge=0, le=1000)] = 1
    """disk, tcp: one version of so many is a whole folder, the others are what changed since the version before; 0 or
    1: all are whole. Rollout actors rebuild versions in a folder of their host (below TMPDIR), as large as the model;
    the trainer's rank 0 keeps a copy of the weights in memory."""
    served_folder: PathText = ""
    """Model folder that servers start with, if it is not `model.path`; if its weights are FP8 in blocks, weights are
    quantised likewise on the way (nccl, cuda_ipc)."""
