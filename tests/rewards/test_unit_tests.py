"""The reward `unit_tests` with real sandboxes: forms of labels, answers that are right and wrong, answers that attack."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tests.harness.waiting import until

from myxa.actors.rewards.call import RewardSpec, load_reward
from myxa.actors.rewards.rewarder import Rewarder
from myxa.actors.user_code.sandbox import namespaces_trouble, trouble_with
from myxa.algos.rewards.extraction import fenced_code
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings
from myxa.core.errors import ConfigError
from myxa.core.samples import Message

DOUBLES = {"fn_name": "double", "inputs": [[1], [4], [-3]], "outputs": [2, 8, -6]}
RIGHT = "def double(x):\n    return 2 * x\n"


def completion(code: str, label: Any, index: int = 0, fence: str = "```") -> Completion:
    text = f"So:\n{fence}python\n{code}\n{fence}\nDone." if fence else code
    label = label if isinstance(label, str) else json.dumps(label)
    return Completion(group_id=1, index=index, messages=(), prompt="write double", text=text, label=label)


async def reward(code: str, label: Any, fence: str = "```", **args: Any) -> float:
    spec = RewardSpec(fn="unit_tests", pattern="", args=args)
    return await load_reward(spec).fn(completion(code, label, fence=fence))


def rewarder(**args: Any) -> Rewarder:
    return Rewarder(RewardSettings(fn="unit_tests", args=args))


ASSERTS = "import math\nassert double(2) == 4\nfor n in range(3):\n    assert double(n) == 2 * n\nassert math.isclose(double(0.1), 0.2)"
CHECK = "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate('ab') == 'abab'\n\ncheck(double)"
IO = {"inputs": ["3\n", "10\n"], "outputs": ["6", "20\n"]}
TESTS = [{"input": "3\n", "output": "6\n", "testtype": "stdin"}, {"input": "10", "output": "20"}]
CALLS = [
    {"input": "3", "output": "6", "testtype": "functional", "metadata": {"func_name": "double"}},
    {"input": "4", "output": "8"},
]
PYTEST = """
import pytest
from solution import double

@pytest.mark.parametrize("n", [1, 2, 3])
def test_double(n):
    assert double(n) == 2 * n

def test_error():
    with pytest.raises(TypeError):
        double(None)
