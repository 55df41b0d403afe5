"""How long each role waits, in seconds: one value for each, all in one place. Light: commands import it.

What a user sets is in the run file (`trainer.step_timeout_s`, `rollout.timeout_s`, `weights.transfer_s`, ...).
Deadlines of calls are in their contracts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WireTimeouts:
    """Of every process: calls, connections, the registry."""

    ask_again_s: float = 0.2
    """Before a call is repeated whose callee is away."""
    disk_again_s: float = 1.0
    """Before a call is repeated whose callee waits for its disk."""
    give_up_s: float = 120.0
    """For a callee that is away to answer a repeated call."""
    stop_s: float = 10.0
    """How long `on_stop`, or a task that was cancelled, may take before it is given up and named in the log."""
    settle_s: float = 0.25
    """How long `flush` waits for connections that are just being made: a handshake takes a few milliseconds."""
    term_s: float = 5.0
    linger_s: float = 2.0
    """For what is queued to leave when a connection is closed."""
    leave_s: float = 2.0
    tick_s: float = 0.05
    last_words_s: float = 1.0
    """Grace for replies that arrive after the actor's end was reported."""
    heartbeat_s: float = 1.0
    """How often a living peer is expected to be heard."""
    suspect_s: float = 5.0
    hung_s: float = 13.0
    look_s: float = 0.25
    """How often the silence of peers is judged."""
    max_busy_s: float = 24 * 3600.0
    join_again_s: float = 2.0
    """With the first attempt to register; doubled with each."""
    lookup_s: float = 2.0
    """How long a call to a name that was never heard of waits for it to come up."""
    retry_s: float = 0.5
    away_s: float = 30.0
    """How long news of our own actors wait for a registry that is away, or late."""
    seen_s: float = 2.0
    updates_s: float = 3.0
    """How long a node's question for updates is held back when there are none."""
    unreachable_s: float = 6.0
    """So long after the last sign of its host a peer is given up, at the first attempt to reach it that fails then."""
    backdated_s: float = 5.0
    backoff_s: float = 0.05
    """Before a connection that broke is made again; doubled each time up to `longest_backoff_s`."""
    longest_backoff_s: float = 2.0
    reach_s: float = 1.5
    """For the other side's kernel to take the connection."""
    handshake_s: float = 4.0
    """For the other side's process to answer; below libzmq's own limit, so that it is known who ran out of patience."""
    room_again_s: float = 0.005
    tcp_heartbeat_s: float = 1.5
    tcp_silence_s: float = 4.5
    """A host that vanished is noticed after 4.5 to 6 s; 2 and 6 would leave no time to try again within 8 s."""
    tcp_handshake_s: float = 5.0


@dataclass(frozen=True, slots=True)
class CoordinatorTimeouts:
    """Of the coordinator."""

    rejoin_s: float = 5.0
    """How long trainer and engines of the run may take to report in."""
    tell_again_s: float = 1.0
    lock_s: float = 10.0
    """For how long an append waits for the others."""
    keep_s: float = 10.0
    """Limit for a journal write that the run does not depend on."""
    turn_s: float = 20.0
    """How long a request waits for the change before it."""
    ask_s: float = 5.0
    judge_s: float = 10.0
    confirm_s: float = 10.0
    """How long a reply waits until all owners use the change or wait for its number; then it names the others."""
    tell_s: float = 5.0
    join_s: float = 15.0
    """How long an actor that has joined may be out of reach; less than `rollout_ready` has."""
    retry_s: float = 0.2
    appear_s: float = 5.0
    """Limit for owners to appear; a knob without an owner delays a resumed run by so much."""
    progress_s: float = 1.0
    """Between two questions how far an engine is, and two looks for engines that may begin."""
    first_repeat_s: float = 1.0
    """Before an engine that refused is asked again, growing up to `longest_repeat_s`, or a lost message is resent."""
    longest_repeat_s: float = 4.0
    refuses_s: float = 45.0
    """For how long an engine may refuse what a living trainer published, then it is fenced."""
    release_s: float = 10.0
    """For the trainer to hear that a version may go."""


