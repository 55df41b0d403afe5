"""The reward `unit_tests`: the answer's code is run with the row's tests, in a sandbox.

| label | tests |
|---|---|
| `{"inputs": [...], "outputs": [...]}` | what the program writes for what it reads |
| the same with `"fn_name"` | what the function returns for its arguments |
| `[{"input": ..., "output": ...}, ...]` | the same, also with `fn_name`, or LiveCodeBench's `metadata.func_name` |
| Python, or a list of such texts | each `assert`, or other statement that does more than set up |
| Python with functions `test_...` | pytest's; they import the answer as `solution` |

Whatever the answer does is worth 0 at worst; labels that are no tests, and a sandbox that does not start, are errors.
"""

from __future__ import annotations

import ast
import os
import secrets
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from ...algos.arguments import bind
from ...algos.rewards.extraction import after_thought, fenced_code
from ...core.completions import Completion
from ...core.config.run import SandboxName
from ...core.config.section import as_table
from ...core.errors import ConfigError
from ..user_code.sandbox import Job, Limits, sandbox, scratch_folder

RUNNER = Path(__file__).with_name("unit_test_runner.py").read_text(encoding="utf-8")
MARGIN_S = 2.0
"""For the sandbox itself, beyond the time of the tests."""
NUM_PROCESSES, SCRATCH_MB = 16, 16
SANDBOXES = tuple(name for name in get_args(SandboxName) if name != "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTestOptions:
    """The table `[reward.args]` of `fn = "unit_tests"`."""

    sandbox: str = "rlimits"
    image: str = ""
    """With docker: one that has python3, 3.11 or later."""
    seconds: float = 2.0
    """For one test."""
    total_seconds: float = 10.0
    memory_gb: float = 0.5
    """Address space of each process of an answer."""
    partial: bool = False
    """Whether the reward is the share of passed tests, and not 1 for all and else 0."""
    packages: bool = False
    """Whether answers may import this interpreter's packages; a start takes longer."""

    @property
    def place(self) -> tuple[SandboxName, str]:
        return cast("SandboxName", self.sandbox), self.image


def unit_test_options(args: Mapping[str, Any], key: str = "reward.args") -> UnitTestOptions:
    """The arguments, checked. Raises ConfigError."""
    options = bind(UnitTestOptions, args, key=key, what='reward "unit_tests"')()
    if options.sandbox not in SANDBOXES or (options.sandbox == "docker") != bool(options.image):
        names = ", ".join(SANDBOXES)
        remedy = f"one of {names}; docker, and no other, with an image"
        raise ConfigError(f'{key}.sandbox = "{options.sandbox}", image = "{options.image}"', remedy=remedy)
    if not 0 < options.seconds <= options.total_seconds:
        raise ConfigError(f"{key}.seconds: must be above 0, and total_seconds at least as much")
    return options


def tests_of(label: str) -> dict[str, Any]:
    """As the runner takes them. Raises ValueError where there are none."""
    try:
        tests: Any = msgspec.json.decode(label)
    except msgspec.DecodeError:
        tests = label
    if isinstance(tests, dict):
        return _pairs(cast("dict[str, Any]", tests))
    entries: list[Any] = cast("list[Any]", tests) if isinstance(tests, list) else [label]
    if entries and all(isinstance(entry, dict) for entry in entries):
        return _pairs(_columns(entries))
    text = "\n".join(map(str, entries))
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the label is no Python: {error}") from error
    if idle := next(filter(_is_idle, body), None):
        raise ValueError(f"line {idle.lineno} of the label checks nothing: {ast.unparse(idle)[:80]!r}; write assert")
    is_pytest = any(getattr(node, "name", "").lower().startswith("test") for node in body)
    return {"kind": "pytest" if is_pytest else "text", "text": text}


def _is_idle(node: ast.stmt) -> bool:
    """An expression whose value is not used."""
    if not isinstance(node, ast.Expr) or isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value, ast.Compare) or not any(isinstance(part, ast.Call) for part in ast.walk(node))


