"""A sender in a process of its own, driven by lines of JSON: {"method", "argument"} in, {"reply"} or {"error"} out.

python sender_process.py NAME BUCKET_BYTES [CHANNEL FOLDER MODEL_FOLDER]

CHANNEL nccl (the default) sends; shm, disk and tcp write. Beside what senders do it can damage what it has published.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any, cast

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.weights.model_tensors import arrays_of, tensors_of

from myxa.actors.weights.channels.host import NAME, ReadChannel, ShmWeightWriter, clear_folders, make_writer
from myxa.actors.weights.channels.sender import DeviceWeightSender
from myxa.core.errors import MyxaError
from myxa.core.messages import WeightManifest
from myxa.core.process import boot_id
from myxa.core.weight_channel import AnyOrder

STRIDE = 3
"""Of chunks, one in so many is dropped."""
CHUNK_BYTES = 1 << 14


class Sending:
    """By broadcast."""

    def __init__(self, name: str, bucket_bytes: int) -> None:
        self.sender = DeviceWeightSender(name, channel="nccl", bucket_bytes=bucket_bytes, host=boot_id())

    def publish(self, version: int, folder: str) -> WeightManifest | None:
        return self.sender.publish(version, lambda: iter(tensors_of(Path(folder))))

    def release(self, version: int) -> None:
        self.sender.release(version)

    def harm(self, version: int, how: str) -> None:
        flat = self.sender._staging._staged[version].buffers.flat
        if how == "corrupt":
            flat[-1][0] ^= 1
        for number in range(0, len(flat), STRIDE) if how == "drop" else ():
            flat[number].zero_()


class Writing:
    """Into shared memory or folders."""

    def __init__(self, channel: str, folder: str, model_folder: str) -> None:
        self.channel, self.folder = channel, Path(folder)
        self.writer = make_writer(cast(ReadChannel, channel), Path(folder), Path(model_folder))
        self.published: dict[int, WeightManifest] = {}

    def publish(self, version: int, folder: str) -> WeightManifest | None:
        if not self.published:
            clear_folders(self.folder)
        self.published[version] = self.writer.publish(version, arrays_of(Path(folder)))
        return self.published[version]

    def release(self, version: int) -> None:
        self.writer.release(version)

    def harm(self, version: int, how: str) -> None:
        manifest = self.published[version]
        if self.channel == "shm":
            assert isinstance(self.writer, ShmWeightWriter)
            descriptor, harmed = self.writer._files[version], os.memfd_create(NAME)
            content = bytearray(Path(manifest.location).read_bytes())
            _harm(content, manifest.tensors[0].offset, manifest.num_bytes, how)
            os.write(harmed, content)
            os.dup2(harmed, descriptor)  # what is published is sealed
            os.close(harmed)
            return
        (file,) = Path(manifest.location).glob("*.safetensors")
        content = bytearray(file.read_bytes())
        _harm(content, len(content) - manifest.num_bytes, manifest.num_bytes, how)
        file.write_bytes(content)


def _harm(memory: object, begin: int, size: int, how: str) -> None:
    if how == "corrupt":
        memory[begin + size // 2] ^= 1  # type: ignore[index]
        return
    for at in range(begin, begin + size - CHUNK_BYTES, STRIDE * CHUNK_BYTES):
        memory[at : at + CHUNK_BYTES] = bytes(CHUNK_BYTES)  # type: ignore[index]


def main() -> None:
    name, bucket_bytes, *rest = sys.argv[1:]
    made = Writing(*rest) if rest and rest[0] != "nccl" else Sending(name, int(bucket_bytes))
    lock = threading.Lock()

    def do(method: str, argument: object) -> object:
        if method == "publish":
            return made.publish(*msgspec.convert(argument, tuple[int, str]))
        if method == "harm":
            return made.harm(*msgspec.convert(argument, tuple[int, str]))
        if method == "release":
            return made.release(msgspec.convert(argument, int))
        if method == "progress":
            channels = made.sender._channels if isinstance(made, Sending) else {}
            return {name: channel.at for name, channel in channels.items()}
        order = cast(Any, msgspec.convert(argument, AnyOrder))
        return (made.writer if isinstance(made, Writing) else made.sender).answer(order)

    def answer(number: int, method: str, argument: object) -> None:
        try:
            line = msgspec.json.encode({"number": number, "reply": do(method, argument)}, enc_hook=bytes)
        except MyxaError as err:
            line = msgspec.json.encode({"number": number, "error": err.message})
        with lock:
            sys.stdout.buffer.write(line + b"\n")
            sys.stdout.buffer.flush()

    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line)
        arguments = (order["number"], order["method"], order["argument"])
        threading.Thread(target=answer, args=arguments, daemon=True).start()


main()
