"""The ServerArgs that tests use, with SGLang's names, flags and kinds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

DTYPES = ["auto", "half", "float16", "bfloat16", "float", "float32"]


class ServerArgs:
    """Only the parser: the values are read from its namespace."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model-path", "--model", type=str, required=True)
        for name in ("host", "device", "api-key", "admin-api-key", "quantization", "config"):
            parser.add_argument(f"--{name}", type=str)
        for name in (
            "port",
            "context-length",
            "max-running-requests",
            "random-seed",
            "pp-size",
            "dp-size",
            "ep-size",
            "disaggregation-bootstrap-port",
        ):
            parser.add_argument(f"--{name}", type=int)
        parser.add_argument("--disaggregation-mode", choices=["null", "prefill", "decode"], default="null")
        parser.add_argument("--disaggregation-transfer-backend", type=str, default="mooncake")
        parser.add_argument("--stream-interval", type=int, default=1)
        parser.add_argument("--tensor-parallel-size", "--tp-size", dest="tp_size", type=int)
        parser.add_argument("--mem-fraction-static", type=float)
        parser.add_argument("--dtype", choices=DTYPES, default="auto")
        parser.add_argument("--cuda-graph-bs", type=int, nargs="+")
        parser.add_argument("--json-model-override-args", type=str, default="{}")
        for name in (
            "skip-tokenizer-init",
            "incremental-streaming-output",
            "enable-dp-attention",
            "disable-cuda-graph",
        ):
            parser.add_argument(f"--{name}", action="store_true")


def prepare_server_args(argv: list[str]) -> argparse.Namespace:
    """Command line over config file, as SGLang merges them."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    if "--config" in argv:
        at = argv.index("--config")
        told = json.loads(Path(argv[at + 1]).read_text())  # JSON is what myxa writes; SGLang reads YAML
        argv = [word for key, value in told.items() for word in (f"--{key}", value)] + argv[:at] + argv[at + 2 :]
    return parser.parse_args(argv)
