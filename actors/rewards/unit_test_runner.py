"""Runs unit tests against an answer, inside a sandbox. It stands for itself.

    runner: reads tests from stdin, calls, compares, writes the verdict to stdout; no other process can read its memory
       |  a socket for each run of the answer
    starter ── answer: its code, in a process that was forked before the tests were read

The answer's process gets inputs and arguments, never what is expected: it sends back output, or values of plain types.
Objects of other types stay there; a test gets a stand-in, which equals itself alone.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import importlib
import json
import operator
import os
import signal
import socket
import sys
import time
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

PR_SET_DUMPABLE = 4
MAX_BYTES = 16 << 20
"""Of an output, or a value."""
NAME = "solution"
"""Module as which tests may import the answer."""
SETS_UP = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, bytes)}
ACTS: dict[str, Callable[..., Any]] = {
    "call": operator.call, "getattr": getattr, "getitem": operator.getitem, "iter": list, "len": len, "str": str,
}  # fmt: skip
"""What is asked of an object of the answer."""
LEETCODE = (
    "re io sys copy json datetime random string math bisect heapq itertools functools operator collections typing"
)
"""Modules that LeetCode imports for a `class Solution`, all of their names included."""
PRECISION = 1e-6
"""Of numbers with a point, relative or absolute, as judges of contests have it."""


class Gone(Exception):
    """The answer's process ended, took too long or said nonsense."""


class BadTests(Exception):
    """The tests cannot be run, whatever the answer is."""


def packed(value: Any, refer: Callable[[Any], Any]) -> Any:
    """As JSON, with the types of collections; of other objects their references."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        items: Any = value.items()  # pyright: ignore[reportUnknownVariableType]
        return {"dict": [[packed(key, refer), packed(item, refer)] for key, item in items]}
    name = next((name for name, kind in KINDS.items() if isinstance(value, kind)), "")
    return {name: [packed(item, refer) for item in value]} if name else {"object": refer(value)}


def unpacked(form: Any, resolve: Callable[[Any], Any]) -> Any:
    items = getattr(form, "items", None)
    if items is None:
        return form
    ((kind, inner),) = items()
    if kind == "object":
        return resolve(inner)
    if kind == "dict":
        return {unpacked(key, resolve): unpacked(item, resolve) for key, item in inner}
    return KINDS[kind](unpacked(item, resolve) for item in inner)


def received(channel: socket.socket, until_s: float, end: bytes = b"\n") -> bytes:
    """Up to a line's end; with no `end` to the last byte. Raises Gone."""
    data = bytearray()
    while not (end and data.endswith(end)):
        channel.settimeout(max(until_s - time.monotonic(), 1e-3))
        try:
            chunk = channel.recv(1 << 16)
        except OSError as error:
            raise Gone from error
        data += chunk
        if len(data) > MAX_BYTES or (end and not chunk):
            raise Gone
        if not chunk:
            break
    return bytes(data)


# -- the answer's side -------------------------------------------------------------------------------------------------


def start_answers(control: socket.socket) -> None:
    """Fork one process after another with the answer's code; the one before is killed."""
    nothing, child = os.open(os.devnull, os.O_RDWR), 0
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    code = control.recv(int.from_bytes(control.recv(4, socket.MSG_WAITALL), "big"), socket.MSG_WAITALL).decode()
    while True:
        kind, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if child:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if not kind:
            os._exit(0)
        ready, started = os.pipe()
        child = os.fork()
        if not child:
            os.setsid()
            os.close(started)
            control.close()
            if kind == b"i":
                read_and_write(code, *descriptors)
            else:
                answer_calls(code, *descriptors)
        os.close(started)
        os.read(ready, 1)  # until it has a group to kill
        for descriptor in (ready, *descriptors):
            os.close(descriptor)


def read_and_write(code: str, stdin: int, channel: int) -> None:
    os.dup2(stdin, 0)
    os.dup2(channel, 1)
    os.closerange(3, 64)
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8")
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8")
    exec(compile(code, NAME, "exec"), {"__name__": "__main__"})  # noqa: S102 -- what it is for
    sys.exit()  # after its threads, and what it has registered


