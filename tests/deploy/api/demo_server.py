"""The demo model behind a real server, and a client of OpenAI's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import uvicorn

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from deploy.text.tokenizer import Tokenizer
from tests.deploy.api.fake_engine import KEEP_ALIVE_S
from workers.config import DEMO_MODEL, EngineConfig
from workers.processes.launch import local_engine
from workers.protocol.front import Engine


@asynccontextmanager
async def demo_engine(width: int, **settings: Any) -> AsyncIterator[Engine]:
    # Beside other tests a slow machine takes long to compile a grammar, or is silent, which is not what is tested.
    patient = {"grammar_compile_timeout_s": 60.0, "heartbeat_timeout_s": 60.0}
    small = {"max_rows": 16, "token_budget": 256, **patient, **settings}
    config = EngineConfig(model="demo", width=width, device="cpu", selftest=False, **small)
    async with local_engine(config, name="demo") as engine:
        yield engine


@asynccontextmanager
async def served(engine: Engine, tokenizer: Tokenizer | None = None, **settings: Any) -> AsyncIterator[str]:
    """The address of a server with these settings of the front. `tokenizer`: that of another model than the demo."""
    app = create_app(engine, tokenizer or Tokenizer.load(DEMO_MODEL), ApiConfig(**settings))
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, lifespan="off", log_level="warning", timeout_keep_alive=KEEP_ALIVE_S)
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving


@asynccontextmanager
async def openai_client(engine: Engine, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        served(engine, **settings) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client


@asynccontextmanager
async def demo(width: int, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with demo_engine(width, **settings) as engine, openai_client(engine) as client:
        yield client
