"""Whether a weight folder is whole, before a server is told to load it.

SGLang 0.5.17 loads whatever tensors it finds: it calls an update from a folder that lacks half of the layers a success,
and ends with all its requests when a file is torn. Only headers are read, so the check costs the same for any model.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ...core.errors import ModelError
from ...core.messages import TensorSpec, WeightManifest
from ..models.safetensors_file import open_safetensors


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
