"""Settings that let the number of replicas follow the load."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class AutoscalingConfig(BaseModel):
    """Bounds of the number of replicas, and the load at which it changes (`deploy.serve.autoscaling`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_replicas: Annotated[int, Field(ge=1)] | None = None
    """Most replicas. Where it is given their number follows the load (docs/deploy.md). None: `replicas` says it."""
    min_replicas: Annotated[int, Field(ge=1)] = 1
    """Fewest replicas, and those that a start brings up.

    From 2 on what runs always fits the replicas that are left when one dies."""
    slots_used: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the slots that requests should take; waiting ones count. Where more are taken, replicas are added."""
    pages_used: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the latent cache's pages that running requests should take, without those of the prefix cache."""
    backlog_s: Annotated[float, Field(gt=0)] = 2.0
    """Time that the prompts queued at a replica should take to compute, at the pace of those that it has computed."""
    upscale_delay_s: Annotated[float, Field(ge=0)] = 15.0
    """Time for which the load must ask for more replicas without a break before they are started."""
    downscale_delay_s: Annotated[float, Field(ge=0)] = 300.0
    """Time for which the load must ask for fewer replicas without a break before some of them end.

    Give more than most streams take: what an ending replica still serves no longer counts as load."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.max_replicas is None:
            if given := self.model_fields_set - {"max_replicas"}:
                raise ValueError(
                    f"autoscaling.{min(given)} is given, but without autoscaling.max_replicas the number of replicas "
                    "does not change: give that, too, or leave autoscaling out and set replicas"
                )
        elif self.max_replicas < self.min_replicas:
            raise ValueError(
                f"autoscaling.max_replicas = {self.max_replicas} is less than autoscaling.min_replicas = "
                f"{self.min_replicas}: raise the one or lower the other"
            )
        return self
