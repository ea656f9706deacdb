"""Proves and serves a model of each family near DeepSeek's, at published sizes on this machine, and prints a line each.

    python bench/families.py                                  # slices that load in seconds on one H200
    python bench/families.py --only hy4-slice,youtu --no-serve    # the self-test alone: needs no Ray
    python bench/families.py --only small4,axk2-light,sarvam-fp8  # whole models, on one H200
    python bench/families.py --only sarvam --tensor-parallel 2    # in bf16, on two
    python bench/families.py --tiny --device cpu              # the same with tiny sizes, for a machine without a GPU
    python bench/families.py --list                           # say the commands and run none

Of each shape a folder is written whose weights are generated as they are read (`bench/generated.py`). Then
`latentserve selftest` has to pass, and an endpoint to answer the openai client: a completion and a chat, each as a
whole and streamed (`bench/openai_client.py`). A line has the number of steps that were proven, the seconds from the
command to an endpoint that answers, and whether the client was content.

Each of the two has a limit, which `--patience` multiplies, and one that fails ends none of the others. What they
printed is written to `--out`. Exit status 0 when all passed.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from generated import GENERATED, TABLE, write_folder
from steps import LATENTSERVE, PYTHON, Step, list_steps, run_step

from workers.weights.formats import INT4_GROUPS

SHOWN = ("small4-slice", "sarvam-slice", "axk1-slice", "axk2-slice", "youtu", "hy4-slice")
"""Shapes of `bench/shapes.py` that are shown without `--only`."""
LIMIT_S = 300.0
"""Seconds that a self-test, or an endpoint and all that is asked of it, may take."""
TINY: dict[str, Any] = {
    "vocab_size": 8192,  # that of the folder's tokenizer
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "index_head_dim": 32,
    "index_topk": 64,
    "max_position_embeddings": 512,
}
"""Sizes of `--tiny`, in place of those that a shape has; all else is the shape's."""
CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A chat template. The folder's tokenizer has no family's control tokens, so it has no family's template either."""
_ANSWERED = re.compile(r"^the endpoint answered after ([0-9.]+) s$", re.MULTILINE)


def values_of(shape: str, *, tiny: bool) -> dict[str, Any]:
    """Return the config values of a shape."""
    values = GENERATED[shape][0]
    return {**values, **{name: size for name, size in TINY.items() if name in values}} if tiny else values


def steps_of(shape: str, folder: Path, given: argparse.Namespace) -> list[Step]:
    """Return what is done with a shape: its self-test, and an endpoint that is asked."""
    # A model without a layer that drafts looks its drafts up in the prompt.
    drafter = "mtp" if GENERATED[shape][0].get("num_nextn_predict_layers") else "ngram"
    model = ("--model", str(folder), "--device", given.device, "--drafter", drafter)
    model += ("--max-rows", str(given.max_rows), "--width", str(given.width))
    if given.tensor_parallel > 1:
        model += ("--tensor-parallel", str(given.tensor_parallel))
    proof = (*LATENTSERVE, "selftest", *model, "--json", "--quiet")
    asked = (PYTHON, "bench/openai_client.py", "--chat")
    steps = [Step(f"{shape}-selftest", (proof,), LIMIT_S, generated=True)] if given.selftest else []
    if given.serve:
        server = (*LATENTSERVE, "serve", *model)
        steps.append(Step(f"{shape}-serve", (asked,), LIMIT_S, server=server, generated=True))
    return steps


def proven(printed: str) -> str:
    """Return how many steps of how many passed, of what a self-test printed; "" without its report."""
    reports = [line for line in printed.splitlines() if line.startswith('{"model"')]
    if not reports:
        return ""
    buckets = json.loads(reports[-1])["buckets"]
    return f"{sum(bucket['passed'] for bucket in buckets)} of {len(buckets)}"


def shown(shape: str, folder: Path, given: argparse.Namespace) -> bool:
    """Do all of it with one shape, print its line, and return whether it passed."""
    values, form = values_of(shape, tiny=given.tiny), GENERATED[shape][1]
    write_folder(values, form, folder, size=1 << 20 if given.tiny else TABLE)
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    columns, passed = [f"{shape:18}"], True
    for step in steps_of(shape, folder, given):
        done, seconds = run_step(step, given.out, given.patience)
        printed = (given.out / f"{step.name}.txt").read_text(encoding="utf-8")
        passed &= done
        if step.server:
            found = _ANSWERED.search(printed)
            started = f"{found[1]} s" if found else "-"
            columns.append(f"{started:>10}  {'ok' if done else 'FAILED':8}")
        else:
            columns.append(f"{proven(printed) or '-':>12}{seconds:9.1f} s  {'ok' if done else 'FAILED':8}")
        if not done:
            columns.append(f"see {given.out / step.name}.txt")
    print("  ".join(columns).rstrip(), flush=True)
    return passed


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SHOWN), help="shapes of bench/shapes.py, with commas")
    parser.add_argument("--selftest", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--serve", action=argparse.BooleanOptionalAction, default=True, help="serve it, and ask")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes in place of the published ones")
    parser.add_argument("--device", default="auto", help="as latentserve has it")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--max-rows", type=int, default=16)
    parser.add_argument("--width", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("families"), help="for what the commands print")
    parser.add_argument("--patience", type=float, default=1.0, help="what limits are multiplied by")
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Show each shape in turn."""
    parser = options()
    given = parser.parse_args(arguments)
    known = [name for name, (_, form) in GENERATED.items() if form is not INT4_GROUPS]
    shapes = given.only.split(",")
    if unknown := {*shapes} - {*known}:
        parser.error(f"no shape is called {', '.join(sorted(unknown))}: {', '.join(known)}")
    with tempfile.TemporaryDirectory() as made:
        if given.list:
            list_steps([step for shape in shapes for step in steps_of(shape, Path(made) / shape, given)])
            return
        given.out.mkdir(parents=True, exist_ok=True)
        proof = f"{'proven':>14}{'took':>11}  {'':8}" if given.selftest else ""
        asked = f"  {'started':>10}  asked" if given.serve else ""
        print(f"{'shape':18}{proof}{asked}", flush=True)
        passed = [shown(shape, Path(made) / shape, given) for shape in shapes]
    failed = len(passed) - sum(passed)
    sys.exit(f"{failed} of {len(passed)} failed" if failed else 0)


if __name__ == "__main__":
    # What runs is in sessions of its own, and ends with this program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    main()
