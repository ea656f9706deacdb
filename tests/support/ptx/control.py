"""Instructions that decide where, whether and when a warp goes on (PTX ISA: control flow, bar, griddepcontrol)."""

from __future__ import annotations

import numpy as np

from tests.support.ptx.memory import Fault
from tests.support.ptx.step import Step, executes


@executes("bra", "uni")
def _branch(step: Step) -> None:
    step.warp.go(step.lanes, step.instruction.targets[0])


@executes("brx.idx")
def _branch_by_index(step: Step) -> None:
    targets = np.array(step.instruction.targets)
    step.warp.go(step.lanes, targets[step.read(0, np.uint32)[step.lanes]])


@executes("ret exit")
def _end(step: Step) -> None:
    step.warp.end(step.lanes)


@executes("bar.sync barrier.sync", "aligned")
def _barrier(step: Step) -> None:
    if not (step.lanes | step.warp.ended).all():
        raise Fault("some lanes do not come to a barrier")
    name = str(step.read(0, np.uint32)[0])
    threads = int(step.read(1, np.uint32)[0]) if len(step.operands) > 1 else step.block.program.threads
    step.block.gather(step.warp, name, threads)


@executes("griddepcontrol.wait")
def _wait_for_launch_before(step: Step) -> None:
    step.warp.waited = True


@executes("griddepcontrol.launch_dependents")
def _let_next_launch_start(step: Step) -> None:
    if step.block.memory.order is not None:
        step.block.memory.order.trigger(step.warp.waited)


@executes("bar.warp.sync fence membar wgmma.fence", "acq_rel sc sync aligned cta gpu sys mbarrier_init cluster")
@executes("setmaxnreg", "inc dec sync aligned release")
def _nothing(step: Step) -> None:
    """Orders what here is in order, or concerns only speed."""
