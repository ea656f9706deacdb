"""Everything that needs several GPUs, on those of this machine, and a table of what each step did.

    python bench/several_gpus.py                            # all GPUs, the DeepSeek-V2-Lite shape
    python bench/several_gpus.py --ranks 2 --shape v3-slice
    python bench/several_gpus.py --only tests,all-reduce    # some of the steps
    python bench/several_gpus.py --list                     # say the commands and run none
    python bench/several_gpus.py --generated --shape v3     # a model that takes all GPUs, and no disk

The steps: the tests that take several GPUs; the all-reduce of steps, of every size; a folder of random weights; time
per token and prefill with one rank, two and all, and what a rank's share of a step takes by itself, beside which the
rest is communication; greedy tokens in invariant mode, which have to be equal with one rank, two and all, and with all
where these share out one cache, with the cache in bf16 and in FP8; the self-test with all ranks, with a cache on each
of them and with one; 128 streams over HTTP, of one replica with all ranks and of two with half of them each, through
the router; what it costs and gives to share out a cache (`bench/shards.py`); how long streams wait when one of the
ranks is killed; and sessions that return, of one replica whose ranks share out a cache with host memory behind it, and
of two replicas with half of the GPUs and of that memory each. Steps that take a part of the GPUs run side by side.

With `--generated` weights are made as they are read (`bench/generated.py`), and nothing is done with fewer ranks, for
models such as DeepSeek-V3 that only fit all: the all-reduce, the self-test, time per token without drafts and with,
prefill, the cache that a start finds room for and what `latentserve fit` says of it, and over HTTP, through Ray, the
openai client and 128 streams. Random weights accept no draft, so what is printed with drafts is about the time of a
step: divided by the tokens that a step of real weights yields, it is their time per token.

Each step has a limit, and a step that fails ends none of the others. What each printed is written to `--out`, a file a
step. Exit status 0 when all passed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from steps import LATENTSERVE, PYTHON, ROOT, STEADY, Step, add_options, chosen_steps, list_steps, run_steps

PROMPT = "3,14,15,92,65,35,89,79"
SHARES = ("v2-lite", "v3-slice", "v3")
"""Shapes of which `bench/share.py` knows a rank's share."""
SESSIONS = ("--sessions", "40", "--turns", "8", "--first", "4000", "--last", "15000", "--think", "0.5", "3")
"""Options of the sessions that return: more tokens than the caches of `any_model_steps` have room for."""
KILLED = ("--device", "cuda", "--streams", "16", "--prompt", "2000", "--tokens", "1500", "--token-budget", "8192",
          "--kills", "1", "--standby", "none", "hot", "--no-invariant")  # fmt: skip
"""Options of the streams one of whose ranks is killed: with weights that stay, and with an engine that stands by."""
LOAD = ("--concurrency", "128", "--requests", "1024", "--input", "256", "--output", "128", "--token-ids", "--json")
"""Options of the load. Of random weights most tokens have no text: the folder's tokenizer is that of a smaller
vocabulary."""


