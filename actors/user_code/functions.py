"""A user's own functions, found by name once, at the start: reward, workflow, filters, parts of the algorithm.

Names are `module:attr` or `path/to/file.py:attr`. Mistakes in the name are ConfigError; code that raises while it is
imported is UserCodeError.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ...core.errors import ConfigError, UserCodeError
from ...core.suggestion import nearest, suggest

MAX_WORDS = 500
"""Characters of an error's text that are reported."""
LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
PACKAGE = tuple(
    f"{Path(__file__).parents[2] / floor}{os.sep}"
    for floor in ("core", "transport", "memory", "algos", "actors", "launch")
)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a kind of user function is called with."""

    key: str
    """The key of the run file that names it."""
    num_args: int
    signature: str
    """As it is shown in messages."""
    must_be_plain: bool = False
    """It is called where nothing can be awaited."""


REWARD = Expected("reward.fn", 1, "def reward(completion: Completion) -> float | dict[str, float]")
GROUP_REWARD = Expected(
    "reward.fn", 1, "def rewards(completions: Sequence[Completion]) -> Sequence[float | dict[str, float]]"
)


def reward_expected(key: str, *, takes_group: bool) -> Expected:
    """Of a reward function that this key of the run file names."""
    return replace(GROUP_REWARD if takes_group else REWARD, key=key)


WORKFLOW = Expected("rollout.workflow", 2, "async def generate(ctx: WorkflowContext, prompt: Prompt) -> Sample")
CLASS_WORKFLOW = replace(WORKFLOW, num_args=0, signature="class Flow: def __init__(self, ...)")
GROUP_FILTER = Expected("algo.group_filter", 1, "def keep(group: Group) -> bool | str")
REWARD_POST_PROCESS = Expected(
    "algo.reward_post_process", 1, "def process(groups: list[Group]) -> list[Sequence[float]]", must_be_plain=True
)
ADVANTAGE_FN = Expected(
    "algo.advantage_fn", 1, "def advantages(groups: list[Group]) -> list[Sequence[float | ndarray]]", must_be_plain=True
)
WEIGHT_FN = Expected("algo.weight_fn", 1, "def weight(tokens: LossTokens) -> Tensor", must_be_plain=True)
LOSS_FN = Expected("algo.loss_fn", 1, "def loss(tokens: LossTokens) -> Tensor", must_be_plain=True)

SAMPLE_FILTER = Expected("algo.sample_filter", 1, "def keep(group: Group) -> Sequence[bool | str]")


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A user's function, ready to be called."""

    name: str
    """As it is written in the run file."""
    fn: Callable[..., Any]
    is_async: bool


def load_function(name: str, expected: Expected, args: Mapping[str, Any] | None = None) -> UserFunction:
    """Import and check a function; a workflow may be a class. `args` are the named arguments it will get besides.

    Raises ConfigError if module, attribute or signature is wrong, UserCodeError if importing it raises.
    """
    fn = named_code(name, expected)
    is_class = expected is WORKFLOW and isinstance(fn, type)
    _check_signature(name, fn, CLASS_WORKFLOW if is_class else expected, args or {})
    return UserFunction(name, fn, is_async(fn))


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await."""
    while isinstance(fn, partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def named_code(name: str, expected: Expected) -> Callable[..., Any]:
    """What a name says, imported. Raises ConfigError, UserCodeError."""
    module_name, colon, attr = name.rpartition(":")
    if not colon or not module_name or not attr:
        raise ConfigError(f'{expected.key} = "{name}" is not a function name', remedy="write module:function")
    load = _module_of_file if module_name.endswith(".py") else _module_of_name
    return _attribute(load(module_name, expected), module_name, attr, expected)


def source_digest(fn: Callable[..., Any]) -> str:
    """Of the file that it is written in, for processes to compare; empty: there is none."""
    try:
        path = inspect.getsourcefile(inspect.unwrap(fn))
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest() if path else ""
    except (TypeError, OSError, ValueError):
        return ""


def _module_of_name(name: str, expected: Expected) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise _raised(name, expected, error) from error
        raise no_module(expected.key, error.name) from error
    except Exception as error:
        raise _raised(name, expected, error) from error


def no_module(key: str, name: str) -> ConfigError:
    remedy = "install it, or name the file itself: path/to/file.py:function"
    return ConfigError(f'{key}: there is no module "{name}"', remedy=remedy)


def file_of(name: str, key: str) -> Path:
    """The file that a name says. Raises ConfigError."""
    path = Path(name).absolute()
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path}", remedy="check the path before the colon")
    return path


def import_raised(key: str, name: str, cause: str, place: str) -> UserCodeError:
    remedy = "mend it; `python -c 'import ...'` shows more"
    return UserCodeError(f"{key}: importing {name} raised {cause}{f' ({place})' if place else ''}", remedy=remedy)


def no_attribute(key: str, module_name: str, attr: str, part: str, names: Iterable[str]) -> ConfigError:
    names = [name for name in names if not name.startswith("_")]
    return ConfigError(f'{key}: {module_name} has no "{attr}"', remedy=suggest(part, names))


def _module_of_file(name: str, expected: Expected) -> ModuleType:
    path = file_of(name, expected.key)
    digest = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    unique = f"myxa_user_{path.stem}_{digest}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{expected.key}: {path} cannot be imported as Python", remedy="name a .py file")
    module = importlib.util.module_from_spec(spec)
    _find_neighbours(str(path.parent))
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[unique]
        raise _raised(name, expected, error) from error
    return module


def _find_neighbours(folder: str) -> None:
    """Modules beside a file come after installed ones, so that they shadow none, and before those of the current
    folder: a run's copy of a file has copies of its neighbours, and where the run was started are the originals."""
    here = [path for path in sys.path if Path(path).resolve() == Path.cwd()]
    others = [path for path in sys.path if path not in (*here, folder)]
    sys.path[:] = [*others, folder, *(path for path in here if path != folder)]