@dataclass(frozen=True, slots=True)
class BufferTimeouts:
    """Of the buffer."""

    longest_poll_s: float = 600.0
    doubt_s: float = 30.0
    """An engine that failed a group is in doubt for so long, or until it has finished one: what it fails meanwhile is
    not held against the group, and it gets no suspects."""
    clearing_s: float = 30.0
    """For so long without a word the actor that is to have a suspect next is waited for; then it is another."""
    reattach_s: float = 10.0
    """After a restart of the buffer, a group waits so long for the actor that still holds it."""


@dataclass(frozen=True, slots=True)
class RolloutTimeouts:
    """Of a rollout actor."""

    meet_s: float = 120.0
    start_s: float = 600.0
    """An engine that loads a model may hold the interpreter lock for so long."""
    poll_s: float = 5.0
    """Long poll for work: the buffer holds a draw that long at most."""
    retry_s: float = 0.2
    """Pause after a call that failed because its callee is being restarted."""
    loss_s: float = 1.0
    """Nothing is drawn for so long after a stream broke: an engine that is lost ends this actor within that time."""
    hand_back_s: float = 2.0
    """For handing all groups back before this actor fails."""
    repeat_s: float = 0.5
    """Before a member is tried again; doubled each time."""
    abort_every_s: float = 0.25
    """A request that was on its way into the engine when all were aborted is met by the next round."""
    park_s: float = 60.0
    """For an engine to be idle once its streams have ended; the command's own deadline is usually shorter."""
    call_s: float = 600.0


@dataclass(frozen=True, slots=True)
class TrainerTimeouts:
    """Of a trainer rank."""

    claim_s: float = 2.0
    """Also how long a request to write something, or to stop, may wait for one that waits for data."""
    held_back_s: float = 0.25
    """The same while engines lack the newest version: they may have to be given it before there can be a batch."""
    close_s: float = 2.0
    """How long the end waits for a running call: it may hang in a collective or on a disk."""
    first_repeat_s: float = 30.0
    """After a checkpoint by schedule that failed, before the next attempt; doubled each time up to `longest_repeat_s`.
    By time: a disk does not become empty by steps, which may be made in less than a second."""
    longest_repeat_s: float = 600.0
    release_s: float = 300.0


@dataclass(frozen=True, slots=True)
class MonitorTimeouts:
    """Of the monitor, and of reports to it."""

    last_words_s: float = 1.0
    """How long a stopping actor tries to send what it still has."""
    close_s: float = 8.0
    """Below the time that a node gives an actor's `on_stop`."""
    report_drops_s: float = 10.0
    open_s: float = 10.0
    """How long the start of the run waits for a sink to open or to refuse; then it opens beside the run."""


@dataclass(frozen=True, slots=True)
class MemoryTimeouts:
    """Of the memory manager and its tenants."""

    again_s: float = 1.0
    """For the registry to hear that an actor is gone."""
    reopen_s: float = 10.0
    view_s: float = 0.5
    """For the reports and the measurement of a view."""


@dataclass(frozen=True, slots=True)
class LauncherTimeouts:
    """Of the launchers of a run; flags of `myxa up` set some."""

    gather_s: float = 300.0
    """For all nodes to join."""
    start_s: float = 600.0
    """For a started process to register; a slow file system under torch is the usual cause of long starts."""
    finish_s: float = 60.0
    """For the coordinator to end the run in an orderly way after a request."""
    end_s: float = 10.0
    """For a process to end after ORDERLY_END."""
    lost_s: float = 20.0
    """For a sign of life of another node's launcher."""
    over_s: float = 5.0
    """For a process to end by itself after the registry has ended it, before it is killed."""
    leave_s: float = 30.0
    """The same for a process that announced its end: it may have much memory to free, and its exit status says why."""
    gone_s: float = 60.0
    """For a process to vanish after SIGKILL; the kernel needs time to free much pinned memory."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """One value per role."""

    wire: WireTimeouts = WireTimeouts()
    coordinator: CoordinatorTimeouts = CoordinatorTimeouts()
    buffer: BufferTimeouts = BufferTimeouts()
    rollout: RolloutTimeouts = RolloutTimeouts()
    trainer: TrainerTimeouts = TrainerTimeouts()
    monitor: MonitorTimeouts = MonitorTimeouts()
    memory: MemoryTimeouts = MemoryTimeouts()
    launcher: LauncherTimeouts = LauncherTimeouts()


TIMEOUTS = Timeouts()
