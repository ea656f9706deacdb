"""Applications that listen at addresses of IPv6, where few files may be open."""

import asyncio

import openai
import pytest
from served_application import SERVE, Server, wait_gone

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

CONFIG = {"engine": {"model": "demo", "max_rows": 16, "token_budget": 512}, "port": 0, "dashboard": False}
WITH_LIMIT = f"""
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, ({{limit}}, {{limit}}))
known = socket.getaddrinfo
socket.getaddrinfo = lambda host, *more, **others: known("::1" if host == "six.test" else host, *more, **others)
{SERVE}"""
"""`six.test`: a name that has an address of IPv6 alone."""


@pytest.mark.parametrize(
    ("host", "ingress", "limit", "reached"),
    [
        ("::1", "direct", 256, r"http://\[::1\]:\d+"),
        ("::1", "proxy", 256, r"http://\[::1\]:\d+"),
        ("six.test", "direct", 1024, r"http://\[::1\]:\d+"),
        ("six.test", "proxy", 8192, r"http://\[::1\]:\d+"),
        ("::", "direct", 4096, r"http://\[::1\]:\d+"),
        ("::", "proxy", 512, r"http://\[::1\]:\d+"),
    ],
)
async def test_it_serves_at_this_address_within_this_limit(
    launch, host: str, ingress: str, limit: int, reached: str
) -> None:
    server: Server = launch({**CONFIG, "host": host, "ingress": ingress}, WITH_LIMIT.format(limit=limit))
    await asyncio.to_thread(server.wait)
    pids = server.pids()
    assert server.find(f"serving .* at ({reached})/v1")
    named = [line for line in server.lines if "HAProxy takes" in line]
    assert len(named) == (ingress == "direct")
    assert not any("Traceback" in line for line in server.lines)
    urls = [server.url, *([server.url.replace("[::1]", "127.0.0.1")] if host == "::" else [])]
    for url in urls:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            async def ask(number: int, client: openai.AsyncOpenAI = client) -> str:
                stream = await client.completions.create(
                    model="demo", prompt=f"def f{number}(x):", max_tokens=8, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

            assert all(await asyncio.gather(*(ask(number) for number in range(24))))
    assert await asyncio.to_thread(server.stop) == 0
    wait_gone(pids)