def what_was_raised(error: BaseException) -> str:
    """`KeyError: 'level' at mine.py:18`."""
    return f"{type(error).__name__}: {words_of(error)}{place_raised(error)}"


def place_raised(error: BaseException | None) -> str:
    """` at mine.py:18`: the line of the user's own file that raised it, or called what did; empty if there is none."""
    files = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)] if error else []
    outside = [place for place in files if not place[0].startswith(PACKAGE)]
    outside = [place for place in outside if not place[0].startswith(LIBRARIES)] or outside
    frames = [place for place in outside if place[0] == outside[0][0]]
    return f" at {frames[-1][0]}:{frames[-1][1]}" if frames else ""


def words_of(error: BaseException) -> str:
    """The error's own text on one line, cut if it is long; an error may even raise when it is asked.

    Without what a terminal would obey, for it may quote an answer of the model.
    """
    try:
        text = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
    except BaseException as worse:  # noqa: BLE001 -- a user's class may do anything
        return f"(no text: its __str__ raised {type(worse).__name__})"
    return text if len(text) <= MAX_WORDS else f"{text[:MAX_WORDS]} ..."


def _raised(name: str, expected: Expected, error: Exception) -> UserCodeError:
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    cause = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else words_of(error)}"
    return import_raised(expected.key, name, cause, place)


def _attribute(module: ModuleType, module_name: str, attr: str, expected: Expected) -> Callable[..., Any]:
    value: Any = module
    for part in attr.split("."):
        if not hasattr(value, part):
            names = [name for name in dir(value) if callable(getattr(value, name, None))]
            raise no_attribute(expected.key, module_name, attr, part, names)
        value = getattr(value, part)
    if not callable(value):
        raise ConfigError(
            f"{expected.key}: {module_name}:{attr} is of type {type(value).__name__}, not a function",
            remedy=f"it must look like: {expected.signature}",
        )
    return value


def _check_signature(name: str, fn: Callable[..., Any], expected: Expected, args: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some built-in functions have none to look at
        signature = None
    check_call(name, signature, expected, args, is_async=is_async(fn))


def check_call(
    name: str, signature: inspect.Signature | None, expected: Expected, args: Iterable[str], *, is_async: bool
) -> None:
    """Raise ConfigError unless such a function can be called as expected, with the run file's arguments."""
    like, arguments = f"it must look like: {expected.signature}", tuple(args)
    if expected.must_be_plain and is_async:
        raise ConfigError(f'{expected.key} = "{name}" is an async function', remedy=like)
    try:
        if signature is not None:
            signature.bind(*([None] * expected.num_args), **dict.fromkeys(arguments))
    except TypeError as error:
        table = f"{expected.key.removesuffix('.fn')}{'.' if expected.key.endswith('.fn') else '_'}args"
        called = f"called with {expected.num_args} value{'s' if expected.num_args > 1 else ''} and what {table} holds"
        parameters = tuple(signature.parameters) if signature is not None else ()
        names = [nearest(argument, parameters) for argument in arguments if argument not in parameters]
        near = [f'did you mean "{name}"?' for name in names if name]
        raise ConfigError(
            f'{expected.key} = "{name}" has the signature {signature}: {error}',
            remedy=" ".join((*near, f"{like}, {called}: {', '.join(arguments) or 'nothing'}")),
        ) from error