"""
LEETCODE = "class Solution:\n    def total(self, nums: List[int], more: Optional[int]) -> float:\n        sums = defaultdict(int)\n        for n in nums: sums[pow(n, 1, 5) * 0] += n\n        return ceil(sums[0]) if bisect.bisect_left(copy.copy(nums), 9) and re.match('a', 'a') else heapq.heappop(nums)\n"
STACK = "class Stack:\n    def __init__(self): self.items = []\n    def push(self, one): self.items.append(one)\n    def __len__(self): return len(self.items)\n    def pop(self): return self.items.pop()\n"
USES = "s = Stack()\ns.push((1, 2))\ns.push({'a': {3}})\nassert len(s) == 2\nassert s.pop() == {'a': {3}}\nassert s.pop() == (1, 2)\ntry:\n    s.pop()\nexcept IndexError:\n    pass\nelse:\n    raise AssertionError"


@pytest.mark.parametrize(
    ("code", "label", "expected"),
    [
        (RIGHT, DOUBLES, 1.0),
        ("def double(x): return x + 1", DOUBLES, 0.0),
        ("class Solution:\n    def double(self, x): return 2 * x", DOUBLES, 1.0),
        ("double = lambda x: 2 * x", {"fn_name": "double", "inputs": ["2"], "outputs": ["4"]}, 1.0),
        ("double = lambda x: (x, [x])", {"fn_name": "double", "inputs": [[2]], "outputs": [[2, [2]]]}, 1.0),
        (RIGHT, ASSERTS, 1.0),
        ("def double(x): return 4", ASSERTS, 0.0),
        (RIGHT, ["assert double(1) == 2", "assert double(0) == 0"], 1.0),
        (RIGHT, CHECK, 1.0),
        ("def double(x): return x ** 2 - 3", CHECK, 0.0),
        ("print(2 * int(input()))", IO, 1.0),
        ("import sys\nfor line in sys.stdin: print(2 * int(line), end='')", IO, 1.0),
        ("print(6)", IO, 0.0),
        ("print(2 * int(input()))", TESTS, 1.0),
        ("print(6)", TESTS, 0.0),
        (RIGHT, CALLS, 1.0),
        (RIGHT, [{**CALLS[0], "metadata": '{"func_name": "double"}'}], 1.0),
        (RIGHT + "```\nIts use:\n```python\nprint(double(3))\n", CALLS, 1.0),
        ("print(1)\n```\nNo:\n```python\nprint(2 * int(input()))\n", IO, 1.0),
        ("def double(x): return x + 3", CALLS, 0.0),
        ("import threading\nthreading.Thread(target=lambda: print(2 * int(input()))).start()", IO, 1.0),
        ("import atexit, io, sys\nsys.stdout = io.StringIO()\natexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nprint(2 * int(input()))", IO, 1.0),
        ("import os, sys\nsys.stdout = os.fdopen(1, 'w')\nprint(2 * int(input()))\nsys.exit(1)", IO, 1.0),
        (STACK, USES, 1.0),
        (STACK.replace("self.items.pop()", "self.items[-1]"), USES, 0.0),
        ("def f(): raise ValueError('no')", "try:\n    f()\n    raise AssertionError\nexcept ValueError as e:\n    assert str(e) == 'no'", 1.0),
        ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]", 1.0),
        ("def f(): return float('inf'), float('nan')", "x, y = f()\nassert x == float('inf') and y != y", 1.0),
        (LEETCODE, "def check(candidate):\n    assert candidate(nums = [3, 4], more = None) == 7.0\n\ncheck(Solution().total)", 1.0),
        (LEETCODE, {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}, 0.0),
        ("print(1 / 3, 2.0, '1.50')", {"inputs": [""], "outputs": ["0.333333 2 1.5\n"]}, 1.0),
        ("print(0.33)", {"inputs": [""], "outputs": ["0.333333"]}, 0.0),
        ("print('101')", {"inputs": [""], "outputs": ["0101"]}, 0.0),
        ("print(12345678901234567890)", {"inputs": [""], "outputs": ["12345678901234567891"]}, 0.0),
        ("print(10 ** 5000)", {"inputs": [""], "outputs": ["1" + "0" * 5000]}, 1.0),
        ("def f(x): return {'a': [0.1 + 0.2, 1]}", {"fn_name": "f", "inputs": [[1]], "outputs": [{"a": [0.3, 1]}]}, 1.0),
        ("def f(x): return [0.31, 1]", {"fn_name": "f", "inputs": [[1]], "outputs": [[0.3, 1]]}, 0.0),
        ("def double(x: return", DOUBLES, 0.0),
        ("", DOUBLES, 0.0),
    ],
)  # fmt: skip
async def test_forms_of_tests(code: str, label: Any, expected: float) -> None:
    assert await reward(code, label) == expected


async def test_the_share_of_tests_that_passed() -> None:
    wrong_for_two = "def double(x): return 5 if x == 2 else 2 * x"
    for code, label, expected in (
        ("def double(x): return 8", DOUBLES, 1 / 3), (RIGHT, DOUBLES, 1.0), ("", DOUBLES, 0.0), (wrong_for_two, PYTEST, 3 / 4),
    ):  # fmt: skip
        assert await reward(code, label, partial=True) == pytest.approx(expected)


async def test_one_that_hangs_costs_its_test_alone() -> None:
    code = "def double(x):\n    while x == 4: pass\n    return 2 * x"
    assert await reward(code, DOUBLES, partial=True, seconds=1.0) == pytest.approx(2 / 3)


async def test_the_last_block_counts_and_what_was_thought_does_not() -> None:
    first = f"```python\ndef double(x): return 0\n```\nNo:\n```\n{RIGHT}```"
    assert await reward(first, DOUBLES, fence="") == 1.0
    assert await reward(f"```\n{RIGHT}```\n```py\ndef double(x): return 0", DOUBLES, fence="") == 0.0
    assert await reward(f"<think>```\n{RIGHT}```</think> None.", DOUBLES, fence="") == 0.0
    judge = load_reward(RewardSpec(fn="unit_tests", pattern="", args={})).fn
    begun = Message(role="assistant", content="Sure:\n```python\n")
    answer = completion(f"{RIGHT}```\nDone.", DOUBLES, fence="")
    assert await judge(msgspec.structs.replace(answer, messages=(begun,), prompt=begun.content)) == 1.0


@pytest.mark.parametrize("text", [
    "```python\n{}```\nRun it:\n```bash\npython a.py\n```\nOutput:\n```text\n6\n```", "```Python3\r\n{}\r\n```\r\n", "~~~python\n{}~~~", "````py\n{}````\nDone.", "```python\n{}```\nOutput:\n```\n6\n```\nor\n```\nSo 6\n```",
    "1. So:\n   ```python\n   def double(x):\n       return 2 * x\n   ```\n2. Done.", "<answer>```python\n{}```</answer>", "```\n{}```</answer>\n", "```python\n{}", "```{{.python}}\n{}```",
    "```python\ndef double(x):\n    '''\n    ```\n    double(2)\n    ```\n    '''\n    return 2 * x\n```", "```\n{}```\n```json\n3", "```c\n0\n```\n```solution\n{}```",
])  # fmt: skip
def test_the_code_of_an_answer_however_it_is_fenced(text: str) -> None:
    names: dict[str, Any] = {}
    exec(fenced_code(text.format(RIGHT)), names)
    assert names["double"](3) == 6


SAYS = "import os\nfor fd in range(3, 64):\n try: os.write(fd, b'x')\n except OSError: pass\n"
HOSTILE = {
    "a fork bomb": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "endless output": "while True: print('x' * 65536)",
    "exit": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef double(x): os._exit(0)",
    "equal to all": "class Any:\n def __eq__(self, other): return True\n def __getattr__(self, name): return lambda *a: True\ndef double(x): return Any()",
    "other comparisons": "import builtins, operator, json\noperator.eq = lambda *a: True\nbuiltins.all = lambda *a: True\njson.loads = lambda *a: 1\nint = float\ndef double(x): return 0",
    "deletes files": "import os, shutil\nfor root in ('/', '/tmp', '/usr', os.getcwd(), os.path.expanduser('~')): shutil.rmtree(root, ignore_errors=True)",
    "network": "import socket, urllib.request\ndef double(x): return json.load(urllib.request.urlopen('http://127.0.0.1/'))",
    "sleep": "import time\ntime.sleep(1000)",
    "sleep in the call": "import time\ndef double(x): time.sleep(1000)",
    "memory": "x = bytearray(10 << 30)\ndef double(x): return 0",
    "memory of all": "import os\nfor _ in range(4): os.fork()\nx = b'x' * (100 << 20)\ndef double(x): return 0",
    "a daemon": "import os, time\nif not os.fork():\n os.setsid()\n if not os.fork(): time.sleep(1000)\ndef double(x): return 0",
    "kills all": "import os, signal\nos.kill(-1, 9)\nfor n in range(1, 99):\n try: os.kill(n, 9)\n except OSError: pass",
    "stops all": "import os, signal\nfor n in range(1, 99):\n if n != os.getpid():\n  try: os.kill(n, 19)\n  except OSError: pass\nwhile True: pass",
    "writes a verdict": SAYS + "import glob\nfor name in glob.glob('/proc/[0-9]*/fd/*'):\n try: open(name, 'w').write('{\"passed\": [true]}\\n' * 9)\n except OSError: pass\ndef double(x): return 0",
    "nonsense": "import socket, os\nfor fd in range(3, 64):\n try: socket.socket(fileno=os.dup(fd)).send(b'{{{{\\n' * 99)\n except OSError: pass\ndef double(x): return 0",
    "deep": "def double(x):\n v = []\n for _ in range(500): v = [v]\n return v",
    "long": "def double(x): return 'x' * (100 << 20)",
    "files": "i = 0\nwhile True:\n i += 1\n open(f'file{i}', 'w').write('x')",
    "deaf": "import signal, time\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
}  # fmt: skip


def ways(rlimits: dict[str, Any], bubblewrap: dict[str, Any]) -> Any:
    """Sandboxes with labels: those of a sandbox, by name."""
    return pytest.mark.parametrize(("sandbox", "label"), [
        pytest.param(
            box, label, id=f"{box}-{name}", marks=pytest.mark.skipif(bool(trouble_with(box)), reason=trouble_with(box))
        )
        for box, labels in (("rlimits", rlimits), ("bubblewrap", bubblewrap))
        for name, label in labels.items()
    ])  # fmt: skip


def strangers() -> list[psutil.Process]:
    """Processes with the runner as their program, also those of answers that tests beside this one judge."""
    every = psutil.process_iter(["cmdline"])
    return [one for one in every if "Runs unit tests against" in (one.info["cmdline"] or [""])[-1]]


@pytest.mark.skipif(bool(namespaces_trouble()), reason=f"namespaces: {namespaces_trouble()}")
@ways({"asserts": ASSERTS}, {"pairs": DOUBLES})
async def test_hostile_answers_get_nothing_leave_nothing_and_take_their_time_alone(sandbox: str, label: Any) -> None:
    scorer = rewarder(sandbox=sandbox, seconds=0.5, total_seconds=1.0)
    begun_s = time.monotonic()

    async def judged(what: str) -> tuple[str, float]:
        return what, (await scorer.score(completion(HOSTILE[what], label))).value

    try:
        found = await asyncio.gather(*map(judged, HOSTILE))
        after = await scorer.score(completion(RIGHT, label))
        print(f"{len(HOSTILE)} hostile answers in {time.monotonic() - begun_s:.1f} s")
        assert {what: value for what, value in found if value} == {}
        assert (after.value, scorer.num_errors) == (1.0, 0)
    finally:
        await scorer.close()
    _, left = await asyncio.to_thread(psutil.wait_procs, strangers(), timeout=40)
    assert left == []


SECRET = 736251
BY_PYTEST = f"from solution import double\ndef test_it():\n    assert double(1) == {SECRET}"
FINDS = f"""
import glob, os, sys, gc
seen = []
def secret():
    return int('{SECRET - 1}') + int('1')
