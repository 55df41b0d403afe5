"""A node in a thread, for programs without a loop. It prints

0.4
0.5
{'judge/0': 0.1}
no actor is called 'judge/9'
"""

import asyncio
import threading

from judge import Judge, JudgeContract

from myxa.core.errors import NoSuchActor
from myxa.core.refs import together, with_deadline
from myxa.transport.node import Node

loop = asyncio.new_event_loop()
thread = threading.Thread(target=loop.run_forever)
thread.start()


def begin(coro):
    """Run it on the node's loop. Any thread may ask; cancelling the future cancels the call."""
    return asyncio.run_coroutine_threadsafe(coro, loop)


node = begin(Node.attach(name="tool")).result()
try:
    begin(node.start(Judge(), "judge/0")).result()
    judge = node.ref(JudgeContract, "judge/0")
    print(begin(judge.score("four")).result())  # blocks, by the call's deadline at the longest
    future = begin(judge.score("seven"))
    print(future.result())
    print(begin(together({"judge/0": judge.score("x")})).result())
    try:
        begin(with_deadline(node.ref(JudgeContract, "judge/9"), 0.5).score("text")).result()
    except NoSuchActor as error:
        print(error.message)
finally:
    begin(node.close()).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
