"""The `[sglang]` table against what the installed SGLang takes, and the command line made of it.

Names are those of ServerArgs, and every argument of the server's own parser may be set. `read_schema` asks the
interpreter that will run the server, in one child process (`server_probe.py`), which arguments there are. An unknown
key, a value of another type and a value that is not allowed are refused before anything is started.

`SglangNeeds` lists what a run asks of servers that depends on how the server was started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ....core.errors import ConfigError, EngineError
from ....core.suggestion import nearest
from .server_probe import MARK

MODULE = "sglang.launch_server"
SCALARS: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str, int, float, dict)}
"""Type of an argument in the server's parser -> types of TOML that say it; other parsers take what they are given."""
WORDS: Mapping[str, str] = {"int": "a whole number", "float": "a number", "str": "text"}


class OptionSchema(msgspec.Struct, frozen=True, kw_only=True):
    """One argument, in the words of argparse."""

    flags: tuple[str, ...]
    kind: str
    """Name of its action: "StoreAction", "StoreTrueAction", ..."""
    type: str
    """Name of the function that reads its value."""
    nargs: str = ""
    choices: tuple[str, ...] = ()

    @property
    def is_switch(self) -> bool:
        return self.nargs == "0"

    @property
    def is_list(self) -> bool:
        return self.nargs in ("+", "*") or self.nargs.strip("0").isdigit()


class ServerSchema(msgspec.Struct, frozen=True, kw_only=True):
    """What a version of SGLang takes."""

    version: str
    options: dict[str, OptionSchema]
    """ServerArgs field -> its argument."""


def check_table(table: Mapping[str, Any], schema: ServerSchema) -> None:
    """Raise ConfigError naming everything in `[sglang]` that this version of SGLang does not take."""
    problems = [text for key, value in table.items() for text in _problems(key, value, schema)]
    if problems:
        raise ConfigError("\n".join(problems), remedy=f"SGLang {schema.version} is installed; mend [sglang]")


def _problems(key: str, value: Any, schema: ServerSchema) -> Iterator[str]:
    place = f"sglang.{key} = {json.dumps(value)}"
    option = schema.options.get(key)
    if option is None:
        yield f"{place}: {_unknown(key, schema)}"
    elif option.is_switch:
        if not isinstance(value, bool):
            yield f"{place}: must be true or false"
    elif isinstance(value, bool) and option.type in SCALARS:
        yield f"{place}: must be {WORDS[option.type]}"
    elif option.is_list != isinstance(value, list | tuple) and not isinstance(value, dict):
        yield f"{place}: must be an array" if option.is_list else f"{place}: must not be an array"
    else:
        for item in _items(value):
            if wrong := _wrong_item(item, option):
                yield f"{place}: {wrong}"
                return


def _unknown(key: str, schema: ServerSchema) -> str:
    flag = "--" + key.replace("_", "-")
    for name, option in schema.options.items():
        if flag in option.flags:
            return f'is another name of "{name}", use that'
    close = nearest(key, schema.options)
    return f"SGLang {schema.version} has no such argument" + (f'; did you mean "{close}"?' if close else "")


def _wrong_item(item: Any, option: OptionSchema) -> str:
    allowed = SCALARS.get(option.type)
    if allowed is not None and not isinstance(item, allowed):
        return f"must be {WORDS[option.type]}"
    if option.choices and str(item) not in option.choices:
        return f"must be one of {', '.join(option.choices)}"
    return ""


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)  # pyright: ignore[reportUnknownVariableType] -- TOML


def command_line(values: Mapping[str, Any], schema: ServerSchema) -> list[str]:
    """Arguments for the server. Switches that are off and empty arrays are left out."""
    words: list[str] = []
    for key, value in values.items():
        option = schema.options[key]
        if option.is_switch:
            words += [option.flags[0]] if value else []
        elif option.is_list:
            items = [_word(item) for item in _items(value)]
            words += [option.flags[0], *items] if items else []
        else:
            words.append(f"{option.flags[0]}={_word(value)}")
    return words


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)


