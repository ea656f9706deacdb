"""Options that several commands share: the same flag means the same everywhere, and the same as in `EngineConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

ENGINE = "Model and engine"
SAMPLING = "Sampling"
RECORDING = "Bug reports"

# What options have in both their forms, with a default of their own and, below, as one of a settings file.
_MODEL: Final[dict[str, Any]] = {
    "metavar": "PATH|demo",
    "help": "Folder with config.json and safetensors, or the demo model.",
    "rich_help_panel": ENGINE,
}
_DRAFTER: Final[dict[str, Any]] = {
    "metavar": "auto|mtp|eagle3|ngram|none",
    "help": "What drafts. auto: the draft model or the checkpoint's own layer. ngram: look-up in the prompt.",
    "rich_help_panel": ENGINE,
}
_ACTIVATIONS: Final[dict[str, Any]] = {
    "metavar": "auto|bf16",
    "help": "Multiplied with FP8 weights. auto: many tokens are rounded to FP8 where the GPU can. bf16: none are.",
    "rich_help_panel": ENGINE,
}
_KV_CACHE_DTYPE: Final[dict[str, Any]] = {
    "metavar": "auto|bf16|fp8",
    "help": "Of cached latents. auto: as --dtype. fp8 holds about 1.75 times the tokens of bf16.",
    "rich_help_panel": ENGINE,
}
_DEVICE: Final[dict[str, Any]] = {
    "metavar": "auto|cpu|cuda",
    "help": "auto: cuda where there is one.",
    "rich_help_panel": ENGINE,
}
_INVARIANT: Final[dict[str, Any]] = {
    "help": "Bitwise the same logits alone, in any batch, at any width and on 1, 2, 4 or 8 ranks; slower.",
    "rich_help_panel": ENGINE,
}

Model = Annotated[str, typer.Option("--model", **_MODEL)]
TensorParallel = Annotated[
    int, typer.Option("--tensor-parallel", min=1, help="Ranks that share every layer.", rich_help_panel=ENGINE)
]
WIDTH_HELP = (
    "Tokens a row feeds in one decode step: 1 + drafts. auto: as many as pay at the time. Never changes the output."
)


def width(text: str | int) -> str | int:
    """`auto` or 1 ... 8."""
    if text == "auto" or str(text) in map(str, range(1, 9)):
        return text if text == "auto" else int(text)
    raise typer.BadParameter(f"{text!r} is neither auto nor a number from 1 to 8")


Width = Annotated[
    Any,  # `EngineConfig` says which: typer knows no unions
    typer.Option("--width", metavar="auto|1..8", parser=width, help=WIDTH_HELP, rich_help_panel=ENGINE),
]
Drafter = Annotated[str, typer.Option("--drafter", **_DRAFTER)]
Invariant = Annotated[bool, typer.Option("--invariant", **_INVARIANT)]
Activations = Annotated[str, typer.Option("--activations", **_ACTIVATIONS)]
DType = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="auto|float32|bfloat16|float16",
        help="Of weights and cache. auto: bfloat16 on GPUs, float32 on CPU.",
        rich_help_panel=ENGINE,
    ),
]
KvCacheDType = Annotated[str, typer.Option("--kv-cache-dtype", **_KV_CACHE_DTYPE)]
Device = Annotated[str, typer.Option("--device", **_DEVICE)]
# The same for commands that take a settings file: None means that the file, or its default, says it.
GivenModel = Annotated[str | None, typer.Option("--model", **_MODEL, show_default="demo")]
SettingsFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings as YAML (docs/command-line.md); flags replace them."),
]
GivenTensorParallel = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel",
        min=1,
        help="Ranks (GPUs) of each replica.",
        show_default="1; 2 for the demo model, unless there is one GPU",
        rich_help_panel=ENGINE,
    ),
]
GivenWidth = Annotated[
    Any,
    typer.Option(
        "--width", metavar="auto|1..8", parser=width, help=WIDTH_HELP, show_default="auto", rich_help_panel=ENGINE
    ),
]
GivenDrafter = Annotated[str | None, typer.Option("--drafter", **_DRAFTER, show_default="auto")]
GivenDraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="PATH|demo-eagle3",
        help="Folder of a draft model (EAGLE-3) for this model, or the demo model's.",
        show_default="none",
        rich_help_panel=ENGINE,
    ),
]
GivenInvariant = Annotated[
    bool | None, typer.Option("--invariant/--no-invariant", **_INVARIANT, show_default="no-invariant")
]
GivenActivations = Annotated[str | None, typer.Option("--activations", **_ACTIVATIONS, show_default="auto")]
GivenDType = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="auto|float32|bfloat16|float16",
        help="Of weights and cache.",
        show_default="auto",
        rich_help_panel=ENGINE,
    ),
]
GivenKvCacheDType = Annotated[str | None, typer.Option("--kv-cache-dtype", **_KV_CACHE_DTYPE, show_default="auto")]
GivenDevice = Annotated[str | None, typer.Option("--device", **_DEVICE, show_default="auto")]
GivenMaxRows = Annotated[
    int | None,
    typer.Option("--max-rows", help="Requests decoded at once.", show_default="64", rich_help_panel=ENGINE),
]
GivenTokenBudget = Annotated[
    int | None,
    typer.Option("--token-budget", help="Most tokens one step feeds.", show_default="2048", rich_help_panel=ENGINE),
]
GivenMixedStepTarget = Annotated[
    float | None,
    typer.Option(
        "--mixed-step-target-ms",
        metavar="MS",
        min=0,
        help="What a step with streams and prompts is to take; prompts get the tokens that fit. 0: all that are left.",
        show_default="2 x a decode step",
        rich_help_panel=ENGINE,
    ),
]
GivenGrammarCompileTimeout = Annotated[
    float | None,
    typer.Option(
        "--grammar-compile-timeout",
        metavar="SECONDS",
        help="What structured output may take to compile; a request that takes longer is refused.",
        show_default="10",
        rich_help_panel=ENGINE,
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens generated.", rich_help_panel=SAMPLING)]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.", rich_help_panel=SAMPLING)]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        min=0.0,
        max=1.0,
        help="Keep the most probable tokens until they reach this probability.",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int, typer.Option("--top-k", min=0, help="Keep the k most probable tokens; 0 keeps all.", rich_help_panel=SAMPLING)
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Makes sampling repeatable; drawn at random by default.", rich_help_panel=SAMPLING),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Generate on past end-of-sequence tokens.", rich_help_panel=SAMPLING),
]
RecordPlans = Annotated[
    str | None,
    typer.Option(
        "--record-plans",
        metavar="FILE",
        help="Write every step plan to a file for `replay`, without what was asked and answered.",
        rich_help_panel=RECORDING,
    ),
]
RecordPrompts = Annotated[
    bool,
    typer.Option(
        "--record-prompts", help="Record prompts and answers, too: they can be read.", rich_help_panel=RECORDING
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]


def examples(*lines: str) -> str:
    """Text at the end of a command's help: one command per line, kept as it is."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
