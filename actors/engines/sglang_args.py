"""The `[sglang]` table against what the installed SGLang takes, and the command line made of it. Pure.

Names are those of ServerArgs; whatever the server's own argument parser accepts may be said. A key it does not know,
a value of another type and a value it does not allow are told before anything is started.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...core.errors import ConfigError
from ...core.suggestion import nearest

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
        """Whether it takes no value."""
        return self.nargs == "0"

    @property
    def is_list(self) -> bool:
        """Whether it takes several values."""
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
    """The parallel sizes to start with: `tp_size` is filled up to the actor's GPUs when it is left out.

    Raises ConfigError when the sizes do not need exactly the actor's GPUs. Without GPUs nothing is checked.
    """
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
