# transformers imports four thousand modules for a type checker's sake; it is asked for numbers here, not for types. To
# read them took a third of `make check`.
from typing import Any

def __getattr__(name: str) -> Any: ...
