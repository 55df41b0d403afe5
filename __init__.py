"""myxa: reinforcement learning for language models as an asynchronous actor system."""

__version__ = "0.1.0"
