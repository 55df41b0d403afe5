"""A sender in a process of its own, driven by lines of JSON: {"method", "request"} in, {"reply"} or {"error"} out.

python sender_process.py NAME BUCKET_BYTES
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import msgspec
from model_tensors import tensors_of

from myxa.actors.weights.sender import DeviceWeightSender
from myxa.core.errors import MyxaError
from myxa.core.host import boot_id
from myxa.core.weight_channel import JoinRequest, PlanRequest, SampleRequest, SendOrder

REQUESTS = {"plan": PlanRequest, "join": JoinRequest, "send": SendOrder, "sample": SampleRequest}


def main() -> None:
    sender = DeviceWeightSender(sys.argv[1], channel="nccl", bucket_bytes=int(sys.argv[2]), host=boot_id())
    lock = threading.Lock()

    def answer(number: int, method: str, argument: object) -> None:
        try:
            if method == "publish":
                version, folder = msgspec.convert(argument, tuple[int, str])
                reply = sender.publish(version, lambda: iter(tensors_of(Path(folder))))
            elif method == "leave":
                reply = sender.leave(*msgspec.convert(argument, tuple[str, str]))
            else:
                reply = getattr(sender, method)(msgspec.convert(argument, REQUESTS[method]))
            line = msgspec.json.encode({"number": number, "reply": reply})
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
