"""The reward: what a reward model says of the conversation with the answer."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from myxa.core.completions import Completion


@cache
def judge(folder: str) -> tuple[Any, Any]:
    """Once in each worker process."""
    torch.set_num_threads(1)
    return AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder).eval()


def score(completion: Completion, *, folder: str = "judge") -> float:
    tokenizer, model = judge(str(Path(__file__).with_name(folder)))
    said = (*completion.messages, *completion.conversation)
    talk = [{"role": one.role, "content": one.content} for one in said]
    ids = tokenizer.apply_chat_template(talk, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        return float(model(**ids).logits[0, 0])
