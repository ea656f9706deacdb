"""Memory for caches, whose addresses stay while the memory of another process is put behind them."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest
import torch

from kernels.page import Shards
from workers.cache.paged import PagedCache
from workers.cache.place import CachePlace, bytes_of, granule
from workers.cache.spec import CacheSpec, Fp8LatentSpec, IndexSpec, Int8IndexSpec, LatentSpec
from workers.memory.cache_memory import HostCache
from workers.memory.weight_memory import NoSharedMemory

CPU = torch.device("cpu")
SIZE = 5 * mmap.PAGESIZE


def mapped(address: int) -> str:
    """Return what is mapped at an address, as the kernel lists it; empty where nothing is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            return line
    return ""


def test_what_another_had_is_mapped_at_the_same_addresses_and_is_empty() -> None:
    serving, standby = HostCache.new(SIZE), HostCache.reserved(SIZE)
    whole, own = serving.at(0, SIZE), standby.at(0, SIZE)
    part = standby.at(mmap.PAGESIZE + 8, 16)
    whole.fill_(7)
    standby.back(0, 100)
    own[:100].fill_(9)
    assert int(own[100:].sum()) == 0  # what one has is not the other's
    assert int(whole.sum()) == 7 * SIZE
    address = own.data_ptr()
    copies = [os.dup(descriptor) for descriptor in serving.descriptors()]
    standby.take_over(copies)
    assert own.data_ptr() == address
    assert "latentserve cache" in mapped(address)
    assert int(own.sum()) == 0
    own[mmap.PAGESIZE + 8] = 3
    assert int(part[0]) == 3
    assert int(whole[mmap.PAGESIZE + 8]) == 3  # it is the same memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(copies[0])


def test_what_has_another_size_is_not_taken() -> None:
    serving, standby = HostCache.new(SIZE + mmap.PAGESIZE), HostCache.reserved(SIZE)
    with pytest.raises(NoSharedMemory, match=f"it has {SIZE + mmap.PAGESIZE} bytes, not {SIZE}"):
        standby.take_over([os.dup(serving.descriptors()[0])])


def test_addresses_are_given_back_with_the_last_tensor() -> None:
    memory = HostCache.new(SIZE)
    tensor = memory.at(0, 8)
    address = tensor.data_ptr()
    memory.close_descriptors()
    del memory
    gc.collect()
    assert "latentserve cache" in mapped(address)
    del tensor
    gc.collect()
    assert "latentserve cache" not in mapped(address)


def test_untouched_addresses_take_no_memory() -> None:
    memory = HostCache.reserved(64 << 30)
    memory.at(5 << 30, 1).fill_(1)
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"{memory.at(0, 1).data_ptr():x}-"))
    [resident] = [line.split()[1] for line in lines[begin : begin + 24] if line.startswith("Rss:")]
    assert 0 < int(resident) <= 4 << 10  # KiB; a huge page at the most


SPECS: list[CacheSpec] = [
    LatentSpec(5, torch.float32),
    IndexSpec(3, torch.bfloat16),
    Fp8LatentSpec(128, 8, torch.bfloat16),
    Int8IndexSpec(16, torch.bfloat16),
]


@pytest.mark.parametrize("shards", [Shards(), Shards(2, 1)])
def test_layers_lie_in_it_as_their_specs_would_allocate_them(shards: Shards) -> None:
    pages = 7
    expected = PagedCache.allocate(SPECS, pages, CPU, shards)
    memory = HostCache.reserved(bytes_of(SPECS, pages, shards, granule(CPU)))
    cache = PagedCache.allocate(SPECS, pages, CPU, shards, place=CachePlace(memory, granule(CPU), backed=3))
    for number, (layer, other) in enumerate(zip(cache.layers, expected.layers, strict=True)):
        assert (layer.shape, layer.dtype) == (other.shape, other.dtype)
        assert torch.equal(layer, other)
        assert layer.data_ptr() % mmap.PAGESIZE == 0
        layer.view(torch.uint8).fill_(number + 1)
    for number, layer in enumerate(cache.layers):  # none lies in another
        assert bool((layer.view(torch.uint8) == number + 1).all())