def answer_calls(code: str, channel: int) -> None:
    module = sys.modules[NAME] = ModuleType(NAME)
    objects: list[Any] = []

    def resolve(reference: Any) -> Any:
        return objects[reference] if isinstance(reference, int) else getattr(module, reference)

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    if "class Solution" in code:
        for name in LEETCODE.split():  # among the built-ins, where tests do not find them as the answer's
            imported = importlib.import_module(name)
            public = {key: value for key, value in vars(imported).items() if not key.startswith("_")}
            builtins.__dict__.update({**public, **vars(builtins), name: imported})
    exec(compile(code, NAME, "exec"), module.__dict__)  # noqa: S102
    with socket.socket(fileno=channel) as runner:
        while True:
            act, arguments = json.loads(received(runner, time.monotonic() + 1e6))
            try:
                args, keywords = (unpacked(form, resolve) for form in arguments)
                reply = {"value": packed(ACTS[act](*args, **keywords), refer)}
            except BaseException as error:  # noqa: BLE001 -- the test is to see it
                reply = {"raised": type(error).__name__, "text": str(error)[:500]}
            runner.sendall(json.dumps(reply).encode() + b"\n")


# -- the runner's side -------------------------------------------------------------------------------------------------


class RunningAnswer:
    """A running answer: started when it is asked first, and again after it ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._channel: socket.socket | None = None
        self.until_s = 0.0

    def _started(self, kind: bytes, *descriptors: int) -> socket.socket:
        if time.monotonic() >= self.until_s:
            raise Gone("there is no time left")
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [kind], [*descriptors, theirs.fileno()])
        return ours

    def written(self, stdin: str) -> str:
        """What it writes, for what it reads. Raises Gone."""
        file = os.memfd_create("stdin")
        os.write(file, stdin.encode())
        os.lseek(file, 0, os.SEEK_SET)
        with self._started(b"i", file) as channel:
            os.close(file)
            return received(channel, self.until_s, b"").decode(errors="replace")

    def asked(self, act: str, *args: Any, **keywords: Any) -> Any:
        """Raises what the answer raised, Gone, or BadTests for arguments that cannot be sent."""
        line = json.dumps([act, [packed(list(args), reference_of), packed(keywords, reference_of)]]).encode() + b"\n"
        self._channel = self._channel or self._started(b"c")
        try:
            self._channel.sendall(line)
            reply = json.loads(received(self._channel, self.until_s))
            value = unpacked(reply.get("value"), lambda reference: StandIn(self, reference))
            kind = getattr(builtins, str(reply.get("raised")), RuntimeError)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, Gone) as cause:
            self._channel.close()
            self._channel = None
            raise Gone("the answer's process ended, took too long or said nonsense") from cause
        if "raised" in reply:
            raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)(reply.get("text"))
        return value


class StandIn:
    """Of an object of the answer's process: by its number there, or by its name in the module."""

    def __init__(self, answer: RunningAnswer, reference: int | str) -> None:
        self._answer, self.reference_ = answer, reference

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._answer.asked("getattr", self, name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._answer.asked("call", self, *args, **keywords)

    def __getitem__(self, key: Any) -> Any:
        return self._answer.asked("getitem", self, key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._answer.asked("iter", self))

    def __len__(self) -> Any:
        return self._answer.asked("len", self)

    def __str__(self) -> Any:
        return self._answer.asked("str", self)


def reference_of(value: Any) -> Any:
    if isinstance(value, StandIn):
        return value.reference_
    raise BadTests(f"a test passes a {type(value).__name__}, which cannot be sent to the answer's process")


class Names(dict[str, "Any"]):
    """Of the tests: their own, Python's and its library's; all others are the answer's."""

    def __init__(self, answer: RunningAnswer) -> None:
        super().__init__(__name__="tests")
        self._answer = answer

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return __import__(name) if name in sys.stdlib_module_names else StandIn(self._answer, name)


def is_same(value: Any, expected: Any) -> bool:
    """Whether it was returned, of values that JSON has."""
    if type(value) is type(expected) is list:
        return len(value) == len(expected) and all(map(is_same, value, expected))
    if type(value) is type(expected) is dict:
        return value.keys() == expected.keys() and all(is_same(value[key], expected[key]) for key in value)
    is_near = isinstance(expected, float) and type(value) in (int, float)
    return value == expected or (is_near and abs(value - expected) <= PRECISION * max(1.0, abs(expected)))


def is_written(text: str, expected: str) -> bool:
    """Whether its lines have these words."""
    lines, expected_lines = ([line.split() for line in part.strip().split("\n")] for part in (text, expected))
    return list(map(len, lines)) == list(map(len, expected_lines)) and all(
        is_word(*pair) for line in map(zip, lines, expected_lines) for pair in line
    )


def is_word(word: str, expected: str) -> bool:
    """Digits without a point are no numbers: they may be a code."""
    try:
        return word == expected or ("." in word + expected and is_same(float(word), float(expected)))
    except ValueError:
        return False


def tests_of_pairs(task: dict[str, Any], answer: RunningAnswer) -> Iterator[Callable[[], Any]]:
    """Inputs and what is to be written, or arguments and what is to be returned, as JSON has it."""

    def check(inputs: Any, expected: Any) -> None:
        if not task["fn"]:
            assert is_written(answer.written(inputs), expected)
            return
        try:
            value = StandIn(answer, task["fn"])(*inputs)
        except AttributeError:  # there is none: a method of LeetCode's class
            value = getattr(StandIn(answer, "Solution")(), task["fn"])(*inputs)
        value = json.loads(json.dumps(value))
        assert is_same(value, expected) or is_same([value], expected)

    for inputs, expected in task["pairs"]:
        yield lambda inputs=inputs, expected=expected: check(inputs, expected)


def tests_of_text(text: str, answer: RunningAnswer) -> Iterator[Callable[[], Any]]:
    """Each statement that does more than set up is one; so is one that sets up, and fails."""
    names = Names(answer)
    for node in ast.parse(text).body:
        code = compile(ast.Module([node], []), "tests", "exec")
        if not isinstance(node, SETS_UP):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            yield from () if is_text else (lambda code=code: exec(code, names),)  # noqa: S102
            continue
        try:
            exec(code, names)  # noqa: S102
        except ImportError as error:
            raise BadTests(f"the tests cannot import what they need: {error}") from error
        except Exception:  # noqa: BLE001 -- the answer's, as the test says again
            yield lambda code=code: exec(code, names)  # noqa: S102


def run_pytest(text: str, answer: RunningAnswer, begin: Callable[[], None]) -> list[bool]:
    """The answer has no time, so it does not start, until the file is gone."""
    passed: dict[str, bool] = {}

    class Plugin:
        def pytest_collection_finish(self) -> None:
            os.unlink("test_answer.py")
            begin()

        def pytest_runtest_logreport(self, report: Any) -> None:
            passed[report.nodeid] = passed.get(report.nodeid, True) and report.outcome == "passed"
            begin()

    class Solution(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return object.__getattribute__(self, name) if name.startswith("__") else StandIn(answer, name)

    try:
        import pytest
    except ImportError as error:
        raise BadTests(f"the tests need pytest: {error}") from error
    with open("test_answer.py", "w", encoding="utf-8") as file:
        file.write(text)
    sys.modules[NAME], sys.dont_write_bytecode = Solution(NAME), True
    status = pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir=.", "test_answer.py"], plugins=[Plugin()])
    if not passed:
        raise BadTests(f"pytest finds no test in the label, or cannot load it (status {int(status)})")
    return list(passed.values())


def judge(task: dict[str, Any], answer: RunningAnswer) -> list[bool]:
    last_s = time.monotonic() + task["total_seconds"]

    def begin() -> None:
        answer.until_s = min(time.monotonic() + task["seconds"], last_s)

    if task["kind"] == "pytest":
        return run_pytest(task["text"], answer, begin)
    begin()
    passed: list[bool] = []
    for test in tests_of_pairs(task, answer) if task["kind"] == "pairs" else tests_of_text(task["text"], answer):
        try:
            test()
        except BadTests:
            raise
        except BaseException:  # noqa: BLE001 -- whatever it is, the test did not pass
            passed.append(False)
        else:
            passed.append(True)
        begin()
    return passed


def main() -> None:
    control, theirs = socket.socketpair()
    if not os.fork():
        control.close()
        start_answers(theirs)
    theirs.close()
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    task = json.load(sys.stdin)
    verdict = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    verdict.write(f"{task['token']} begun\n")
    verdict.flush()
    code = task["code"].encode()
    control.sendall(len(code).to_bytes(4, "big") + code)
    try:
        verdict_fields: dict[str, Any] = {"passed": judge(task, RunningAnswer(control))}
    except BadTests as fault:
        verdict_fields = {"fault": str(fault)}
    verdict.write(f"{task['token']} {json.dumps(verdict_fields)}\n")


if __name__ == "__main__":
    main()
