"""F4: prompts and answers of any step, held-out ones too, while a run lives and after it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from myxa.actors.buffer.finished_groups import SampleLog
from myxa.actors.group_text import MAX_CHARS, group_text
from myxa.actors.sinks.jsonl import JsonlSink
from myxa.core.activity import ActivityMeter, TelemetryBuffer
from myxa.core.clock import SystemClock
from myxa.core.messages import GroupText, Telemetry
from myxa.core.samples import Group, Message, Prompt, Sample
from myxa.core.sink import SinkContext
from myxa.launch.cli import main
from myxa.launch.views.report import write_report
from myxa.launch.views.run_files import SampleQuery, read_samples, sample_page


def group(group_id: int, text: str = "four", version: int = 3) -> Group:
    prompt = Prompt(
        group_id=group_id, row=0, pass_index=0, messages=(Message(role="user", content="2 + 2"),), label="4"
    )
    samples = tuple(
        Sample(
            group_id=group_id, index=index, prompt_ids=np.array([1], dtype=np.int32),
            response_ids=np.array([2, 3], dtype=np.int32), logprobs=np.zeros(2, dtype=np.float32),
            loss_mask=np.ones(2, dtype=np.uint8), versions=np.full(2, version, dtype=np.int32), finish="stop",
            text=text, turns=(text,),
        )
        for index in range(2)
    )  # fmt: skip
    rewards = np.array([0.0, 1.0], dtype=np.float32)
    return Group(prompt=prompt, samples=samples, rewards=rewards, reward_parts=({"exact": 0.0}, {"exact": 1.0}))


def told(step: int, group_id: int, outcome: str = "kept", eval_set: str | None = None, text: str = "four") -> GroupText:
    found = group(group_id, text)
    return group_text(found, step=step, outcome=outcome, wall_s=1.0, source="buffer", reason="", eval_set=eval_set)


def write(run_dir: Path, groups: list[GroupText], samples_bytes: int = 1 << 20) -> None:
    sink = JsonlSink(samples_bytes)
    sink.open(SinkContext(run_dir=run_dir, run_name="x", clock=SystemClock(), emit=lambda kind, text: None))
    for one in groups:
        sink.write(Telemetry(samples=(one,)))
        sink.flush()
    sink.close()


def test_f4_any_step_can_be_read_and_held_out_answers_apart(tmp_path: Path) -> None:
    groups = [told(step, 10 * step + i) for step in range(1, 6) for i in range(3)]
    groups += [told(4, 0, "held-out", eval_set="gsm"), told(4, 1, "held-out", eval_set="aime")]
    write(tmp_path, groups)
    assert [g["group_id"] for g in read_samples(tmp_path, SampleQuery(2), 10)] == [22, 21, 20]
    assert [g["group_id"] for g in read_samples(tmp_path, SampleQuery(), 2)] == [52, 51]
    assert [g["eval_set"] for g in read_samples(tmp_path, SampleQuery(held_out=True), 10)] == ["aime", "gsm"]
    assert [g["group_id"] for g in read_samples(tmp_path, SampleQuery(4, True, "gsm"), 10)] == [0]
    (first,) = read_samples(tmp_path, SampleQuery(1), 1)
    assert {**first, "answers": len(first["answers"]), "messages": len(first["messages"])} == {
        "step": 1, "oldest_version": 3, "newest_version": 3, "group_id": 12, "prompt": "user: 2 + 2", "label": "4",
        "outcome": "kept", "reason": "", "is_held_out": False, "eval_set": "", "source": "buffer", "wall_s": 1.0,
        "answers": 2, "num_answers": 2, "messages": 1, "tools": [],
    }  # fmt: skip
    answer = first["answers"][1]
    (said,) = answer.pop("messages")
    assert said["text"] == "four" and said["facts"] == ["turn 1", "2 tokens", "version 3"] and said["is_learnt"]
    assert answer == {
        "index": 1, "text": "four", "reward": 1.0, "reward_parts": {"exact": 1.0}, "finish": "stop", "num_tokens": 2,
        "branch": 0, "num_shared": 0, "shared_with": -1, "num_opening": 0, "note": "", "tools": [],
    }  # fmt: skip


def test_a_step_that_was_made_again_shows_its_later_groups(tmp_path: Path) -> None:
    write(tmp_path, [told(1, 1, text="before"), told(1, 2), told(1, 1, text="after")])
    assert [g["answers"][0]["text"] for g in read_samples(tmp_path, SampleQuery(1), 5)] == ["after", "four"]


def test_the_files_stay_within_their_bound_and_keep_the_newest(tmp_path: Path) -> None:
    write(tmp_path, [told(step, step, text="x" * 500) for step in range(1, 101)], samples_bytes=20_000)
    write(tmp_path, [told(101, 101)], samples_bytes=20_000)
    sizes = [(tmp_path / name).stat().st_size for name in ("samples.jsonl", "samples.1.jsonl")]
    assert max(sizes) <= 10_000
    steps = [g["step"] for g in read_samples(tmp_path, SampleQuery(), 1000)]
    assert steps == list(range(101, 101 - len(steps), -1)), "the newest, without a hole"
    assert len(steps) > 8


def test_words_and_prompts_are_found_in_any_step(tmp_path: Path) -> None:
    write(tmp_path, [told(1, 1, text="Four"), told(2, 2, text="five"), told(3, 0, "held-out", eval_set="gsm")])
    assert [g["step"] for g in read_samples(tmp_path, SampleQuery(search="FOUR", held_out=None), 9)] == [3, 1]
    assert [g["step"] for g in read_samples(tmp_path, SampleQuery(prompt="user: 2", held_out=None), 9)] == [3, 2, 1]
    assert read_samples(tmp_path, SampleQuery(search="nothing of it"), 9) == []


def test_a_page_gets_steps_over_the_whole_run_within_its_bound(tmp_path: Path) -> None:
    write(tmp_path, [told(step, step) for step in range(1, 101)])
    assert [g["step"] for g in sample_page(tmp_path)] == list(range(100, 0, -1))
    some = sample_page(tmp_path, max_bytes=8_000)
    assert some[0]["step"] == 100
    assert some[-1]["step"] < 20
    assert 4 <= len(some) <= 20
    assert sample_page(tmp_path / "nowhere") == []


def test_a_torn_line_costs_one_group(tmp_path: Path) -> None:
    write(tmp_path, [told(1, 1)])
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 2, "group')
    write(tmp_path, [told(3, 3)])
    assert [g["step"] for g in read_samples(tmp_path, SampleQuery(), 5)] == [3, 1]
    assert read_samples(tmp_path / "nowhere", SampleQuery(), 5) == []


def test_texts_are_bounded_and_can_be_written(tmp_path: Path) -> None:
    long = told(1, 1, text="a" * 100_000 + "\ud800 end")
    assert len(long.answers[0].text) < MAX_CHARS + 100
    assert long.answers[0].text.endswith("end")
    write(tmp_path, [long, told(2, 2, text="\ud800")])
    assert read_samples(tmp_path, SampleQuery(2), 1)[0]["answers"][0]["text"] == "\\ud800"


def rollout_of_several() -> Group:
    """A turn that calls a tool, then two ways on from there; and a sub-agent with a conversation of its own."""
    one = group(7).samples[0]
    call = '<think>hm</think><tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    reply = Message(role="tool", content="\x1b[31mfour\u202e", name="add", tool_call_id="c1")
    tools = ({"type": "function", "function": {"name": "add", "description": "sums"}},)
    ids, mask = np.array([2, 3, 9, 4, 5], np.int32), np.array([1, 1, 0, 1, 1], np.uint8)
    trunk = replace(
        one, response_ids=ids, loss_mask=mask, logprobs=np.zeros(5, np.float32), turns=(call, "four"), text="four",
        replies=((reply,),), versions=np.array([3, 4, -1, 5, 5], np.int32),
        token_rewards=np.array([0, 0.25, 0, 0, 0.75], np.float32),
    )  # fmt: skip
    branch = replace(
        trunk, branch=1, prompt_ids=np.concatenate([one.prompt_ids, ids[:2]]), response_ids=ids[2:], loss_mask=mask[2:],
        logprobs=np.zeros(3, np.float32), versions=np.array([-1, 5, 5], np.int32), token_rewards=None,
    )  # fmt: skip
    agent = replace(
        one, branch=2, messages=(Message(role="system", content="add!"),), tools=tools, turns=("4",), text="4"
    )
    prompt = replace(group(7).prompt, tools=tools)
    return Group(prompt=prompt, samples=(trunk, branch, agent), rewards=np.ones(3, np.float32))


def test_rollouts_of_several_samples_are_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = ended_run(tmp_path)
    write(run_dir, [group_text(rollout_of_several(), step=9, outcome="kept", wall_s=1.0, source="buffer")])
    (one,) = read_samples(run_dir, SampleQuery(9), 5)
    trunk, branch, agent = one["answers"]
    first, tool, last = trunk["messages"]
    assert (first["thought"], first["text"], first["calls"]) == ("hm", "", [{"name": "add", "text": '{"a":2}'}])
    assert first["facts"] == ["turn 1", "2 tokens", "versions 3 to 4", "reward 0.25"]
    assert last["facts"] == ["turn 2", "2 tokens", "version 5", "reward 0.75"]
    assert [said["is_learnt"] for said in trunk["messages"]] == [True, False, True]
    assert (tool["role"], tool["name"], tool["call_id"]) == ("tool", "add", "c1")
    assert branch["note"] == "shares its first turn with sample 0.0, where they are learnt"
    assert [said["is_learnt"] for said in branch["messages"]] == [False, False, True]
    assert (agent["note"], agent["tools"]) == ("a conversation of its own", one["tools"])
    assert [said["role"] for said in agent["messages"]] == ["system", "assistant"]
    assert main(["samples", "--step", "9", "--run", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert 'assistant calls add({"a":2})' in said and "tool add: \\u001b[31mfour\\u202e" in said
    assert "[0.1] reward 1, 3 tokens (stop), shares its first turn with sample 0.0" in said
    assert "\x1b" not in said and "\u202e" not in said


def test_a_huge_conversation_is_cut_and_can_be_sent() -> None:
    one = group(7).samples[0]
    replies = tuple((Message(role="tool", content="\x01" * 50_000),) for _ in range(3000))
    calls = Message(role="assistant", content="", tool_calls=({"function": {"name": "\x02" * 9000}},) * 99)
    many = replace(one, turns=("\x03" * 50_000,) * 3000, replies=replies, messages=(calls,) * 500)
    text = group_text(
        replace(rollout_of_several(), samples=(many,) * 40, rewards=np.ones(40, np.float32)),
        step=1, outcome="kept", wall_s=1.0, source="buffer",
    )  # fmt: skip
    assert len(msgspec.json.encode(text)) < 1 << 20, "what one message may be"
    assert (len(text.answers), text.num_answers) == (16, 40)


@pytest.mark.parametrize("line", ["{}", "3", "[" * 100_000, '{"step": 1, "answers": "no"}', "\\udcff"])
def test_lines_of_another_kind_are_passed_over(line: str, tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    with (run_dir / "samples.jsonl").open("a") as file:
        file.write(f"{line}\n")
    assert [group["step"] for group in read_samples(run_dir, SampleQuery(held_out=None), 9)] == [2, 2, 1]


def test_samples_wait_within_bounds_while_the_monitor_is_away() -> None:
    buffer = TelemetryBuffer("buffer", SystemClock())
    for number in range(200):
        buffer.sample(told(1, number, text="\x01" * 4000))
    assert len(buffer) == 64
    num_dropped = 0
    while len(buffer):
        bundle = buffer.drain()
        num_dropped += bundle.dropped.get("samples", 0)
        assert len(msgspec.json.encode(bundle)) < 1 << 20, "what one message may be"
    assert num_dropped == 136


def test_groups_that_would_push_out_others_are_counted_and_not_written_down() -> None:
    clock = SystemClock()
    buffer = TelemetryBuffer("buffer", clock, meter=ActivityMeter("buffer", clock))
    log = SampleLog(buffer, clock, 8)
    for step in range(20):
        for number in range(log.num_wanted(step)):
            buffer.sample(told(step, number))
    bundles = [buffer.drain()]
    while len(buffer):
        bundles.append(buffer.drain())
    assert [group.step for bundle in bundles for group in bundle.samples] == [
        step for step in range(8) for _ in range(8)
    ]
    assert not any(bundle.dropped for bundle in bundles)
    assert bundles[0].metrics[0].values["samples/left_out"] == 12 * 8
    assert log.num_wanted(20) == 8, "there is room again"


def ended_run(folder: Path) -> Path:
    run_dir = folder / "runs" / "sort-1"
    (run_dir / "logs" / "latest").mkdir(parents=True)
    (run_dir / "config.toml").write_text("[rollout]\nmax_groups = 4\n")
    point = {"source": "trainer/0", "step": 1, "wall_s": 2.0, "values": {"train/loss": 1.0, "time/compute": 9.0}}
    other = {"source": "rollout/0", "step": 1, "wall_s": 9.0, "values": {"time/wait-capacity": 9.0}}
    (run_dir / "metrics.jsonl").write_text(f"{json.dumps(point)}\n{json.dumps(other)}\n")
    (run_dir / "logs" / "rollout.0.0.log").write_text("one\ntwo\n")
    (run_dir / "logs" / "latest" / "rollout.0.log").symlink_to("../rollout.0.0.log")
    write(run_dir, [told(1, 1), told(2, 2), told(2, 0, "held-out", eval_set="")])
    return run_dir


def test_f4_verbs_that_show_answer_of_a_run_that_is_over_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = ended_run(tmp_path)
    monkeypatch.chdir(tmp_path)

    def myxa(*words: str, code: int = 0) -> tuple[str, str]:
        assert main(words) == code, capsys.readouterr().err
        return capsys.readouterr()

    named = ("--run", str(run_dir))
    shown, said = myxa("samples", "--step", "1", *named)
    assert "step 1, group 1: kept, version 3" in shown
    assert f"run sort-1 in {run_dir} is over: this is from its files" in said
    held_out = json.loads(myxa("samples", "--eval", "--json", *named)[0])
    assert [g["outcome"] for g in held_out["groups"]] == ["held-out"]
    assert "no group of set '2'" in myxa("samples", "--eval", "2", *named)[0]
    why = json.loads(myxa("why", "--json", *named)[0])
    assert why["bound"] == "training"
    of_one = json.loads(myxa("why", "trainer/0", "--json", *named)[0])
    assert (list(of_one["shares"]), of_one["sentence"].partition(" ")[0]) == (["trainer/0"], "trainer/0:")
    assert [row["state"] for row in json.loads(myxa("ps", "--json", *named)[0])] == ["ended"] * 2
    assert myxa("logs", "rollout", "-n", "1", *named)[0] == "two\n"
    assert f"see {run_dir}/logs" in myxa("logs", "rolout", *named, code=2)[1]
    page = write_report(run_dir, tmp_path / "report.html").read_text()
    assert "user: 2 + 2" in page


@pytest.mark.parametrize("verb", ["ps", "why", "samples", "history", "report"])
def test_f4_without_a_name_the_last_run_of_this_folder_answers(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = ended_run(tmp_path)
    (tmp_path / "runs" / "latest").symlink_to("sort-1")
    monkeypatch.chdir(tmp_path)
    assert main([verb]) == 0, capsys.readouterr().err
    assert f"run sort-1 in {run_dir} is over: this is from its files" in capsys.readouterr().err
