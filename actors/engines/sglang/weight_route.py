"""How the bytes of a weight version get into an SGLang server: one `WeightRoute` per channel, and the route by folders.

The engine (`engine.py`) does what is the same for all routes: it asks the route to prepare while tokens flow, then

    pause_generation -> route.load -> unless its answer says so: does it announce the version? -> continue_generation

and a server whose weights may be torn stays paused.

`check_folder` reads the headers of a weight folder before the server loads it, at the same cost for any model. SGLang
0.5.17 loads whatever tensors it finds: it calls an update from a folder that lacks half of the layers a success, and
ends with all its requests when a file is torn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from ....core.errors import EngineError, ModelError, RequestRefused, WeightsRefused
from ....core.messages import TensorSpec, WeightManifest
from ...models.safetensors_file import open_safetensors
from ...weights.beacon import Beacon
from ...weights.channels.disk import DiskWeightReader


def check_folder(folder: Path, manifest: WeightManifest) -> None:
    """Raises ModelError naming the file or the tensor that is torn, missing or of another dtype or shape."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} is no folder with safetensors", remedy="publish the version again")
    with ExitStack() as stack:
        found: dict[str, TensorSpec] = {}
        for file in files:
            found.update({name: tensor.spec for name, tensor in stack.enter_context(open_safetensors(file)).items()})
    for wanted in manifest.tensors:
        spec = found.get(wanted.name)
        if spec is None or (spec.dtype, spec.shape) != (wanted.dtype, wanted.shape):
            has = "is missing" if spec is None else f"is {spec.dtype}{list(spec.shape)}"
            raise ModelError(
                f"{folder}: tensor {wanted.name} {has}, published was {wanted.dtype}{list(wanted.shape)}",
                remedy="do not write into the run's weight folders",
            )


LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class ServerControl(Protocol):
    """What a route may ask of its server; `http_client.SglangHttp` is one. All calls raise EngineError."""

    @property
    def place(self) -> str:
        """Whom errors name: the actor and the server's address."""
        ...

    @property
    def url(self) -> str:
        """The server's address, without a slash at the end."""
        ...

    async def get(self, path: str) -> Mapping[str, Any]:
        """The JSON object that a GET answers with."""
        ...

    async def post(self, path: str, body: Mapping[str, Any], *, within_s: float = 0.0) -> Mapping[str, Any]:
        """The JSON object that a POST answers with; `within_s` 0: the engine's usual deadline."""
        ...

    async def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON value, of whatever kind, that a POST answers with; None if it is none."""
        ...


class WeightRoute(Protocol):
    """One channel into one server."""

    @property
    def beacon(self) -> Beacon:
        """How far it is."""
        ...

    async def prepare(self, manifest: WeightManifest) -> None:
        """Everything that can be done while the old weights serve: join groups, check or stage bytes."""
        ...

    async def load(self, manifest: WeightManifest) -> bool:
        """Bring the prepared version in and have the server announce it (`weight_version`); the server is paused.

        True: its answer said that it does. Otherwise it has to be asked, which costs a round trip in the pause.

        Raises WeightsRefused only if the old weights are certainly whole: generation then continues with them. After
        any other error the server stays paused, because its weights are unknown.
        """
        ...

    async def close(self) -> None:
        """Leave groups, free staging; never raises. A later version may come by it all the same."""
        ...


Routes = Callable[[ServerControl], Mapping[str, WeightRoute]]
"""Channel name -> route, made for one server."""


async def close_others(routes: Mapping[str, WeightRoute], channel: str) -> None:
    """The server has a version by `channel`: what other channels hold of earlier ones is of no more use."""
    for name, route in routes.items():
        if name != channel:
            await route.close()


def announces(answer: Mapping[str, Any], version: int) -> bool:
    """Whether the answer to an update (SGLang 0.5.17) says that the server bears this version now."""
    return f"Weight version updated to {version}." in f"{answer.get('message')}."


class FolderRoute:
    """Channel "disk": the server reads a folder of safetensors itself (`update_weights_from_disk`)."""

    def __init__(self, server: ServerControl, *, verify_every: int = 0) -> None:
        """`verify_every`: after so many versions a folder's bytes are held against the digest; those of the first
        version that a server gets always are. 0: no others."""
        self._server = server
        self._verify_every = verify_every
        self._num_prepared = 0
        self.beacon = Beacon()

    async def prepare(self, manifest: WeightManifest) -> None:
        """Check that the version is a whole folder with an absolute path, and from time to time every byte."""
        folder = Path(manifest.location)
        place = f"{self._server.place}: weight version {manifest.version}"
        if not folder.is_absolute():
            raise EngineError(
                f"{place}: {folder} is no absolute path", remedy="the run directory must lie where the server reads it"
            )
        if urlsplit(self._server.url).hostname in LOCAL_HOSTS:  # else the path means something on another host
            try:
                self.beacon.step(f"checks {folder}", is_counted=False)
                await asyncio.to_thread(check_folder, folder, manifest)
                if manifest.digest and self._is_due:
                    await asyncio.to_thread(_check_bytes, manifest)
                self._num_prepared += 1
            except (ModelError, EngineError) as err:
                raise EngineError(f"{place}: {err.message}", remedy=err.remedy) from err

    @property
    def _is_due(self) -> bool:
        every = self._verify_every
        return self._num_prepared == 0 or (every > 0 and self._num_prepared % every == 0)

    async def load(self, manifest: WeightManifest) -> bool:
        """Have the folder read. The cache is not flushed: that needs an idle server, and requests are separated by
        version (`wire.request_body`)."""
        self.beacon.step(f"the server reads {manifest.location}", is_counted=False)
        body = {"model_path": manifest.location, "weight_version": str(manifest.version), "flush_cache": False}
        try:
            answer = await self._server.post("/update_weights_from_disk", body)
        except RequestRefused as err:
            raise self._refused(manifest, err.message) from err
        if not answer.get("success"):
            raise self._refused(manifest, str(answer.get("message")))
        return announces(answer, manifest.version)

    def _refused(self, manifest: WeightManifest, why: str) -> WeightsRefused:
        """SGLang says no when it has put its old weights back."""
        return WeightsRefused(
            f"{self._server.place}: refused weight version {manifest.version}: {why}", remedy="see the server's log"
        )

    async def close(self) -> None:
        """Nothing is held."""


def _check_bytes(manifest: WeightManifest) -> None:
    with DiskWeightReader().open(manifest):
        return


def folder_routes(server: ServerControl) -> Mapping[str, WeightRoute]:
    """Folders only: what every server can do."""
    return {"disk": FolderRoute(server)}
