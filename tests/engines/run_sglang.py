#!/usr/bin/env python3
"""The contract, asked of a real SGLang server; with --record its answers are kept for tests that have none.

    make sglang-cpu                                          the pinned server on this machine's CPU
    python tests/engines/run_sglang.py --python python3 --device cuda --dtype bfloat16 --tolerance 0.05 \\
        --record tests/engines/recordings/sglang-0.5.17-h200 on a GPU host, where sglang can be imported

Flags after `--` go to the server (`-- --incremental-streaming-output`). Scenarios that it cannot serve, started with
these, are left out, each with the reason for which our client refuses such a server. Needs no pytest. Ends with 0 when
every other scenario holds, and also, with a loud line, when SGLang cannot be imported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.engines.contract import (
    NEEDS,
    SCENARIOS,
    Penalties,
    Subject,
    ask,
    check_logprobs,
    collect,
    endless,
    fails,
    started,
)
from tests.engines.contract_subjects import (
    CLIENT,
    Scores,
    all_scenarios,
    client_of,
    digest_of,
    make_versions,
    publisher,
)
from tests.engines.real_server import RealServer, environment_of, real_server
from tests.engines.recording import Places, Writer
from tests.engines.recording_proxy import Proxy, proxy
from tests.weights.model_tensors import tensors_of
from tests.weights.weight_lab import InProcess

from myxa.actors.engines.sglang.engine import SglangEngine
from myxa.actors.engines.sglang.weight_routes import DeviceRouteOptions, device_routes
from myxa.actors.weights.channels.sender import DeviceWeightSender
from myxa.core.errors import ConfigError, EngineError, RequestRefused
from myxa.core.process import boot_id

SCENARIO_S = 120.0
VERSIONS = (
    "import json,platform,sglang,torch,transformers;"
    "print(json.dumps({'sglang':sglang.__version__,'torch':torch.__version__,'transformers':transformers.__version__,"
    "'python':platform.python_version()}))"
)
IMPORT = "import sglang.srt.entrypoints.http_server"


def words(value: Any) -> Any:
    """A command line means the same in any order of its flags."""
    return sorted(value.split()) if isinstance(value, str) else value


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    options = arguments()
    reason = why_not(options.python, options.device)
    if reason:
        say(f"\n{'!' * 100}\nSKIPPED: the real SGLang was NOT tested: it cannot be imported by {options.python}:\n{reason}\n{'!' * 100}")  # fmt: skip
        return 0
    all_scenarios()
    with tempfile.TemporaryDirectory(prefix="sglang-") as folder:
        return asyncio.run(check(options, Path(folder)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that can import sglang")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of log-probs, against transformers in float32")
    parser.add_argument("--record", type=Path, help="folder for recordings; what was there is replaced, unless --only")
    parser.add_argument(
        "--only", nargs="*", default=[], help="names of scenarios, or of their files (contract_sampling)"
    )
    parser.add_argument("extra", nargs="*", help="flags for the server, after --")
    return parser.parse_args()


def why_not(python: str, device: str) -> str:
    """The last lines of the error by which SGLang cannot be imported; empty when it can."""
    try:
        run = subprocess.run([python, "-c", IMPORT], env=dict(environment_of(device)), capture_output=True, text=True, timeout=300)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as err:
        return str(err)
    return "" if run.returncode == 0 else run.stderr[-1500:]


async def check(options: argparse.Namespace, folder: Path) -> int:
    versions = make_versions(folder / "models")
    begun = time.monotonic()
    async with real_server(
        options.python, versions[0], folder / "server.log", device=options.device, dtype=options.dtype,
        extra=options.extra,
    ) as server:  # fmt: skip
        say(f"SGLang answers after {time.monotonic() - begun:.0f} s: {' '.join(server.command)}")
        async with proxy(server.url) as (url, recorder):
            failed = await Run(options, folder, versions, server, url, recorder).everything()
        if failed:
            say(server.log.read_text(errors="replace")[-3000:])
    say(f"{len(failed)} failed: {failed}" if failed else "every scenario holds")
    return bool(failed)


class Run:
    """All scenarios on one server."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, versions: list[Path], server: RealServer, url: str,
        recorder: Proxy,
    ) -> None:  # fmt: skip
        self._options = options
        self._folder = folder
        self._versions = versions
        self._server = server
        self._url = url
        self._recorder = recorder
        self._scores = Scores()
        self._failed: list[str] = []
        self._facts: dict[str, Any] = {}
        """What the server says of itself."""
        self._penalties: Penalties = "late"
        self._left_out: dict[str, str] = {}
        """Scenarios that this server cannot serve -> why."""

    async def everything(self) -> list[str]:
        record: Path | None = self._options.record
        async with aiohttp.ClientSession() as session, session.get(f"{self._server.url}/server_info") as answer:
            self._facts = await answer.json()
        if self._facts["disable_overlap_schedule"]:
            self._penalties = "any order"
        if record is not None and not self._options.only:
            shutil.rmtree(record, ignore_errors=True)
        for number, name in enumerate(SCENARIOS):
            if self._is_asked(name):
                if reason := await self._why_not(name):
                    self._left_out[name] = reason
                    say(f"left out       {name}: {reason}")
                else:
                    await self._one(name, self._folder / f"weights{number}", record)
        await self._cannot()
        if record is not None and not self._failed:
            await self._about(record)
        if self._options.device == "cpu" and (not self._options.only or "gloo" in self._options.only):
            await self._over_gloo()
        if not self._options.only:
            await self._death()
        return self._failed

    def _is_asked(self, name: str) -> bool:
        only = set(self._options.only)
        return not only or bool({name, SCENARIOS[name].__module__.rpartition(".")[2]} & only)

    async def _why_not(self, name: str) -> str:
        """Why our client refuses this server where a scenario is needed; empty when it does not."""
        if name.startswith("min_p") and self._facts["enable_deterministic_inference"]:
            return "min_p ends a server that draws by seeds"
        engine = SglangEngine(self._server.url, replace(CLIENT, needs=NEEDS.get(name, CLIENT.needs)))
        try:
            await engine.start()
        except ConfigError as err:
            return err.message.partition(": ")[2]
        finally:
            await engine.close()
        return ""

    async def _cannot(self) -> None:
        """What happens to those who ask nevertheless for what this server cannot do: what the refusals are there for."""
        await self._reset()
        async with client_of(self._server.url) as engine:
            if self._facts["skip_tokenizer_init"]:
                for wish in ({"stop": ("x",)}, {"min_new_tokens": 1}):
                    await fails(collect(engine, ask("t", **wish)), RequestRefused, "skip_tokenizer_init=True")
                say("ok             without its tokenizer the server refuses stop strings and least lengths")
            if not self._facts["enable_deterministic_inference"]:
                alike = [await collect(engine, ask("s", max_new_tokens=32, ignore_eos=True, seed=1)) for _ in range(2)]
                assert alike[0].ids.tolist() != alike[1].ids.tolist(), "it looks at seeds: say so in docs/engines.md"
                say("ok             without --enable-deterministic-inference the server does not look at seeds")

    async def _over_gloo(self) -> None:
        """Versions in flat buckets through a process group, which SGLang 0.5.23 takes in a session only; one that
        another client left open is in nobody's way."""
        await self._reset()
        sender = DeviceWeightSender("trainer/0", channel="nccl", bucket_bytes=1 << 18, host=boot_id())
        routes = device_routes(InProcess(sender), DeviceRouteOptions(host=boot_id()))
        engine = SglangEngine(self._server.url, CLIENT, routes)
        publish = publisher(self._folder / "gloo", self._versions)
        subject = Subject(engine, self._versions, publish, self._scores, self._options.tolerance, tells_spans=False)
        await engine.start()
        try:
            for version in (1, 2):
                manifest = sender.publish(version, partial(iter, tensors_of(self._versions[version])))
                assert manifest is not None
                await engine.prepare_weights(manifest)
                await engine.commit_weights(version)
                request = ask(f"g{version}", max_new_tokens=12, ignore_eos=True)
                got = await collect(engine, request)
                assert set(got.versions.tolist()) == {version}
                check_logprobs(subject, request, got, version)
                async with aiohttp.ClientSession() as session:
                    url = f"{self._server.url}/begin_weight_update"
                    left_open = (await session.post(url, json={})).status
        finally:
            await engine.close()
            await asyncio.to_thread(sender.close)
        say(
            f"ok             two versions came through a process group, {'in' if left_open == 200 else 'without'} sessions"
        )

    async def _one(self, name: str, weights: Path, record: Path | None) -> None:
        await self._reset()
        places = Places({"models": self._versions[0].parent, "weights": weights})
        self._recorder.writer = writer = Writer(places)
        begun = time.monotonic()
        try:
            async with asyncio.timeout(SCENARIO_S), client_of(self._url) as engine:
                publish = publisher(weights, self._versions)
                subject = Subject(
                    engine, self._versions, publish, self._scores, self._options.tolerance, tells_spans=False,
                    penalties=self._penalties,
                )  # fmt: skip
                await SCENARIOS[name](subject)
        except (Exception, asyncio.CancelledError):  # whatever it is, the next scenario is asked too
            self._failed.append(name)
            traceback.print_exc()
        say(f"{'FAILED' if name in self._failed else 'ok':6} {time.monotonic() - begun:5.1f} s  {name}")
        self._recorder.writer = None
        if record is not None and name not in self._failed:
            writer.write(record / f"{name}.jsonl")

    async def _reset(self) -> None:
        """Nothing runs, nothing is paused, version 0 is served and the cache is empty."""
        update = {"model_path": str(self._versions[0]), "weight_version": "0", "flush_cache": False}
        calls = {"/continue_generation": {}, "/abort_request": {"abort_all": True}, "/flush_cache": {}, "/update_weights_from_disk": update}  # fmt: skip
        async with asyncio.timeout(SCENARIO_S), aiohttp.ClientSession() as session:
            for path, body in calls.items():
                while True:
                    async with session.post(self._server.url + path, json=body) as answer:
                        if answer.status == 200:
                            break
                        assert path == "/flush_cache", f"{path}: {await answer.text()}"
                    await asyncio.sleep(0.2)  # what was aborted is still ending

    async def _about(self, record: Path) -> None:
        """What all of this was recorded with."""
        models = self._versions[0].parent
        command = " ".join(self._server.command[1:]).replace(str(models), "<models>")
        versions = await asyncio.to_thread(
            subprocess.run, [self._options.python, "-c", VERSIONS], env=dict(environment_of(self._options.device)),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        about = {
            "server": json.loads(versions.stdout.strip().split("\n")[-1]),
            "command": f"python {command}".replace(self._server.url.rsplit(":", 1)[1], "<port>"),
            "device": self._options.device, "tolerance": self._options.tolerance, "tells_spans": False,
            "penalties": self._penalties, "left_out": self._left_out, "models": digest_of(self._versions),
        }  # fmt: skip
        if self._options.only:  # the other recordings stay, so they must be of the same server
            before = json.loads((record / "about.json").read_text(encoding="utf-8"))
            differs = [key for key in set(before) - {"left_out"} if words(before[key]) != words(about[key])]
            assert not differs, f"{record} was recorded with another {differs}: record everything"
            about["left_out"] = {n: why for n, why in before.get("left_out", {}).items() if not self._is_asked(n)}
            about["left_out"] |= self._left_out
        (record / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

    async def _death(self) -> None:
        """A server that is killed under a running stream: an error that names it, soon, and no hang."""
        await self._reset()
        async with client_of(self._server.url) as engine, started(engine, endless("r")) as (stream,):
            self._server.kill()
            async with asyncio.timeout(SCENARIO_S):
                await fails(stream, EngineError, self._server.url, "'r'")
                await fails(collect(engine, endless("s")), EngineError, self._server.url)
        say("ok             the server is killed under a running stream")


if __name__ == "__main__":
    sys.exit(main())
