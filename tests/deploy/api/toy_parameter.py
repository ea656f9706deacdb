"""The server and the command line with one more sampling parameter, which `ToyParams` and `top_a` below state.

    python -m tests.deploy.api.toy_parameter generate --help

With `ask` an engine of its own on a CPU answers a few requests over HTTP, and what it answered is printed. With `page`
the table of the documentation is.

The processes of a replica are spawned: they import this file first, too.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Annotated, Any

from torch import Tensor

from kernels.sampling import FLOORS
from workers.protocol import request
from workers.protocol.request import Parameter, SamplingParams


class ToyParams(SamplingParams, frozen=True, array_like=True):
    """The parameters of a request, and a toy."""

    top_a: Annotated[
        float,
        Parameter(
            "Keep tokens at least as probable as this times the largest probability squared.",
            asked=(0.0, 1.0),
            taken=(0.0, 1.0),
            in_generation_config=True,
        ),
    ] = 0.0


def top_a(value_N: Tensor, scaled_NV: Tensor) -> Tensor:
    """p >= a * p_max^2, where p = p_max * exp(scaled logit)."""
    total_N = scaled_NV.double().exp().cumsum(-1)[:, -1]
    return (value_N / total_N).log().float()


request.SamplingParams = ToyParams  # what everything imports from here on
request.TABLE = request.rows_of(ToyParams)
FLOORS["top_a"] = top_a

PROMPT = "def read_lines(path):"
ASKED: dict[str, Any] = {"prompt": PROMPT, "temperature": 1, "seed": 1234, "max_tokens": 24, "ignore_eos": True}


async def ask() -> dict[str, Any]:
    """Answers of an application on the demo model."""
    import httpx
    import uvicorn

    from deploy.api.app import create_app
    from deploy.config.api import ApiConfig
    from deploy.text.tokenizer import Tokenizer
    from workers.config import DEMO_MODEL, EngineConfig
    from workers.processes.launch import local_engine

    tokenizer = Tokenizer.load(DEMO_MODEL)
    assert tokenizer is not None
    patient = {"heartbeat_timeout_s": 60.0}  # processes of a busy machine are silent at times
    config = EngineConfig(model="demo", device="cpu", max_rows=4, token_budget=128, cache_pages=60, width=2, **patient)
    async with local_engine(config) as engine:
        app = create_app(engine, tokenizer, ApiConfig(max_logprobs=engine.info.vocab_size))
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", access_log=False, log_level="warning"))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            running = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=120) as client:

                async def complete(**more: Any) -> Any:
                    body = {"model": "demo", **ASKED, "return_token_ids": True, **more}
                    return (await client.post("/v1/completions", json=body)).json()

                found: dict[str, Any] = {"prompt": list(tokenizer.encode(PROMPT))}
                for name, more in {
                    "plain": {},
                    "filtered": {"top_a": 1.0},
                    "with_top_k": {"top_a": 0.5, "top_k": 3},
                }.items():
                    ids = (await complete(**more))["choices"][0]["token_ids"]
                    scored = {
                        "prompt": found["prompt"] + ids,
                        "max_tokens": 0,
                        "prompt_logprobs": engine.info.vocab_size,
                    }
                    places = (await complete(**scored))["choices"][0]["prompt_logprobs"][-len(ids) :]
                    logprobs = [{token: each["logprob"] for token, each in place.items()} for place in places]
                    found[name] = {"ids": ids, "logprobs": logprobs}
                found["too_large"] = await complete(top_a=1.5)
                found["beside_unknown"] = await complete(top_a=0.5, nobody_knows=1)
                found["of_chats"] = (await client.get("/openapi.json")).json()["components"]["schemas"]["ChatBody"]
            server.should_exit = server.force_exit = True
            await running
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["page"]:
        from tests.sampling_page import lines

        print("\n".join(lines()))
    elif sys.argv[1:] == ["ask"]:
        print(json.dumps(asyncio.run(ask())))
    else:
        from deploy.cli import main

        main()
