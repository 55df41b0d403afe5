"""Which Megatron parameter is made of which HuggingFace tensors: one table per model family."""
