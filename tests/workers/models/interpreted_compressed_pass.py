"""The pass of DeepSeek V4 on kernels that a GPU launches, interpreted: what stands between its products, its streams,
its router and its gates. Products, also those of groups, are torch's. Run with TRITON_INTERPRET=1, see
test_compressed_pass.py."""

from tests.support import bounds, interpreter

interpreter.repair()
bounds.check_bounds()

from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from test_compressed_pass import Steps  # noqa: E402
from test_deepseek_v4_ranks import dspark, write_dspark  # noqa: E402
from test_deepseek_v4_reference import TOLERANCE, WIDTH, case, poisoned  # noqa: E402

from kernels import compressed, moe, residual_streams, rms_norm, silu_mul  # noqa: E402
from kernels.compressed import attention_launch, launch  # noqa: E402
from kernels.moe import launch as moe_launch  # noqa: E402
from kernels.sparse import SelectWorkspace  # noqa: E402
from kernels.sparse import launch as sparse_launch  # noqa: E402
from workers.models import compressed_kernels, general  # noqa: E402
from workers.models.attention import compressed_rows  # noqa: E402
from workers.parallel.group import Group  # noqa: E402

CALLS: dict[str, int] = {}
"""How often each kernel's launcher was called."""


def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` without the options that only a GPU knows."""

    def run(*given: Any, dependent: bool = False, **options: Any) -> Any:
        CALLS[name] = CALLS.get(name, 0) + 1
        return call(*given, **options)

    return run


class Launched:
    """Stands for the references of `kernels.compressed`."""

    begin = staticmethod(noted("begin", launch.begin))
    lay_out_rows = staticmethod(noted("lay_out_rows", launch.lay_out_rows))
    rope_store = staticmethod(noted("rope_store", launch.rope_store))
    rope_queries = staticmethod(noted("rope_queries", launch.rope_queries))
    keep_entries = staticmethod(noted("keep_entries", launch.keep_entries))
    compress = staticmethod(noted("compress", launch.compress))


def attend(*given: Any, **options: Any) -> None:
    *tensors, workspace = given
    noted("attend", attention_launch.attend)(*tensors, workspace, **options)


def select_positions(
    score_TN: Any, bound_T: Any, selected_TS: Any, fault_1: Any, workspace: None, *, dependent: bool
) -> None:
    tokens, scores = score_TN.shape
    own = SelectWorkspace.allocate(tokens, scores, torch.empty, selected=selected_TS.shape[1], hopper=False)
    noted("select_positions", sparse_launch.select_positions)(score_TN, bound_T, selected_TS, fault_1, own)


def add_to_streams(*given: Any, eps: float, **options: Any) -> None:
    noted("add_to_streams", residual_streams.launch_add_to_streams)(*given, eps, **options)


def norm(x_TE: Any, weight_E: Any, out_TE: Any, *, eps: float, scale_T: Any = None, dependent: bool = False) -> None:
    noted("rms_norm", rms_norm.launch_rms_norm)(x_TE, weight_E, out_TE, eps, scale_T=scale_T)


def route(logit: Any, bias: Any, id_TK: Any, weight_TK: Any, rule: Any, **options: Any) -> None:
    given = options["shared"], options["live_R"], options["given"]
    noted("route", moe_launch.route)(logit, bias, id_TK, weight_TK, rule, *given)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    """A folder with DSpark, and what it makes on the kernels' references."""
    folder = tmp_path_factory.mktemp("dspark")
    write_dspark(folder)
    return folder, dspark(folder, Group())


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    monkeypatch.setattr(compressed, "reference", Launched)
    monkeypatch.setattr(compressed, "attend", attend)
    monkeypatch.setattr(compressed_kernels, "index_scores", noted("index_scores", sparse_launch.index_scores))
    monkeypatch.setattr(compressed_kernels, "select_positions", select_positions)
    monkeypatch.setattr(general, "add_to_streams", add_to_streams)
    monkeypatch.setattr(general, "rms_norm", norm)
    monkeypatch.setattr(general, "silu_mul", noted("silu_mul", silu_mul.launch_silu_mul))
    monkeypatch.setattr(moe, "route", route)


def test_chunks_and_steps_give_transformers_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows in chunks whose tokens attend seven at a time, then decode rows with rejected drafts and a row of
    padding, across borders of all entries."""
    given = case("plain")
    monkeypatch.setattr(compressed_rows, "attending", lambda entries: 7)
    rows, worst = Steps(given, poisoned(given.model)), 0.0
    for counts, rejected in [((37, 9), 0), ((WIDTH, WIDTH), 3), ((WIDTH, WIDTH), 0), ((10, 1), 0)]:
        for row, begin, logit_TB in rows.feed(*enumerate(counts), rejected=rejected):
            difference = (logit_TB - given.want[row][begin : begin + len(logit_TB)]).abs().max()
            worst = max(worst, float(difference.nan_to_num(torch.inf)))
    assert worst < TOLERANCE
    assert set(CALLS) == {
        *("begin", "lay_out_rows", "rope_store", "rope_queries", "keep_entries", "compress", "attend"),
        *("index_scores", "select_positions", "add_to_streams", "rms_norm", "silu_mul", "route"),
    }


def test_dspark_drafts_what_it_does_on_the_references(drafted: tuple[Path, list[torch.Tensor]]) -> None:
    folder, wanted = drafted
    for got, want in zip(dspark(folder, Group()), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=0)
    assert {"begin", "rope_store", "keep_entries", "attend", "add_to_streams", "rms_norm", "silu_mul", "route"} == set(
        CALLS
    )
