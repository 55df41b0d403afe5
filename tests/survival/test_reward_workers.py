"""A reward's worker process may end, hang with the interpreter locked, be killed, or write nonsense: the call ends by its
deadline with the cause, the next one works, and nothing that the function started is left, whatever session it is in."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.harness.waiting import until_gone

from myxa.actors.rewards.rewarder import Rewarder
from myxa.actors.subreaper import descendants
from myxa.actors.user_code import process
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings
from myxa.core.errors import DeadlyReward, UserCodeError

CODE = '''
import contextlib, os, signal, subprocess, sys, time
from pathlib import Path

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]

def act(completion):
    """Does what the text says."""
    verb, _, rest = completion.text.partition(" ")
    if verb == "tools":
        plain = subprocess.Popen(SLEEP)
        apart = subprocess.Popen(SLEEP, start_new_session=True)
        twice = subprocess.check_output(
            ["sh", "-c", "setsid sh -c 'sleep 600 >/dev/null & echo $!'"], text=True
        )
        folder, _, then = rest.partition(" ")
        Path(folder, "note.part").write_text(f"{plain.pid} {apart.pid} {twice}")
        Path(folder, "note.part").rename(Path(folder, "note"))
        verb, rest = then, ""
    if verb == "hang":
        time.sleep(600)
    if verb == "exit":
        os._exit(7)
    if verb == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if verb == "once":
        if not Path(rest).exists():
            Path(rest).touch()
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does where memory runs out
    if verb in ("garbage", "huge"):
        for number in range(3, 12):
            with contextlib.suppress(OSError):
                os.write(number, b"\\x05\\x00\\x00\\x00nonsense" if verb == "garbage" else b"\\xff" * 4)
    if verb == "oom":
        return float(Path("/proc/self/oom_score_adj").read_text())
    return 1.0
'''


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    return f"{file}:act"


@asynccontextmanager
async def rewarder(code: str, **settings: Any) -> AsyncIterator[Rewarder]:
    others = set(descendants(os.getpid()))
    made = Rewarder(RewardSettings(fn=code, **settings))
    try:
        yield made
    finally:
        await made.close()
        assert made.worker_pids == ()
        assert set(descendants(os.getpid())) <= others, "neither keeper nor worker nor tool"


def answer(text: str) -> Completion:
    return Completion(group_id=3, index=1, messages=(), prompt="?", text=text)


async def failure(of: Rewarder, text: str) -> UserCodeError:
    with pytest.raises(UserCodeError) as caught:
        await of.score(answer(text))
    return caught.value


async def test_a_worker_that_ends_is_killed_or_writes_nonsense_costs_its_call_and_the_next_one_works(
    code: str, tmp_path: Path
) -> None:
    async with rewarder(code) as made:
        for number, (verb, end) in enumerate((("exit", "exit code 7"), ("segfault", "signal SIGSEGV")), 1):
            error = await failure(made, verb)  # which ended its worker twice
            assert isinstance(error, DeadlyReward)
            assert str(error) == (
                f'reward function "{code}" ended its worker process ({end}) (group 3, sample 1) -- mend the function or '
                "the row; reward.max_error_rate says how many failures a run bears"
            )
            assert made.num_errors == number
            assert (await made.score(answer("fine"))).value == 1.0
        assert (await made.score(answer(f"once {tmp_path / 'killed'}"))).value == 1.0
        assert made.num_errors == 2, "a worker that is killed from outside costs nothing"
        assert (await made.score(answer("oom"))).value >= 500, "where memory runs out, it goes before the engine"
        for verb in ("garbage", "huge"):
            assert "it wrote into its own pipe" in str(await failure(made, verb))
            assert (await made.score(answer("fine"))).value == 1.0


async def test_what_a_scheduler_sends_to_every_process_ends_neither_worker_nor_keeper(code: str) -> None:
    async with rewarder(code) as made:
        await made.score(answer("fine"))
        (pid,) = made.worker_pids
        everyone = [str(psutil.Process(pid).ppid()), str(pid)]
        for words in (["-TERM", *everyone], ["-INT", everyone[0]]):
            await (await asyncio.create_subprocess_exec("kill", *words)).wait()
            await asyncio.sleep(0.2)
        assert (await made.score(answer("fine"))).value == 1.0
        assert made.worker_pids == (pid,)


async def test_a_call_that_hangs_or_ends_its_worker_takes_its_tools_along(code: str, tmp_path: Path) -> None:
    async with rewarder(code, timeout_s=3.0) as made:
        for then in ("hang", "exit"):
            folder = tmp_path / then
            folder.mkdir()
            error = await failure(made, f"tools {folder} {then}")
            assert isinstance(error, DeadlyReward) == (then == "exit")
            tools = [int(word) for word in (folder / "note").read_text().split()]
            assert len(tools) == 3
            await until_gone(*tools)
        assert (await made.score(answer("fine"))).value == 1.0


async def test_a_keeper_that_was_stopped_does_not_keep_the_actor_from_ending(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "END_TIMEOUT_S", 0.5)
    async with rewarder(code) as made:
        await made.score(answer("fine"))
        (pid,) = made.worker_pids
        os.kill(psutil.Process(pid).ppid(), signal.SIGSTOP)


ACTOR = """
import asyncio, os, signal, sys
from pathlib import Path
from myxa.actors.rewards.rewarder import Rewarder
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings

async def main(fn, folder):
    made = Rewarder(RewardSettings(fn=fn))
    completion = Completion(group_id=0, index=0, messages=(), prompt="", text=f"tools {folder} hang")
    task = asyncio.ensure_future(made.score(completion))
    while not Path(folder, "note").exists():
        await asyncio.sleep(0.02)
    print(*made.worker_pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_an_actor_that_is_killed_leaves_neither_worker_nor_tools(code: str, tmp_path: Path) -> None:
    actor = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ACTOR, code, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        out, _ = await actor.communicate()
    assert actor.returncode == -signal.SIGKILL
    await until_gone(int(out), *map(int, (tmp_path / "note").read_text().split()))


async def test_a_pattern_that_backtracks_for_ever_does_not_block_the_actor() -> None:
    """Its worker holds the interpreter lock for ages."""
    async with rewarder("regex", pattern="(a+)+$", timeout_s=1.5) as made:
        scoring = asyncio.ensure_future(made.score(answer("a" * 64 + "b")))
        for _ in range(20):
            await asyncio.sleep(0.01)  # the loop goes on
        with pytest.raises(UserCodeError, match="took longer than 1.5 s; its worker process was killed") as caught:
            await scoring
        assert not isinstance(caught.value, DeadlyReward)
        assert (await made.score(answer("aaa"))).value == 0.0, "it works; the label is another"
