"""`python -m myxa`: the same as the command `myxa`."""

from __future__ import annotations

import sys

from .launch.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