def any_model_steps(ranks: int, shape: str, folder: Path) -> list[Step]:
    """Return the steps to run with this number of GPUs."""
    model = ("--model", str(folder))
    latency = (*LATENTSERVE, "bench", "latency", *model, "--width", "1", "--batch", "1,16,64,256", "--quiet")
    generate = (*LATENTSERVE, "generate", *model, "--prompt-ids", PROMPT, "--max-tokens", "64")
    invariant = (*generate, "--ignore-eos", "--temperature", "0", "--invariant", "--json")
    serve = (*LATENTSERVE, "serve", *STEADY, *model, "--max-context", "4096", "--max-rows", "128")
    load = ((*LATENTSERVE, "bench", "http", *LOAD),)
    rows = ("--rows", "1,16,64,256", "--widths", "1")
    # Every GPU has 1,200 pages, and all have 40 GB of host memory together.
    returned = (*LATENTSERVE, "serve", *model, "--max-context", "16000")
    sharing = ("--cache-shards", str(ranks), "--cache-pages", str(1200 * ranks), "--host-cache-bytes", str(40 * 10**9))
    two = ("--replicas", "2", "--cache-pages", "1200", "--host-cache-bytes", str(20 * 10**9))
    returning = ((PYTHON, "bench/returning.py", *SESSIONS),)
    tests = (PYTHON, "tests/gpu_tests.py", "--jobs", "5", "--workers", "8", "--timeout", "390")
    share = (PYTHON, "bench/share.py", "--shape", shape, "--ranks", str(ranks), *rows)

    def of(count: int, name: str, *command: str, tokens_of: str = "") -> Step:
        return Step(name, ((*command, "--tensor-parallel", str(count)),), gpus=count, tokens_of=tokens_of)

    def tokens(count: int, name: str, *cache: str) -> Step:
        return of(count, f"{name}-{count}", *invariant, *cache, tokens_of=f"{name}-1" if count > 1 else "")

    def sharded(name: str, *cache: str) -> Step:
        shards = ("--cache-shards", str(ranks))
        return of(ranks, f"{name}-{ranks}-shards", *invariant, *cache, *shards, tokens_of=f"{name}-1")

    # Where one runs beside another, those of few GPUs come first.
    alone = [of(count, f"latency-{count}", *latency) for count in sorted({1, 2, ranks})]
    alone[1:1] = [Step("share", (share,), gpus=1)] if shape in SHARES else []
    caches = {"invariant": (), "invariant-fp8": ("--kv-cache-dtype", "fp8")}
    return [
        Step("tests", ((*tests, "--only", _files()),), 400.0),
        Step("all-reduce", ((PYTHON, "bench/all_reduce.py", "--ranks", str(ranks)),)),
        Step("weights", ((PYTHON, "bench/checkpoint.py", shape, str(folder)),)),
        *alone,
        *(tokens(count, name, *cache) for count in sorted({1, 2, ranks}) for name, cache in caches.items()),
        *(sharded(name, *cache) for name, cache in caches.items()),
        of(ranks, "selftest", *LATENTSERVE, "selftest", *model),
        of(ranks, "selftest-shards", *LATENTSERVE, "selftest", *model, "--cache-shards", str(ranks)),
        Step("http-1", load, 240.0, server=(*serve, "--tensor-parallel", str(ranks))),
        Step("http-2", load, 240.0, server=(*serve, "--tensor-parallel", str(ranks // 2), "--replicas", "2")),
        Step("shards", ((PYTHON, "bench/shards.py", "--ranks", str(ranks)),), 500.0),
        of(ranks, "gap", PYTHON, "bench/standby_gap.py", *model, *KILLED),
        Step("returning-1", returning, 240.0, server=(*returned, "--tensor-parallel", str(ranks), *sharing)),
        Step("returning-2", returning, 240.0, server=(*returned, "--tensor-parallel", str(ranks // 2), *two)),
    ]


def whole_model_steps(ranks: int, shape: str, folder: Path) -> list[Step]:
    """Return the steps to run with a model that takes all of this number of GPUs, and whose weights are generated."""
    of = ("--model", str(folder), "--tensor-parallel", str(ranks))
    latency = (*LATENTSERVE, "bench", "latency", *of, "--quiet")
    long, few = ("--input", "8192", "--token-budget", "8192"), ("--output", "2,3", "--width", "1")
    eight = ("--input", "1024", "--token-budget", "8192")
    start = (*LATENTSERVE, "generate", *of, "--prompt-ids", PROMPT, "--max-tokens", "8")
    serve = (*LATENTSERVE, "serve", *STEADY, *of, "--max-context", "4096", "--max-rows", "128")
    caches = [("--kv-cache-dtype", form) for form in ("auto", "fp8")]
    every = ("--batch", "1,16,64,256")

    def step(name: str, *commands: tuple[str, ...], server: tuple[str, ...] = ()) -> Step:
        return Step(name, commands, 300.0, server=server, generated=True)

    return [
        step("all-reduce", (PYTHON, "bench/all_reduce.py", "--ranks", str(ranks))),
        step("weights", (PYTHON, "bench/generated.py", shape, str(folder))),
        step("fit", *((*LATENTSERVE, "fit", *of, *form) for form in caches)),
        step("selftest", (*LATENTSERVE, "selftest", *of)),
        step("latency-1", (*latency, *every, "--width", "1")),
        step("latency-2", (*latency, *every, "--width", "2")),
        step("prefill", (*latency, "--batch", "8", *eight, *few), (*latency, "--batch", "1", *long, *few)),
        step("starts", *((*start, *form) for form in caches)),
        step("openai", (PYTHON, "bench/openai_client.py"), server=serve),
        step("http", (*LATENTSERVE, "bench", "http", *LOAD), server=serve),
    ]


def _files() -> str:
    """The test files that take several GPUs, for `--only`."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return ",".join(str(path.relative_to(ROOT)) for path in found if re.search(r"\bmark\.gpus\b", path.read_text()))


def main() -> None:
    """Run them, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="default: every GPU")
    parser.add_argument("--shape", default="v2-lite", help="of bench/checkpoint.py, or bench/generated.py")
    parser.add_argument("--generated", action="store_true", help="a model that takes all GPUs, without files")
    add_options(parser, "several_gpus")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        listed = whole_model_steps if given.generated else any_model_steps
        every = listed(max(given.ranks, 2), given.shape, given.folder or Path(made) / "model")
        chosen = chosen_steps(parser, given, every)
        if given.list:
            list_steps(chosen)
            return
        if not 2 <= given.ranks <= torch.cuda.device_count():
            parser.error(f"{given.ranks} ranks on {torch.cuda.device_count()} GPUs: needs at least 2 of each")
        run_steps(chosen, given)


if __name__ == "__main__":
    main()
