"""Checks from their source text that the functions named in a run file exist and take the right arguments.

No user code runs. The actor that loads a function checks what only an import shows: a name made at run time, a
signature that a decorator changes. Signatures are judged as there: `actors/user_code/functions.check_call`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Container, Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from ...actors.rewards.call import ALONE, RewardKeys
from ...actors.rewards.rewarder import check_args
from ...actors.user_code.functions import (
    ADVANTAGE_FN,
    CLASS_WORKFLOW,
    GROUP_FILTER,
    LOSS_FN,
    REWARD_POST_PROCESS,
    SAMPLE_FILTER,
    WEIGHT_FN,
    WORKFLOW,
    Expected,
    check_call,
    reward_expected,
)
from ...algos.filters import GROUP_FILTERS, SAMPLE_FILTERS, group_filter, sample_filter
from ...core.config import RunConfig
from ...core.errors import ConfigError, UserCodeError
from ...core.suggestion import suggest
from ..composition.rollout_parts import eval_rewards
from .check import Finding, looked

ALL = ("rollout", "buffer", "trainer")
MAX_SOURCE_BYTES = 8 << 20
MAKERS = frozenset({"globals", "vars", "setattr", "exec"})
"""What a module can give itself names with."""


class Named(NamedTuple):
    """A name in the run file and what it must be."""

    name: str
    expected: Expected
    args: Iterable[str] = ()
    """Named arguments that the function gets besides."""
    role: str = "rollout"
    """Who calls it."""


def function_findings(
    config: RunConfig, roles: Container[str] = ALL, *, sees_modules: bool = True
) -> Iterator[Finding]:
    """What is wrong with each named function that actors of these roles call, and with the arguments of built-in
    ones. `sees_modules`: whether this process finds the modules that they find; else only files are looked at."""
    algo = config.algo
    if "rollout" in roles:
        rewards = {RewardKeys.of_one(name) if name else ALONE: part for name, part in config.reward.parts().items()}
        rewards |= {RewardKeys.of_eval_set(name): part for name, part in eval_rewards(config).items()}
        for keys, part in rewards.items():
            yield from looked(keys.args, check_args, part.fn, pattern=part.pattern, args=part.args, keys=keys)
    if "buffer" in roles and algo.group_filter in GROUP_FILTERS:
        yield from looked("algo.group_filter_args", group_filter, algo.group_filter, algo.group_filter_args)
    if "buffer" in roles and algo.sample_filter in SAMPLE_FILTERS:
        yield from looked("algo.sample_filter_args", sample_filter, algo.sample_filter, algo.sample_filter_args)
    for named in _named(config):
        where, colon, _ = named.name.rpartition(":")
        if named.role in roles and colon and (sees_modules or where.endswith(".py")):
            yield from looked(named.expected.key, check_function, named)


def _named(config: RunConfig) -> Iterator[Named]:
    algo = config.algo
    for name, one in sorted(config.eval.sets.items()):
        if one.reward:
            key = f"eval.sets.{name}.reward"
            yield Named(one.reward, reward_expected(key, takes_group=False), one.reward_args)
    yield Named(config.rollout.workflow, WORKFLOW, config.rollout.workflow_args)
    for (key, _), part in zip(config.reward.named_functions(), config.reward.parts().values(), strict=True):
        args = {*part.args, *(("pattern",) if part.pattern else ())}
        yield Named(part.fn, reward_expected(key, takes_group=part.scope == "group"), args)
    yield Named(algo.group_filter, GROUP_FILTER, algo.group_filter_args, "buffer")
    yield Named(algo.sample_filter, SAMPLE_FILTER, algo.sample_filter_args, "buffer")
    yield Named(algo.reward_post_process, REWARD_POST_PROCESS, role="trainer")
    yield Named(algo.advantage_fn, ADVANTAGE_FN, role="trainer")
    yield Named(algo.weight_fn, WEIGHT_FN, role="trainer")
    yield Named(algo.loss_fn, LOSS_FN, role="trainer")


def check_function(named: Named) -> None:
    """Raise ConfigError or UserCodeError for what is certainly wrong."""
    where, _, attr = named.name.rpartition(":")
    key = named.expected.key
    path = _file(where, key) if where.endswith(".py") else _module_file(where, key)
    if path is None:  # a module that is not made of source text
        return
    tree = _parsed(path, where, key)
    bound = _bindings(tree)
    found = bound.get(attr.partition(".")[0])
    if found is None:
        if "." in attr or _makes_names(tree):  # a submodule is an attribute once it was imported
            return
        known = [name for name in bound if not name.startswith("_")]
        raise ConfigError(f'{key}: {where} has no "{attr}"', remedy=suggest(attr, known))
    if "." in attr or getattr(found, "decorator_list", ()):
        return
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        is_async = isinstance(found, ast.AsyncFunctionDef)
        check_call(named.name, _signature(found.args), named.expected, named.args, is_async=is_async)
    elif isinstance(found, ast.ClassDef) and named.expected is WORKFLOW and not (found.bases or found.keywords):
        _check_class(named, found)


def _check_class(named: Named, node: ast.ClassDef) -> None:
    """One that a workflow may be: what it is made with, and the method that is needed."""
    methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    if "run" not in methods:
        text = f'{WORKFLOW.key} = "{named.name}" is a class without a method run'
        raise ConfigError(text, remedy=f"it must have: {WORKFLOW.signature}")
    made = methods.get("__init__")
    signature = _signature(made.args, num_own=1) if made is not None else inspect.Signature()
    check_call(named.name, signature, CLASS_WORKFLOW, named.args, is_async=False)


class _Written(str):
    """A default as it is written."""

    __slots__ = ()
    __repr__ = str.__str__


def _signature(args: ast.arguments, *, num_own: int = 0) -> inspect.Signature:
    """As `inspect.signature` says it. `num_own`: parameters that Python fills itself."""
    kinds = inspect.Parameter
    plain = [(arg, kinds.POSITIONAL_ONLY) for arg in args.posonlyargs]
    plain += [(arg, kinds.POSITIONAL_OR_KEYWORD) for arg in args.args]
    rows = [
        (arg, kind, default)
        for (arg, kind), default in reversed(list(zip_longest(reversed(plain), reversed(args.defaults))))
    ]
    rows += [(args.vararg, kinds.VAR_POSITIONAL, None)] if args.vararg else []
    rows += [(arg, kinds.KEYWORD_ONLY, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    rows += [(args.kwarg, kinds.VAR_KEYWORD, None)] if args.kwarg else []
    return inspect.Signature(
        [
            kinds(arg.arg, kind, default=kinds.empty if default is None else _Written(ast.unparse(default)))
            for arg, kind, default in rows[num_own:]
        ]
    )


def _file(where: str, key: str) -> Path:
    path = Path(where).absolute()
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path}", remedy="check the path before the colon")
    return path


def _module_file(where: str, key: str) -> Path | None:
    """The module's source, found without importing the packages around it; None if it is not made of source text."""
    parts = where.split(".")
    places: list[str] | None = None
    origin: str | None = None
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        spec = _found(name, places)
        if spec is None:
            raise ConfigError(
                f'{key}: there is no module "{name}"',
                remedy="install it, or name the file itself: path/to/file.py:function",
            )
        places = list(spec.submodule_search_locations or ())
        origin = spec.origin
    return Path(origin) if origin and origin.endswith(".py") else None


