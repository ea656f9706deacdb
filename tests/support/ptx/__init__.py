"""Runs on a CPU, on tensors' own memory, the PTX that Triton and Gluon compile for Hopper.

    with emulated(seed=1) as launches:
        launch_some_kernels(cpu_tensors)

What is modelled, after NVIDIA's PTX ISA 8.7: warps that run in any order between barriers, with 32 lanes each that may
branch apart; global memory, which is the storages of a launch's tensors and nothing else, and shared memory, poisoned;
alignment; copies by cp.async and by tensor maps, and wgmma, each as early or as late as it may take effect; mbarriers
and barriers of threads, so that a kernel which would hang says where; swizzles and matrix descriptors; the fence
between threads' stores and products; programmatic dependent launch, with what may be read before the wait, or from a
stale line of L1. A kernel is right if it is right under every schedule: try several seeds.

The definitions of instructions, functions of numpy vectors, say what each does. `core.c` executes the common ones, and
leaves to them what is rare and what may be a mistake; without a C compiler they execute everything.

What is not modelled: what ptxas makes of the PTX (registers, spills, serialized products, hazards between registers
that a product under way uses); time; setmaxnreg; threads of one warp that drift apart; orders of memory weaker than
that in which instructions ran here, and other fences between proxies; clusters and several GPUs; blocks that wait for
each other, which would hang here; the hardware's order of fp32 sums, its flushed denormals and the errors of its
approximations. A loop that never ends, and waits for nothing, does not end here either.
"""

from tests.support.ptx.launch import emulated
from tests.support.ptx.memory import Fault
from tests.support.ptx.order import Unordered

__all__ = ["Fault", "Unordered", "emulated"]