def memory(name, file):
    data = b''
    if name.split('/')[2] not in (str(os.getpid()), 'self', 'thread-self'):
        for line in open(name[:-3] + 'maps'):
            begin, end = (int(part, 16) for part in line.split()[0].split('-'))
            if 'rw' in line and end - begin < 64 << 20:
                file.seek(begin)
                data += file.read(end - begin)
    return data
def look():
    for name in [*glob.glob('/proc/*/mem'), *glob.glob('/proc/*/environ'), *glob.glob('/proc/*/cmdline'), *glob.glob(os.getcwd() + '/*')]:
        try:
            with open(name, 'rb') as file:
                data = memory(name, file) if name.endswith('mem') else file.read(1 << 20)
        except OSError:
            continue
        if str(secret()).encode() in data: seen.append(name)
    frame = sys._getframe()
    while frame is not None:
        if str(secret()) in repr(frame.f_locals) + repr(frame.f_code.co_consts): seen.append('frame')
        frame = frame.f_back
    seen.extend('object' for one in gc.get_objects() if isinstance(one, (dict, list)) and secret() in (one.values() if isinstance(one, dict) else one))
look()
def double(x):
    look()
    return secret() if seen else 0
"""


@pytest.mark.skipif(bool(namespaces_trouble()), reason=f"namespaces: {namespaces_trouble()}")
@ways(
    {
        "pairs": {"fn_name": "double", "inputs": [[1]], "outputs": [SECRET]},
        "text": f"assert double(1) == {SECRET}",
    },
    {"pytest": BY_PYTEST},
)
async def test_an_answer_cannot_find_what_is_expected(sandbox: str, label: Any, tmp_path: Path) -> None:
    assert await reward(FINDS, label, sandbox=sandbox, seconds=20.0, total_seconds=30.0) == 0.0
    found = f"def double(x): return {SECRET}"
    assert await reward(found, label, sandbox=sandbox, seconds=20.0, total_seconds=30.0) == 1.0


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("", "no test"),
        ("def f(: pass", "no Python"),
        ("x = 5", "no test"),
        (["double(1) == 2"], "line 1 of the label checks nothing"),
        ("double", "checks nothing: 'double'; write assert"),
        ([[1, 2]], "checks nothing"),
        ([{"input": "1"}], "lack input, output"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "fn_name"),
        ({"inputs": [1], "outputs": []}, "equal length"),
        ({"fn_name": "f", "inputs": [], "outputs": []}, "no test"),
        ("import a_package_of_nobody\nassert double(1) == 2", "a_package_of_nobody"),
        ("assert double(lambda: 1) == 2", "cannot be sent"),
    ],
)
async def test_labels_that_are_no_tests_are_the_rows_fault(label: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        await reward(RIGHT, label)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"sandbox": "none"}, "rlimits, bubblewrap, docker"),
        ({"sandbox": "docker"}, "image"),
        ({"seconds": 5.0, "total_seconds": 1.0}, "total_seconds"),
        ({"second": 5.0}, "seconds"),
        ({"total_seconds": float("inf")}, "finite"),
        ({"memory_gb": float("inf")}, "finite"),
    ],
)
def test_arguments_are_checked(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rewarder(**args)


async def test_rewards_a_second() -> None:
    """At least 20 where two cores are free; here they may not be, so CPU time is what is held to its limit."""
    num = 10
    scorer = rewarder()
    try:
        await scorer.score(completion(RIGHT, DOUBLES))
        begun_s = time.monotonic()
        before_s = children_s(scorer)
        values = await asyncio.gather(*(scorer.score(completion(RIGHT, DOUBLES, index)) for index in range(num)))
        wall_s, cpu_s = time.monotonic() - begun_s, children_s(scorer) - before_s
    finally:
        await scorer.close()
    print(f"{num / wall_s:.0f} rewards/s; {1000 * cpu_s / num:.0f} ms of CPU time each")
    assert [one.value for one in values] == [1.0] * num
    assert cpu_s / num < 0.1


def children_s(scorer: Rewarder) -> float:
    """CPU time of the reward's worker process and its ended children."""
    times = [psutil.Process(pid).cpu_times() for pid in scorer.worker_pids]
    workers = [child.cpu_times() for pid in scorer.worker_pids for child in psutil.Process(pid).children()]
    return sum(one.user + one.system + one.children_user + one.children_system for one in (*times, *workers))


async def test_answers_whose_workers_are_killed_leave_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    made = rewarder(seconds=60.0, total_seconds=60.0)
    judging = asyncio.ensure_future(made.score(completion("def double(x):\n    while True: pass", DOUBLES)))
    try:
        await until(lambda: any(tmp_path.glob("*-job-*")), "a job")
        (folder,) = tmp_path.glob("*-job-*")
        for pid in made.worker_pids:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not folder.exists(), "the end of its folder")
        await until(lambda: any(tmp_path.glob("*-job-*")), "the second try")
    finally:
        await made.close()
    await asyncio.gather(judging, return_exceptions=True)  # it ends one way or the other
    assert not [*tmp_path.iterdir()]
