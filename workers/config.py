"""Settings of one replica: every field with its unit and default. No environment variable switches a feature."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from workers.model_folder import CONFIG, PARAMS, config_file
from workers.parallel.mesh import CACHE_SHARDS, INVARIANT_RANKS, Mesh

AUTO_WIDTH: Final = 4
"""Most tokens that a decode row feeds where the width is chosen from step to step."""
LONGEST_STEP_S: Final = 60.0
"""Limit of a step, or of anything else of a rank that is waited for, of which nobody knows how long it takes."""
DEMO_MODEL = Path(__file__).resolve().parent.parent / "assets" / "demo"
DEMO_DRAFT_MODEL = DEMO_MODEL.parent / "demo_eagle3"
DRAFT_MODELS: Final = ("eagle", "eagle3")
"""Values of `drafter` that mean a draft model."""


def _absolute(path: str | None) -> str | None:
    """Processes on a cluster have working folders of their own."""
    return None if path is None else str(Path(path).expanduser().absolute())


ENGINE: Final = "Model and engine"
BUG_REPORTS: Final = "Bug reports"
"""Headings in the help of commands."""


@dataclass(frozen=True)
class Flag:
    """Puts a field of settings on the command line (`deploy.cli.options`).

    All else is said by the field: its type, range and default, its unit by the end of its name (`_s`, `_ms`, `_bytes`),
    and its help by the first paragraph of the docstring under it. The documentation has the other paragraphs, too.
    """

    name: str = ""
    """Name of the flag, such as `--model`. Empty: the field's name, with dashes."""
    metavar: str = ""
    """Placeholder for the value in help. Empty: its choices, or its unit or type with the range."""
    default: str = ""
    """Default in words. Empty: the field's default needs no words."""
    panel: str | None = ENGINE
    """Heading under which help lists it. None: among the command's own options."""
    everywhere: bool = False
    """Whether all commands that run an engine have it. Otherwise those that name it do, and `serve`, which has all."""


