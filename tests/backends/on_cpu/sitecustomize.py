"""For trainer processes of tests on machines without CUDA: this folder in their PYTHONPATH turns megatron-core to the
CPU (`megatron_on_cpu.py`) before anything imports it."""

import importlib.util
import sys
from pathlib import Path

_place = Path(__file__).resolve().parent.parent / "megatron_on_cpu.py"
_spec = importlib.util.spec_from_file_location("megatron_on_cpu", _place)
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["megatron_on_cpu"] = _module
    _spec.loader.exec_module(_module)
    _module.install()
