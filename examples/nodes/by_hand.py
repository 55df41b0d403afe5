"""A node that runs when it is polled, for programs with a loop of another kind. It prints

0.4
0.5
"""

import select

from judge import Judge, JudgeContract

from myxa.transport.poll_node import PollNode

node = PollNode(name="scheduler")
node.start(Judge(), "judge/0")

answer = node.submit(node.ref(JudgeContract, "judge/0").score, "four")
while not answer.done():
    node.poll(max_messages=64)  # takes in what is there, never waits
    # a step of the engine
print(answer.result())

poller = select.epoll()
poller.register(node.fileno(), select.EPOLLIN)
answer = node.submit(node.ref(JudgeContract, "judge/0").score, "seven")
while not answer.done():
    if poller.poll(timeout=1.0):  # beside your own descriptors
        node.poll()
print(answer.result())
poller.close()
node.close()
