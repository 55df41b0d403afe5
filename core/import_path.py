"""Finding code by name: `module:attr`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

from .errors import ConfigError


def load_callable(path: str, *, where: str) -> Callable[..., Any]:
    """The function or class behind "module:attr" ("pkg.mod:Class.method"). `where` names the setting, for the error.
    Raises ConfigError for a malformed path, a missing module or attribute, and what cannot be called. An import error
    *inside* the module is the module's own and passes through with its traceback."""
    module_name, separator, attr_path = path.partition(":")
    if not (module_name and separator and attr_path):
        raise ConfigError(f"{where}: {path!r} does not say where the code is", remedy='write it as "module:attr"')
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise ConfigError(
            f"{where}: there is no module {error.name!r}", remedy="install it, or put its folder on PYTHONPATH"
        ) from error
    for part in attr_path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{where}: module {module_name!r} has no {attr_path!r}", remedy="check the spelling")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{where}: {path!r} is a {type(found).__name__}", remedy="name a function or class")
    return cast("Callable[..., Any]", found)