def _found(name: str, places: list[str] | None) -> ModuleSpec | None:
    """Found as an actor finds it: by every finder, and in the current folder."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, places)
        if spec is not None:
            return spec
    return PathFinder.find_spec(name, [str(Path.cwd())]) if places is None else None


def _parsed(path: Path, where: str, key: str) -> ast.Module:
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return ast.Module([], [])
        return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise UserCodeError(
            f"{key}: importing {where} raised {type(error).__name__}: {error.msg} ({path}:{error.lineno})",
            remedy="mend it; `python -c 'import ...'` shows more",
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}", remedy="name a readable .py file") from error


def _module_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that is in no function and no class, in order."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _module_level(node)


def _bindings(tree: ast.Module) -> dict[str, ast.AST]:
    """Names of the module -> where each is bound last."""
    found: dict[str, ast.AST] = {}
    for node in _module_level(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.alias):
            found[(node.asname or node.name).partition(".")[0]] = node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = node
    return found


def _makes_names(tree: ast.Module) -> bool:
    """Whether names may come from where this does not see them: a file that is empty, or too large to be looked at."""
    return not tree.body or any(
        (isinstance(node, ast.alias) and node.name == "*")
        or (isinstance(node, ast.Name) and node.id in MAKERS)
        or (isinstance(node, ast.FunctionDef) and node.name == "__getattr__")
        for node in ast.walk(tree)
    )
