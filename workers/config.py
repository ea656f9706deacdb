"""Settings of one replica: every field with its unit and default. No environment variable switches a feature."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from workers.parallel.mesh import INVARIANT_RANKS, Mesh

AUTO_WIDTH: Final = 4
"""Most tokens that a decode row feeds where the width is chosen from step to step."""
DEMO_MODEL = Path(__file__).resolve().parent.parent / "assets" / "demo"
DEMO_DRAFT_MODEL = DEMO_MODEL.parent / "demo_eagle3"


def _absolute(path: str) -> str:
    """Processes on a cluster have working folders of their own."""
    return str(Path(path).expanduser().absolute())


class EngineConfig(BaseModel):
    """What one replica serves and how much it takes on at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    """Folder with config.json and safetensors, or `demo` for the model shipped with the project."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that share every layer."""
    width: Literal["auto"] | Annotated[int, Field(ge=1, le=8)] = "auto"
    """Tokens a decode row feeds in one step: 1 + drafts. auto: as many as pay at the time, up to `AUTO_WIDTH`. Ignored
    (1) without a drafter."""
    drafter: Literal["auto", "mtp", "eagle3", "ngram", "none"] = "auto"
    """What drafts. auto: the draft model, if one is given, else the layer for it that the checkpoint has, else nothing.
    mtp: that layer, without which nothing starts. eagle3: the draft model. ngram: what followed the newest tokens where
    they stood before in the prompt or the output. none: nothing, which is width 1."""
    draft_model: str | None = None
    """Folder of a draft model (EAGLE-3), with config.json and safetensors, or `demo-eagle3` for the one of the demo
    model."""
    invariant: bool = False
    """A request's logits are bitwise the same alone, in any batch, at any width and on 1, 2, 4 or 8 ranks; slower."""
    activations: Literal["auto", "bf16"] = "auto"
    """What products with FP8 weights take. auto: many tokens are rounded to FP8 on GPUs that multiply such numbers, but
    not in invariant mode. bf16: nothing is rounded but what the checkpoint has rounded."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and cache. auto: bfloat16 on GPUs, float32 on CPU."""
    kv_cache_dtype: Literal["auto", "bf16", "fp8"] = "auto"
    """Of cached latents. auto: as `dtype`. bf16: the same, which must be bfloat16. fp8: e4m3 with a scale for every 128
    features; the roped part of the key as `dtype`; keys of indexers in INT8, with a scale each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    max_rows: Annotated[int, Field(ge=1, le=1024)] = 64
    """Requests decoded at once (slots)."""
    token_budget: Annotated[int, Field(ge=1)] = 2048
    """Most tokens one step feeds, decode and prefill together."""
    mixed_step_target_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Milliseconds that a step with decode rows and prompts is to take: prompts get as many tokens as fit. None: twice
    what a step of its decode rows alone takes, or longer where that leaves little for tokens of prompts, if the
    self-test has measured it, on GPUs; elsewhere, and with 0, prompts get all of `token_budget` that decode rows
    leave."""
    max_context: Annotated[int, Field(ge=1)] | None = None
    """Tokens of prompt and output together; default: the model's max_position_embeddings."""
    cache_pages: Annotated[int, Field(ge=2)] | None = None
    """Pages of 64 tokens, the null page included; default: what memory allows (see `memory_fraction`)."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that weights, graphs and cache may take together."""
    cpu_cache_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    """Bytes of latent cache of a rank on CPU, when `cache_pages` is not given."""
    graphs: bool = True
    """Capture decode steps, and the token-wise segments of mixed steps, into CUDA graphs (on GPUs; a CPU has none)."""
    selftest: bool = True
    """Prove at start-up that steps compute what they should; a replica that fails it does not serve."""
    selftest_buckets: Literal["auto", "all"] = "auto"
    """Which steps are proven. auto: every graph; where there are no graphs, the smallest, a middle and the largest
    eager step."""
    queue_limit: Annotated[int, Field(ge=0)] = 512
    """Sequences that may wait beyond `max_rows`; one more is refused (HTTP 429), a request of more than both together
    for good (HTTP 400)."""
    prefix_cache: bool = True
    """Reuse the pages of equal prompt prefixes."""
    record_plans: Annotated[str, AfterValidator(_absolute)] | None = None
    """File to which every step plan and its result are written, for `latentserve replay`; where it is there already, or
    a replica starts again, .1, .2, ... follow its name. None: nothing is recorded."""
    record_prompts: bool = False
    """Record prompts and generated tokens, too; without it others stand for them."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds a launched step may take before the replica is given up as hung."""
    heartbeat_timeout_s: Annotated[float, Field(gt=0)] = 3.0
    """Seconds a process of the replica may be silent before the replica is given up."""
    grammar_compile_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds that the grammar of a request with structured output may take to compile before it is refused."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds until every rank has loaded and reports ready."""

    @model_validator(mode="after")
    def _ranks_make_a_tree(self) -> Self:
        if self.invariant and self.tensor_parallel not in INVARIANT_RANKS:
            raise ValueError(
                "invariant mode has one order of sums for tensor_parallel 1, 2, 4 and 8, "
                f"not for {self.tensor_parallel}"
            )
        return self

    @model_validator(mode="after")
    def _budget_holds_decode(self) -> Self:
        if self.token_budget < self.max_rows * self.most_width + 1:
            raise ValueError(
                f"token_budget = {self.token_budget} is too small for max_rows = {self.max_rows} decode rows of width "
                f"{self.most_width}: give at least {self.max_rows * self.most_width + 1}, or fewer rows"
            )
        return self

    @model_validator(mode="after")
    def _prompts_go_somewhere(self) -> Self:
        if self.record_prompts and self.record_plans is None:
            raise ValueError("record_prompts needs a file: give record_plans, too")
        return self

    @model_validator(mode="after")
    def _draft_model_drafts(self) -> Self:
        if self.draft_model is not None and self.drafter not in ("auto", "eagle3"):
            raise ValueError(f"a draft model is given, but drafter = {self.drafter}: leave one of them out")
        if self.draft_model is None and self.drafter == "eagle3":
            raise ValueError("drafter = eagle3 needs a draft model: give its folder (--draft-model)")
        return self

    def mesh(self, rank: int = 0) -> Mesh:
        """The mesh of rank `rank` of the replica: all ranks share heads and experts, and each has the whole cache.
        ValueError for a rank that there is not."""
        return Mesh.of(rank, self.tensor_parallel)

    @property
    def draft_folder(self) -> Path | None:
        """The folder of the draft model that is to draft; None without one. FileNotFoundError when it is not one."""
        if self.draft_model is None or self.most_width == 1:
            return None
        path = DEMO_DRAFT_MODEL if self.draft_model == "demo-eagle3" else Path(self.draft_model).expanduser()
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} is not the folder of a draft model: it has no config.json")
        return path

    @property
    def most_width(self) -> int:
        """The most tokens a decode row may feed; of `auto` no more than the budget has for all rows."""
        if self.width == "auto":
            return max(1, min(AUTO_WIDTH, (self.token_budget - 1) // self.max_rows))
        return self.width

    @property
    def wants_draft_layer(self) -> bool:
        """Whether the checkpoint's own draft layer is to draft, if there is one."""
        return self.most_width > 1 and self.draft_model is None and self.drafter in ("auto", "mtp")

    @property
    def folder(self) -> Path:
        """The model folder; FileNotFoundError, saying what is missing, when it is not one."""
        path = DEMO_MODEL if self.model == "demo" else Path(self.model).expanduser()
        if path.is_file():
            raise FileNotFoundError(f"{path} is a file, not a model folder: give its folder, {path.parent}")
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"{path} is not a model folder: it has no config.json. Give the folder that a model was downloaded to"
            )
        return path
