"""A node in its own thread, for programs without a loop. It prints

0.4
0.5
{'judge/0': 0.1}
no actor is called 'judge/9'
"""

from judge import Judge, JudgeContract

from myxa.core.errors import NoSuchActor
from myxa.core.refs import with_deadline
from myxa.transport.sync_node import NodeThread

with NodeThread(name="tool") as node:
    node.start(Judge(), "judge/0")
    judge = node.ref(JudgeContract, "judge/0")
    print(node.call(judge.score, "four"))  # blocks, by the call's deadline at the longest
    future = node.submit(judge.score, "seven")  # a concurrent.futures.Future
    print(future.result())
    print(node.run(lambda: node.group(JudgeContract, "judge").all(JudgeContract.score, "x"), timeout_s=5))
    try:
        node.call(with_deadline(node.ref(JudgeContract, "judge/9"), 0.5).score, "text")
    except NoSuchActor as error:
        print(error.message)
