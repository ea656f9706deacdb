"""Limits of API keys hold for all replicas: with a store in place of Ray's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import msgspec
import pytest
from test_live_status_store import Store

from deploy.api.limits.keys import Key, KeyRing, OverLimit, Spent
from deploy.config.keys import ApiKey
from deploy.serve import key_status_store, progress
from deploy.serve.key_status_store import KeyStatusStore
from tests.deploy.api.demo_server import demo_engine
from workers.protocol.messages import Charge, Charges, Request
from workers.protocol.plan import SamplingParams

SETTINGS = ApiKey(key="sesame", name="app", requests_per_minute=10, max_sequences=3)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    for module in (key_status_store, progress):
        monkeypatch.setattr(module, "store", store)
    monkeypatch.setattr(key_status_store, "PERIOD_S", 0.01)
    return store


def key_of(ring: KeyRing) -> Key:
    key = ring.find(["sesame"])
    assert key is not None
    return key


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def room(ring: KeyRing) -> float:
    """Return the requests that are left. Reports are milliseconds old, in which a little of one may have come in."""
    return round(key_of(ring).spent({}).held[0], 1)


async def test_replicas_hear_of_each_other(store: Store) -> None:
    clock = lambda: 0.0  # noqa: E731  # nothing is refilled
    rings = [KeyRing((SETTINGS,), clock) for _ in range(3)]
    stores = [KeyStatusStore("app", str(number), ring) for number, ring in enumerate(rings[:2])]
    await until(lambda: all(ring._heard for ring in rings[:2]))
    for _ in range(6):
        key_of(rings[0]).enter()
    meter = key_of(rings[1]).start(5, [None, None, None])  # type: ignore[list-item]
    meter.choices = ()  # type: ignore[assignment]
    key_of(rings[1]).sequences = 3
    await until(lambda: room(rings[1]) == 4)
    await until(lambda: key_of(rings[0])._elsewhere == 3)
    with pytest.raises(OverLimit, match="3 of them run or wait"):
        key_of(rings[0]).enter()
    key_of(rings[1]).sequences = 0
    await until(lambda: key_of(rings[0])._elsewhere == 0)
    stores.append(KeyStatusStore("app", "new", rings[2]))
    await until(lambda: room(rings[2]) == 4)
    assert all(b"sesame" not in value for value in store.values.values())
    store.broken = True
    await asyncio.sleep(0.05)
    key_of(rings[2]).enter()
    store.broken = False
    await until(lambda: {room(ring) for ring in rings} == {3})
    for status_store in stores:
        status_store.close()


async def test_a_front_hears_how_much_of_its_own_the_others_have_heard_of(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others tell of this front under the name that they know it by."""
    ring, other = (KeyRing((SETTINGS,), lambda: 0.0) for _ in range(2))
    heard: list[float] = []
    hear = ring.hear

    def spy(own: str, fronts: Mapping[str, Mapping[str, Spent]], ages: Mapping[str, float]) -> Charges:
        heard.extend(told["app"].heard[own][0] for told in fronts.values() if own in told["app"].heard)
        return hear(own, fronts, ages)

    monkeypatch.setattr(ring, "hear", spy)
    stores = [KeyStatusStore("app", "spied", ring), KeyStatusStore("app", "other", other)]
    for _ in range(6):
        key_of(ring).enter()
    await until(lambda: 6.0 in heard)
    for status_store in stores:
        status_store.close()


async def test_what_a_scheduler_gives_to_keys_is_told_to_those_of_other_replicas_once(store: Store) -> None:
    plain = ApiKey(key="other", name="other", weight=3.0)
    rings = [KeyRing((SETTINGS, plain)) for _ in range(2)]
    stores = [KeyStatusStore("app", str(number), ring) for number, ring in enumerate(rings)]
    heard: list[list[Charge]] = [[], []]
    clients = [
        SimpleNamespace(on_charges=[], charged_elsewhere=lambda news, found=found: found.extend(news.items))
        for found in heard
    ]
    for status_store, client in zip(stores, clients, strict=True):
        status_store.serving(client)  # type: ignore[arg-type]
    await until(lambda: all(ring._heard for ring in rings))
    for tokens in (100, 20):
        (tell,) = clients[0].on_charges
        tell(Charges((Charge("other", 3.0, tokens), Charge("app", 1.0, 2 * tokens), Charge("unknown", 1.0, 9))))
        await asyncio.sleep(0.05)
    await until(lambda: sum(charge.tokens for charge in heard[1]) >= 360)
    await asyncio.sleep(0.05)
    assert sum(charge.tokens for charge in heard[1] if charge.key == "app") == 240
    assert sum(charge.tokens for charge in heard[1] if (charge.key, charge.weight) == ("other", 3.0)) == 120
    assert not heard[0]
    for status_store in stores:
        status_store.close()


async def test_the_dead_are_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_status_store, "FORGET_S", 100.0)
    monkeypatch.setattr(key_status_store, "DROP_S", 600.0)
    ring = KeyRing((SETTINGS,))
    for name, age in (("dead", 300.0), ("long dead", 1000.0), ("alive", 1.0)):
        report = {"at": time.time() - age, "keys": {"app": {"requests": 1.0, "sequences": 2}}}
        store.values[f"keys/app/{name}".encode()] = msgspec.msgpack.encode(report)
    store.values[b"keys/app/of another version"] = b"\xff"
    status_store = KeyStatusStore("app", "me", ring)
    await until(lambda: ring._heard)
    assert ring._heard.keys() == {"alive"}
    assert key_of(ring)._elsewhere == 2
    assert b"keys/app/long dead" not in store.values
    assert b"keys/app/dead" in store.values
    status_store.close()


async def test_a_running_scheduler_says_what_it_gave_and_hears_what_others_gave() -> None:
    """Through the channel, with the demo model."""
    told: list[Charge] = []
    async with demo_engine(1) as engine:
        engine.on_charges.append(lambda charges: told.extend(charges.items))
        for number, key in enumerate(("app", "", "app")):
            engine.charged_elsewhere(Charges((Charge("app", 2.0, 100), Charge("unseen", 1.0, 5))))
            request = Request(str(number), tuple(range(5 + number)), SamplingParams(max_tokens=3), key=key, weight=2.0)
            assert [output async for output in engine.generate(request)]
        await until(lambda: sum(charge.tokens for charge in told) >= 5 + 7)
    assert {(charge.key, charge.weight) for charge in told} == {("app", 2.0)}
    assert 5 + 7 <= sum(charge.tokens for charge in told) <= 5 + 7 + 2 * 3
