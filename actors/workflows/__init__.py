"""How one sample comes about: a workflow is `async def generate(ctx: WorkflowContext, prompt: Prompt) -> Sample`."""
