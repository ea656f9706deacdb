"""Effect of large requests on their neighbours: the longest gap in a stream beside them, and the slowest `/health`.

    python bench/large_requests.py --choices 128 --prompt 120000

Two requests, each a prompt of 120,000 ids with 128 choices, come to a replica of a tiny random model on the CPU that
already streams to somebody else. The replica's processes and its HTTP application are the real ones, without Ray. The
prompts take minutes: after `--seconds` the clients leave, and the neighbour is watched for a moment more. Ends with
code 1 if a gap or an answer of `/health` took longer than `--limit` seconds, or anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import torch
import uvicorn
import uvloop
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from workers.config import EngineConfig
from workers.processes.launch import local_engine

VOCAB = 256
HEALTH_PERIOD_S = 0.1
AFTERWARDS_S = 2.0
CHUNK = 48
"""Tokens of a prompt that a step feeds beside decode rows: few, so that a step is short on a CPU."""


def write_model(folder: Path, context: int) -> None:
    """A random model of one layer and one head, whose steps are short also behind a long prompt."""
    hidden, latent, nope, rope, value, inner = 16, 16, 8, 8, 8, 32
    config = {
        "model_type": "deepseek_v3",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "moe_intermediate_size": inner,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": 1,
        "q_lora_rank": None,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "max_position_embeddings": context,
    }
    attention, feed_forward = "model.layers.0.self_attn.", "model.layers.0.mlp."
    shapes = {
        "model.embed_tokens.weight": (VOCAB, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCAB, hidden),
        "model.layers.0.input_layernorm.weight": (hidden,),
        "model.layers.0.post_attention_layernorm.weight": (hidden,),
        attention + "q_proj.weight": (nope + rope, hidden),
        attention + "kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        attention + "kv_a_layernorm.weight": (latent,),
        attention + "kv_b_proj.weight": (nope + value, latent),
        attention + "o_proj.weight": (hidden, value),
        feed_forward + "gate_proj.weight": (inner, hidden),
        feed_forward + "up_proj.weight": (inner, hidden),
        feed_forward + "down_proj.weight": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def serve(folder: str, rows: int, context: int, pipe: Connection) -> None:
    """The process of the front; sends its port, and ends when told to."""
    config = EngineConfig(
        model=folder,
        device="cpu",
        width=1,
        max_rows=rows,
        token_budget=rows + CHUNK,
        max_context=context,
        cache_pages=4 * context // 64,
    )

    async def run() -> None:
        async with local_engine(config) as client:
            # Every answer of /health is judged anew.
            app = create_app(client, None, ApiConfig(served_model_names=("tiny",), probe_ttl_s=0.0))
            listener = socket.create_server(("127.0.0.1", 0))
            server = uvicorn.Server(
                uvicorn.Config(app, http="httptools", access_log=False, lifespan="off", log_level="warning")
            )
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            pipe.send(listener.getsockname()[1])
            await asyncio.to_thread(pipe.poll, None)
            server.should_exit = server.force_exit = True
            await serving

    uvloop.run(run())


class Watch:
    """The longest that something took, and when."""

    def __init__(self, name: str) -> None:
        self.name, self.count, self.longest, self.when = name, 0, 0.0, 0.0
        self._begin = time.perf_counter()

    def took(self, seconds: float) -> None:
        """Record one more duration."""
        self.count += 1
        if seconds > self.longest:
            self.longest, self.when = seconds, time.perf_counter() - self._begin

    def line(self) -> str:
        """Return the record in words."""
        return f"{self.name}: {self.count} times, longest {self.longest:.3f} s, {self.when:.1f} s after the beginning"


async def stream(http: httpx.AsyncClient, watch: Watch, begun: asyncio.Event, tokens: int) -> None:
    """A neighbour's stream, which should outlast the large requests."""
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": tokens, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        last = 0.0
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            assert '"error"' not in line, line
            now = time.perf_counter()
            if last:
                watch.took(now - last)
            last = now
            begun.set()
    raise AssertionError("the neighbour's stream ended")


async def poll_health(http: httpx.AsyncClient, watch: Watch) -> None:
    while True:
        begin = time.perf_counter()
        answer = await http.get("/health")
        watch.took(time.perf_counter() - begin)
        assert answer.status_code == 200, answer.text
        await asyncio.sleep(HEALTH_PERIOD_S)


async def ask(http: httpx.AsyncClient, body: bytes) -> None:
    answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text[:1000]


async def watched(tasks: set[asyncio.Task[None]], seconds: float) -> None:
    """Let them go on for a while; raises what one of them raised."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


async def measure(port: int, bodies: list[bytes], tokens: int, seconds: float) -> list[Watch]:
    """Sends the requests beside a stream of `tokens` at the most, and asks for health until all are answered, or for so
    many seconds. AssertionError if anything fails."""
    gaps, health = Watch("tokens of the neighbour"), Watch("answers of /health")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=3600, limits=limits) as http:
        begun = asyncio.Event()
        watching = [
            asyncio.create_task(stream(http, gaps, begun, tokens)),
            asyncio.create_task(poll_health(http, health)),
        ]
        await asyncio.wait({asyncio.create_task(begun.wait()), *watching}, return_when=asyncio.FIRST_COMPLETED)
        begin = time.perf_counter()
        asking = [asyncio.create_task(ask(http, body)) for body in bodies]
        try:
            while (left := begin + seconds - time.perf_counter()) > 0 and not all(task.done() for task in asking):
                await watched({*asking, *watching}, min(left, 1.0))
            answered = sum(task.done() for task in asking)
            print(f"{answered} of {len(bodies)} large requests answered in {time.perf_counter() - begin:.1f} s")
            for task in asking:
                task.cancel()
            await watched(set(watching), AFTERWARDS_S)
        finally:
            for task in (*asking, *watching):
                task.cancel()
            await asyncio.wait({*asking, *watching})
    return [gaps, health]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--choices", type=int, default=128, help="n of each request")
    parser.add_argument("--prompt", type=int, default=120_000, help="tokens of each request's prompt")
    parser.add_argument("--rows", type=int, default=16, help="max_rows of the replica")
    parser.add_argument("--seconds", type=float, default=40.0, help="after which the clients leave")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds that nothing may take longer than")
    options = parser.parse_args(arguments)
    draw = random.Random(0)
    bodies = [
        json.dumps(
            {
                "model": "tiny",
                "prompt": [draw.randrange(VOCAB) for _ in range(options.prompt)],
                "n": options.choices,
                "max_tokens": 1,
            }
        ).encode()
        for _ in range(options.requests)
    ]
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        most = -(-(options.prompt + 4096) // 4096) * 4096
        write_model(Path(folder), most)
        server = context.Process(target=serve, args=(folder, options.rows, most, theirs))
        server.start()
        theirs.close()
        try:
            watches = asyncio.run(measure(mine.recv(), bodies, most - 16, options.seconds))
        except (AssertionError, httpx.HTTPError) as error:
            print(f"failed: {error!r}")
            return 1
        finally:
            with suppress(OSError):
                mine.send(None)
            server.join(30)
            server.kill()
    for watch in watches:
        print(watch.line())
    slow = [watch for watch in watches if watch.longest > options.limit]
    if slow:
        print(f"longer than {options.limit:g} s: {', '.join(watch.name for watch in slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