class EngineConfig(BaseModel):
    """Settings of one replica: the model that it serves, and how much it takes on at once.

    A field is the one place where a setting is stated. One with a `Flag` is on the command line as well.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: Annotated[str, Flag(metavar="PATH|demo", default="demo", everywhere=True)]
    """Folder with config.json and safetensors, or demo: the model shipped with the project."""
    tensor_parallel: Annotated[int, Field(ge=1), Flag(everywhere=True)] = 1
    """Ranks (GPUs) of a replica, which share every layer."""
    cache_shards: Annotated[Literal["auto"] | Annotated[int, Field(ge=1)], Flag(everywhere=True)] = 1
    """Ranks that share out one latent cache, so that it holds as many times the tokens (docs/tune.md). auto: by need.

    auto takes the smallest number with which the cache holds one request of `max_context`, and `max_rows` of an eighth
    of it; the largest where none does, and 1 where the ranks cannot share. It goes by memory alone, so `latentserve
    fit` knows it, and a start says what it is.

    A number divides `tensor_parallel`. Each page of the cache then lies on one of so many neighbouring ranks, and these
    exchange queries and partial results of attention in every layer. With 1 every rank has the whole cache.
    What more than one shard does not go with, such as dtype float16, is refused (docs/tune.md)."""
    width: Annotated[Literal["auto"] | Annotated[int, Field(ge=1, le=8)], Flag(everywhere=True)] = "auto"
    """Tokens a row feeds in one decode step: 1 + drafts. auto: as many as pay at the time. Never changes the output.

    auto takes 4 at most. Without a drafter the width is 1, whatever is given."""
    drafter: Annotated[Literal["auto", "mtp", "eagle", "eagle3", "ngram", "none"], Flag(everywhere=True)] = "auto"
    """Drafter. auto: the draft model or the checkpoint's own layer. ngram: look-up in the prompt.

    auto drafts with the draft model if one is given, else with the layer, else not at all. mtp: the checkpoint's layer,
    without which nothing starts. eagle, eagle3: the draft model, which has to be of that kind. ngram: what followed the
    newest tokens where they stood before in the prompt or the output. none: nothing, which is width 1."""
    least_draft_confidence: Annotated[float, Field(ge=0, le=1), Flag()] = 0.1
    """Least probability that a draft is accepted, as the drafter estimates it, for it to be verified. 0: all are.

    The estimate is that it and those before it in its row are accepted, and is not calibrated. Only the layers of
    DSpark make one; with other drafters the number has no effect. Never changes the output."""
    draft_model: Annotated[str | None, Flag(metavar="PATH|demo-eagle3", default="none", everywhere=True)] = None
    """Folder of a draft model (EAGLE-3 or EAGLE) for this model, or demo-eagle3: that of the demo model.

    It holds safetensors and config.json, or Mistral's params.json."""
    invariant: Annotated[bool, Flag(everywhere=True)] = False
    """Bitwise the same logits alone, in any batch, at any width and on 1, 2, 4 or 8 ranks; slower."""
    activations: Annotated[Literal["auto", "bf16"], Flag(everywhere=True)] = "auto"
    """Multiplied with FP8 and MXFP4 weights. auto: many tokens are rounded to FP8 where the GPU can. bf16: none are.

    In invariant mode auto rounds none either. What the checkpoint has rounded remains so."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Flag(everywhere=True)] = "auto"
    """Type of weights and cache. auto: bfloat16 on GPUs, float32 on a CPU."""
    kv_cache_dtype: Annotated[Literal["auto", "bf16", "fp8"], Flag(everywhere=True)] = "auto"
    """Type of cached latents. auto: as `dtype`. fp8 holds about 1.75 times the tokens of bf16.

    bf16: as `dtype`, which must be bfloat16. fp8: e4m3 with a scale for every 128 features; the roped part of the key
    as `dtype`; keys of indexers in INT8, with a scale each."""
    device: Annotated[Literal["auto", "cpu", "cuda"], Flag(everywhere=True)] = "auto"
    """Device that computes. auto: cuda where there is one.

    On a cluster: where one of its nodes has a GPU."""
    max_rows: Annotated[int, Field(ge=1, le=1024), Flag()] = 64
    """Requests decoded at once (slots)."""
    token_budget: Annotated[int, Field(ge=1, le=1 << 20), Flag()] = 2048
    """Most tokens one step feeds, decode and prefill together.

    At least `max_rows` * `width` + 1; where the width is auto, `max_rows` + 1."""
    max_context: Annotated[int | None, Field(ge=1), Flag(default="the model's")] = None
    """Tokens of prompt and output together."""
    cache_pages: Annotated[int | None, Field(ge=2), Flag(default="what memory allows")] = None
    """Pages of 64 tokens of latent cache that a rank has, the null page included."""
    memory_fraction: Annotated[float, Field(gt=0, le=1), Flag()] = 0.9
    """Share of a GPU's memory that weights, graphs and cache may take together."""
    cpu_cache_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    """Latent cache of a rank on a CPU, where `cache_pages` is not given."""
    host_cache_bytes: Annotated[int, Field(ge=0), Flag()] = 0
    """Host memory for pages that leave the latent cache, so that sessions that return find them. 0: none.

    The ranks of a node share it; a replica on several nodes takes so much on each. Pages are copied there when they are
    complete, and back when a prompt begins with them (docs/tune.md)."""
    disk_cache_bytes: Annotated[int, Field(ge=0), Flag()] = 0
    """Disk space for pages that leave host memory, which a replica that starts again finds. 0: none.

    Taken of the file system of `disk_cache_dir` at the start, and so much on each node of a replica. It lies behind
    `host_cache_bytes`, through which all pages pass (docs/tune.md)."""
    disk_cache_dir: Annotated[str | None, AfterValidator(_absolute), Flag(metavar="DIR", default="none")] = None
    """Folder on a fast local disk for `disk_cache_bytes`. Replicas of a node have folders of their own in it.

    Its files are readable by their owner alone: they hold prompts, as latents, in whatever folder that is."""
    disk_write_bytes_per_day: Annotated[int | None, Field(ge=0), Flag(default="as many as it holds")] = None
    """Bytes that may be written to the disk each day, as disks wear out. What repeats is written first.

    An hour's worth may be saved up, or a gibibyte where an hour's worth is less."""
    mixed_step_target_ms: Annotated[
        float | None, Field(ge=0, allow_inf_nan=False), Flag(default="2 x a decode step")
    ] = None
    """Target time of a step with streams and prompts; prompts get the tokens that fit. 0: all that are left.

    The default holds on GPUs, where the self-test has measured what a step of decode rows alone takes; it is longer
    beside few streams, where so little time would leave few tokens for prompts (docs/tune.md). Elsewhere, and with 0,
    prompts get all of `token_budget` that streams leave."""
    grammar_compile_timeout_s: Annotated[float, Field(gt=0), Flag("--grammar-compile-timeout")] = 10.0
    """Longest time that structured output may take to compile; a request that takes longer is refused."""
    keep_weights: bool = True
    """Keep weights when a rank dies, for the one that takes its place, so that it does not load them again.

    They stay where they are, in the memory of the GPU or, on a CPU, of the host, and take no more of it than without: a
    small process without CUDA holds the descriptors of that memory, and the next rank maps it. Where files, settings or
    GPU are others, or a checksum over the memory has changed, they are loaded anew (docs/operations.md). They end with
    the replica's front. Commands that start no rank again do not keep any."""
    graphs: bool = True
    """Capture decode steps, and the token-wise segments of mixed steps, into CUDA graphs (a CPU has none)."""
    graphs_at_start: Annotated[Literal["auto", "all", "few"], Flag()] = "auto"
    """Graphs that are captured and proven before a replica serves. few: those of its first steps. auto: few if proven.

    auto takes few where the start before has proven all graphs on the same GPU, with the same weights, settings, code
    and versions; else all. Whichever it takes, each graph is proven before it is used. Without `selftest` auto is all.

    few captures decode steps of the fewest rows, of the most, and of those that wait for an engine that is started
    again. All others are captured, and proven, between the steps of the first streams, of whose time that takes a
    quarter at the most. Until then other decode steps run in larger buckets, and mixed steps are launched kernel by
    kernel: tokens come a little later, and where rounding makes two nearly equal the other one may, except with
    `invariant`. An engine that is started again, for which streams wait, does so with all as well. Commands that serve
    nobody, and replicas with `host_cache_bytes`, capture all at the start."""
    selftest: bool = True
    """Prove that steps compute what they should, each graph before it is used; a replica that fails does not serve."""
    selftest_buckets: Literal["auto", "all"] = "auto"
    """Steps that are proven. auto: every graph; without graphs the smallest, a middle and the largest eager step."""
    queue_limit: Annotated[int, Field(ge=0)] = 512
    """Sequences that may wait beyond `max_rows`; one more is answered 429.

    A request of more sequences than both together is answered 400."""
    prefix_cache: bool = True
    """Reuse the pages of equal prompt prefixes."""
    prefix_snapshots: Annotated[int, Field(ge=0)] = 64
    """Snapshots that the prefix cache of a model has whose layers keep newest tokens beside pages (DeepSeek V4).

    A prompt begins behind cached pages only where one was made: at the last multiple of 128 tokens of a prompt, and
    where a prompt leaves what is cached. 0: prompts share nothing. Other models need none
    (docs/internals/deepseek-v4.md)."""
    record_plans: Annotated[
        str | None, AfterValidator(_absolute), Flag(metavar="FILE", default="none", panel=BUG_REPORTS)
    ] = None
    """Write every step plan to a file for `replay`, without what was asked and answered.

    With each plan goes its result. Where the file is there already, or a replica starts again, .1, .2, ... follow its
    name."""
    record_prompts: Annotated[bool, Flag(panel=BUG_REPORTS)] = False
    """Record prompts and answers, too: they can be read."""
    step_timeout_s: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    """Longest time that a launched step may take before the replica is given up as hung.

    auto: twenty times as long as the longest step of its kind that the self-test measured, and more with long contexts,
    but 3 seconds at the least and 60 at the most; 60 where nothing was measured, as on a CPU, where rows have grammars,
    and without `graphs`, where a step may have to wait for the compiler."""
    heartbeat_timeout_s: Annotated[float, Field(gt=0)] = 3.0
    """Longest time that a process of the replica may be silent before the replica is given up."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest time until every rank has loaded and reports ready."""

    @model_validator(mode="after")
    def _ranks_make_a_tree(self) -> Self:
        if self.invariant and self.tensor_parallel not in INVARIANT_RANKS:
            raise ValueError(
                "invariant mode has one order of sums for tensor_parallel 1, 2, 4 and 8, "
                f"not for {self.tensor_parallel}"
            )
        return self

    @model_validator(mode="after")
    def _shards_can_be_served(self) -> Self:
        shards = self.cache_shards
        if shards == "auto":
            return self
        if self.tensor_parallel % shards or shards not in CACHE_SHARDS:
            fit = [str(count) for count in CACHE_SHARDS if self.tensor_parallel % count == 0]
            raise ValueError(
                f"cache_shards = {shards} of tensor_parallel = {self.tensor_parallel} ranks: a cache is shared out "
                f"over 1, 2, 4 or 8 ranks, by a number that divides theirs: give {' or '.join(fit)}"
            )
        if shards == 1:
            return self
        if self.dtype == "float16":
            raise ValueError(
                f"cache_shards = {shards} does not go with dtype float16, in which ranks exchange nothing: give dtype "
                "bfloat16 or float32, or cache_shards 1"
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
    def _host_cache_is_of_use(self) -> Self:
        if self.host_cache_bytes and not self.prefix_cache:
            raise ValueError("host_cache_bytes keeps pages of the prefix cache, and prefix_cache is off: give 0")
        if self.host_cache_bytes and self.record_plans is not None:
            raise ValueError(
                "a recording has no pages that come from host memory, and could not be replayed: leave out "
                "record_plans, or give host_cache_bytes 0"
            )
        return self

    @model_validator(mode="after")
    def _disk_cache_is_of_use(self) -> Self:
        if self.disk_cache_bytes and not self.host_cache_bytes:
            raise ValueError(
                "disk_cache_bytes keeps pages that leave host memory, and host_cache_bytes is 0: give that, too, or "
                "no disk_cache_bytes"
            )
        if self.disk_cache_bytes and self.disk_cache_dir is None:
            raise ValueError("disk_cache_bytes needs a folder on a fast local disk: give disk_cache_dir, too")
        if self.disk_cache_dir is not None and not self.disk_cache_bytes:
            raise ValueError("disk_cache_dir is given, and disk_cache_bytes is 0: say how many bytes it may take")
        return self

    @property
    def disk_writes_per_day(self) -> int:
        """Bytes that may be written to the disk each day."""
        most = self.disk_write_bytes_per_day
        return self.disk_cache_bytes if most is None else most

    @model_validator(mode="after")
    def _draft_model_drafts(self) -> Self:
        if self.draft_model is not None and self.drafter not in ("auto", *DRAFT_MODELS):
            raise ValueError(f"a draft model is given, but drafter = {self.drafter}: leave one of them out")
        if self.draft_model is None and self.drafter in DRAFT_MODELS:
            raise ValueError(f"drafter = {self.drafter} needs a draft model: give its folder (--draft-model)")
        return self

    def mesh(self, rank: int = 0) -> Mesh:
        """The mesh of rank `rank` of the replica: all ranks share heads and experts, and `cache_shards` neighbours a
        cache; none does before a number of them is chosen. ValueError for a rank that there is not."""
        return Mesh.of(rank, self.tensor_parallel, cache=1 if self.cache_shards == "auto" else self.cache_shards)

    def shared_out(self, shards: int) -> EngineConfig:
        """These settings with so many `cache_shards`. pydantic's ValidationError where they do not go with that."""
        return EngineConfig.model_validate({**self.model_dump(), "cache_shards": shards})

    @property
    def draft_folder(self) -> Path | None:
        """The folder of the draft model that is to draft; None without one. FileNotFoundError when it is not one."""
        if self.draft_model is None or self.most_width == 1:
            return None
        path = DEMO_DRAFT_MODEL if self.draft_model == "demo-eagle3" else Path(self.draft_model).expanduser()
        if config_file(path) is None:
            raise FileNotFoundError(
                f"{path} is not the folder of a draft model: it has neither {CONFIG} (EAGLE-3) nor {PARAMS} (EAGLE as "
                "Mistral publishes it)"
            )
        return path

    @property
    def most_width(self) -> int:
        """The most tokens a decode row may feed; of `auto` no more than the budget has for all rows."""
        if self.width == "auto":
            return max(1, min(AUTO_WIDTH, (self.token_budget - 1) // self.max_rows))
        return self.width

    @property
    def longest_step_s(self) -> float:
        """Seconds after which a step has hung whatever is expected of it, as has a capture, or a copy of pages."""
        return LONGEST_STEP_S if self.step_timeout_s == "auto" else self.step_timeout_s

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
        if config_file(path) is None:
            raise FileNotFoundError(
                f"{path} is not a model folder: it has no config.json. Give the folder that a model was downloaded to"
            )
        return path