def check_sizes(values: Mapping[str, Any], num_devices: int) -> dict[str, Any]:
    """The parallel sizes to start with: `tp_size` is filled up to the actor's GPUs when it is left out. Raises
    ConfigError when the sizes do not need exactly the actor's GPUs. Without GPUs nothing is checked."""
    if not num_devices:
        return {}
    shards = max(int(values.get("pp_size", 1)), 1)
    replicas = 1 if values.get("enable_dp_attention") else max(int(values.get("dp_size", 1)), 1)
    tp_size = int(values.get("tp_size", num_devices // (shards * replicas)))
    needed = tp_size * shards * replicas
    if needed != num_devices:
        raise ConfigError(
            f"[sglang]: tp_size {tp_size} x pp_size {shards} x {replicas} replicas need {needed} GPUs, each rollout "
            f"actor has {num_devices}",
            remedy="change the sizes, or roles.rollout.devices and roles.rollout.count",
        )
    return {"tp_size": tp_size}


PROBE_S = 180.0
"""A cold import of SGLang from a network file system takes that long."""
PROBE = Path(__file__).with_name("server_probe.py")


async def read_schema(name: str, python: str, env: Mapping[str, str]) -> ServerSchema:
    """The arguments that SGLang in interpreter `python` takes. Raises ConfigError, starting with `name`, when there is
    no SGLang or it cannot be imported; EngineError when it does not answer in time."""
    where, home = f"{name}: {python}", env.get("XDG_CACHE_HOME")
    cache = (Path(home) if home else Path.home() / ".cache") / "myxa"
    try:
        probe = await asyncio.create_subprocess_exec(
            python, str(PROBE), str(cache), env=dict(env), stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
    except OSError as err:
        raise ConfigError(f"{where} cannot be run: {err.strerror}", remedy="check engine.python") from err
    out, errors = await _answer(probe, where)
    line = next((line for line in out.splitlines() if line.startswith(MARK)), "")
    if not line:
        why = (errors.strip().splitlines() or [f"exit status {probe.returncode}"])[-1]
        raise ConfigError(
            f"{where} cannot import sglang.srt.server_args: {why}",
            remedy="install SGLang 0.5.17 or later there, or name an interpreter that has it with engine.python",
        )
    text = line.removeprefix(MARK)
    if msgspec.json.decode(text).get("missing"):
        raise ConfigError(
            f"{where} has no SGLang", remedy="install it there, or name an interpreter that has it with engine.python"
        )
    return msgspec.json.decode(text, type=ServerSchema)


async def _answer(probe: Process, where: str) -> tuple[str, str]:
    try:
        async with asyncio.timeout(PROBE_S):
            out, errors = await probe.communicate()
    except BaseException as err:
        with contextlib.suppress(ProcessLookupError):
            probe.kill()
        await probe.wait()
        if isinstance(err, TimeoutError):
            raise EngineError(f"{where} did not import sglang within {PROBE_S:g} s", remedy="try it by hand") from err
        raise
    return out.decode(errors="replace"), errors.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangNeeds:
    """What the run file says; the defaults are met by every server."""

    tokenizer: bool = False
    """Texts and end tokens are looked at by the server: `rollout.stop`, `rollout.min_new_tokens`."""
    seeds: bool = False
    """It draws by each request's own seed: `rollout.deterministic`."""
    min_p: bool = False
    """It cuts by `rollout.min_p`."""

    def check(self, facts: Mapping[str, Any], place: str) -> None:
        """`facts`: of `/server_info`. Raises ConfigError for a server that says that it cannot; one that says nothing
        about it (another version, another server) is believed until it refuses a request."""
        if self.tokenizer and facts.get("skip_tokenizer_init") is True:
            raise ConfigError(
                f"{place}: was started with --skip-tokenizer-init, and stop strings or min_new_tokens are asked for",
                remedy="start it without, or leave rollout.stop and rollout.min_new_tokens out",
            )
        if self.seeds and facts.get("enable_deterministic_inference") is False:
            raise ConfigError(
                f"{place}: was started without --enable-deterministic-inference, so requests' seeds mean nothing to it",
                remedy="start it with that, or set rollout.deterministic = false",
            )
        if self.min_p and ends_at_min_p(facts):
            raise ConfigError(
                f"{place}: was started with --enable-deterministic-inference, and min_p would end it at once",
                remedy="start it without, or set rollout.min_p = 0 and use top_p or top_k",
            )


def ends_at_min_p(facts: Mapping[str, Any]) -> bool:
    """SGLang's sampler cannot do both seeds and min-p; ours, which says so, can."""
    return facts.get("enable_deterministic_inference") is True and facts.get("min_p_with_seeds") is not True


NO_NEEDS = SglangNeeds()
