"""A web service with its own endpoints that also hosts a rollout actor of a running myxa run. See README.md."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request

from myxa.launch.embed import EmbeddedStatus, rollout_in

RUN_DIR = Path(os.environ.get("MYXA_RUN", "runs/latest"))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """What is between start and stop of the service: here the actor runs, on uvicorn's own loop."""
    async with rollout_in(RUN_DIR) as rollout:
        app.state.rollout = rollout
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/health")
async def health() -> dict[str, str]:
    """The service's own business; it neither knows nor waits for myxa."""
    return {"status": "ok"}


@app.get("/hello")
async def hello(name: str = "world") -> dict[str, str]:
    """More of the service's own business."""
    return {"message": f"Hello, {name}!"}


@app.get("/myxa")
async def myxa(request: Request) -> EmbeddedStatus:
    """State of the embedded actor."""
    return await request.app.state.rollout.status()
