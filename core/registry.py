"""Finding code by name: `module:attr` of users, and lazy tables of the house's own variants.

Nothing is imported until it is asked for, so a table may name modules that need torch without needing it itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

from .errors import ConfigError

T = TypeVar("T")


def load_attr(path: str, *, where: str) -> Any:
    """The object behind "module:attr" ("pkg.mod:Class.method"). `where` names the setting, for the error.

    Raises ConfigError for a malformed path, a missing module or attribute. An import error *inside* the module
    is the module's own and passes through with its traceback.
    """
    module_name, separator, attr_path = path.partition(":")
    if not (module_name and separator and attr_path):
        raise ConfigError(f"{where}: {path!r} does not say where the code is", remedy='write it as "module:attr"')
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise ConfigError(
            f"{where}: there is no module {error.name!r}",
            remedy="install it, or put its folder on PYTHONPATH",
        ) from error
    for part in attr_path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{where}: module {module_name!r} has no {attr_path!r}", remedy="check the spelling")
        found = getattr(found, part)
    return found


def load_callable(path: str, *, where: str) -> Callable[..., Any]:
    """As `load_attr`, and the object must be callable."""
    found = load_attr(path, where=where)
    if not callable(found):
        raise ConfigError(f"{where}: {path!r} is a {type(found).__name__}", remedy="name a function or class")
    return cast("Callable[..., Any]", found)


class Registry(Generic[T]):
    """Names of variants and where their factories live; a factory is imported when it is first asked for.

    Example: `ADVANTAGES: Registry[AdvantageFn] = Registry("algo.kind", {"grpo": "myxa.algos.advantages:grpo"})`
    """

    def __init__(self, what: str, known: Mapping[str, str | T]) -> None:
        self._what = what
        self._known: dict[str, str | T] = dict(known)

    @property
    def names(self) -> tuple[str, ...]:
        """Known names, sorted."""
        return tuple(sorted(self._known))

    def register(self, name: str, item: str | T) -> None:
        """Add a variant (an object, or "module:attr"); a taken name is a ConfigError."""
        if name in self._known:
            raise ConfigError(f"{self._what}: {name!r} is registered twice", remedy="choose another name")
        self._known[name] = item

    def get(self, name: str) -> T:
        """The variant, imported if need be. A name with ":" is user code. Unknown: ConfigError listing the names."""
        if name in self._known:
            item = self._known[name]
            if isinstance(item, str):
                item = cast("T", load_attr(item, where=self._what))
                self._known[name] = item
            return item
        if ":" in name:
            return cast("T", load_attr(name, where=self._what))
        raise ConfigError(
            f"{self._what}: there is no {name!r}",
            remedy=f'known: {", ".join(self.names)}; or your own as "module:attr"',
        )