def _columns(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """LiveCodeBench's list of tests, each with its input and output."""
    kind, metadata = entries[0].get("testtype"), entries[0].get("metadata")
    table = as_table(msgspec.json.decode(metadata or "{}") if isinstance(metadata, str) else metadata) or {}
    function = entries[0].get("fn_name") or table.get("func_name")
    if any(not {"input", "output"} <= entry.keys() for entry in entries) or (kind == "functional" and not function):
        raise ValueError("the label's tests lack input, output, or fn_name where testtype is functional")
    return {"fn_name": function, **{f"{name}s": [entry[name] for entry in entries] for name in ("input", "output")}}


def _pairs(tests: dict[str, Any]) -> dict[str, Any]:
    inputs, outputs, fn = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name") or ""
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError("the label has no lists inputs and outputs of equal length")
    pairs = zip(cast("list[Any]", inputs), cast("list[Any]", outputs), strict=True)
    return {"kind": "pairs", "fn": fn, "pairs": [_call(*pair) if fn else tuple(map(_text, pair)) for pair in pairs]}


def _call(arguments: Any, expected: Any) -> tuple[Any, Any]:
    """LiveCodeBench writes both as JSON, an argument a line."""
    args: Any = (
        [msgspec.json.decode(line) for line in arguments.splitlines() if line]
        if isinstance(arguments, str)
        else arguments
    )
    if not isinstance(args, list):
        raise ValueError("the label's inputs are no lists of arguments")  # noqa: TRY004
    is_json = isinstance(arguments, str) and isinstance(expected, str)
    return cast("Any", args), msgspec.json.decode(expected) if is_json else expected


def _text(value: Any) -> str:
    return "\n".join(map(str, cast("list[object]", value))) if isinstance(value, list) else str(value)


def unit_tests_reward(
    options: UnitTestOptions, *, strip_thinking: bool
) -> Callable[[Completion], Coroutine[Any, Any, float]]:
    """Raises ConfigError where the sandbox is not there."""
    box = sandbox(*options.place)
    limits = Limits(
        wall_s=options.total_seconds + MARGIN_S, cpu_s=options.total_seconds,
        memory_gb=options.memory_gb, num_processes=NUM_PROCESSES,
    )  # fmt: skip

    def job(scratch: Path, task: dict[str, Any]) -> Job:
        has_packages = options.packages or task["kind"] == "pytest"
        python = "python3" if options.image else sys.executable if has_packages else os.path.realpath(sys.executable)
        paths = [path for path in (sys.prefix, *sys.path) if path.endswith("-packages") or path == sys.prefix]
        return Job(
            command=(python, "-I", "-X", "int_max_str_digits=0", *(() if has_packages else ("-S",)), "-c", RUNNER),
            scratch=scratch, scratch_mb=SCRATCH_MB, visible=tuple(paths) if has_packages and not options.image else (),
            env={"PATH": "/usr/bin:/bin", "HOME": str(scratch), "TMPDIR": str(scratch)},
            stdin=msgspec.json.encode(task), limits=limits,
        )  # fmt: skip

    async def unit_tests(completion: Completion) -> float:
        tests, text, last_message = tests_of(completion.label), completion.text, completion.messages[-1:]
        if last_message and last_message[0].role == "assistant" and len(completion.turns) < 2:
            text = completion.prompt + text  # the row began the turn, perhaps with a fence
        read = after_thought(text, begins_inside=completion.begins_in_thought) if strip_thinking else text
        if not read or not (code := fenced_code(read, is_called=bool(tests.get("fn", True)))).strip():
            return 0.0
        token = secrets.token_hex()
        task = {**tests, "token": token, "code": code}
        task |= {"seconds": options.seconds, "total_seconds": options.total_seconds}
        async with scratch_folder() as scratch:
            end = await box.run(job(scratch, task))
        lines = [line.removeprefix(token) for line in end.output.splitlines() if line.startswith(token)]
        if not lines:
            raise ValueError(f"the sandbox did not start: {end.words}: {end.output[-500:]}")
        return _reward(lines[-1], is_partial=options.partial)

    return unit_tests


def _reward(line: str, *, is_partial: bool) -> float:
    verdict = msgspec.json.decode(line) if "{" in line else {"passed": [False]}  # it was killed
    if "fault" in verdict:
        raise ValueError(verdict["fault"])
    passed: list[bool] = verdict["passed"]
    if not passed:
        raise ValueError("there is no test in the label")
    return sum(passed) / len(passed) if is_partial else float(all(passed))
