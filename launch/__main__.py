"""The command `myxa`, also as `python -m myxa.launch`."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from .cli import main as run_command  # Ctrl-C may come while that is imported
    except KeyboardInterrupt:
        return 130
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
