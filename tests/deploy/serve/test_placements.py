"""Placements of ranks by node and device, and devices as Ray names them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.serve.actors import Placement, device_index, placement_order

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]


def placement(node: str, device: int = -1, bundle: int = 1) -> Placement:
    return Placement(node, device, bundle, f"ip-{node}", 1, 1)


def test_ranks_of_a_node_are_neighbours_and_the_front_s_node_comes_first() -> None:
    # Ray may place the bundles of two nodes alternately.
    placements = [placement("b", 1, 1), placement("a", 0, 2), placement("b", 0, 3), placement("a", 1, 4)]
    assert [(placements[i].node, placements[i].device) for i in placement_order(placements, home="b")] == [
        ("b", 0),
        ("b", 1),
        ("a", 0),
        ("a", 1),
    ]


PLACES = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-1, 7)), min_size=1, max_size=16)


@given(PLACES, st.sampled_from("abcd"))
def test_every_placement_gets_one_rank_and_no_node_is_torn_apart(places: list[tuple[str, int]], home: str) -> None:
    placements = [placement(node, device, bundle) for bundle, (node, device) in enumerate(places, 1)]
    order = placement_order(placements, home)
    assert sorted(order) == list(range(len(placements)))
    nodes = [placements[i].node for i in order]
    changes = [node for previous, node in zip([None, *nodes], nodes, strict=False) if node != previous]
    assert len(changes) == len(set(nodes))
    assert home not in nodes or nodes[0] == home
    for node in set(nodes):
        devices = [placements[i].device for i in order if placements[i].node == node]
        assert devices == sorted(devices)


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [
        ([], None, -1),
        ([], "0,1", -1),
        (["3"], None, 3),
        (["3"], "", 3),
        (["3"], "3", 0),
        (["5"], "4,5,6", 1),
        (["GPU-b"], "GPU-a, GPU-b", 1),
        ([" 5"], "4, 5", 1),  # Ray splits the list at commas alone
    ],
)
def test_the_device_is_counted_among_the_visible_ones(assigned: list[str], visible: str | None, index: int) -> None:
    assert device_index(assigned, visible) == index


def test_a_device_nobody_shows_is_an_error_that_says_so() -> None:
    with pytest.raises(RuntimeError, match="assigned GPU 7, which CUDA_VISIBLE_DEVICES = 0,1 does not show"):
        device_index(["7"], "0,1")


@pytest.mark.cluster
@pytest.mark.soak
def test_a_rank_with_a_gpu_of_its_own_still_sees_all_of_its_node(tmp_path: Path) -> None:
    """The rank sees all GPUs also on a Ray that was started without our settings. Symmetric memory needs its
    neighbours' GPUs."""
    program, seen = Path(__file__).with_name("visible_gpus_program.py"), tmp_path / "seen"
    # Ray's own processes must not keep a pipe open.
    with (tmp_path / "said").open("w") as said:
        done = subprocess.run(
            [sys.executable, program, seen],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=said,
            stderr=said,
            timeout=300,
        )
    assert done.returncode == 0, (tmp_path / "said").read_text()
    assert json.loads(seen.read_text()) == [
        [None, "0", 0],
        [None, "1", 1],
        ["2,3", "2", 0],
        ["2,3", "3", 1],
    ]


def test_schedulers_and_ranks_do_not_import_the_http_front() -> None:
    # Nor do commands that read settings. Its imports take a quarter of a second, and nothing else starts meanwhile.
    program = (
        "import sys, deploy.serve.actors, deploy.config.application, deploy.observability.logs\n"
        "print(sorted({'fastapi', 'starlette', 'deploy.api.app', 'transformers', 'torch'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
