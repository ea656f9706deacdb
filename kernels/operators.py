"""To see every operator of torch that a piece of code calls."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that leaves torch's compiler alone.

    Torch would keep the compiler from following it into a mode, and import it for that, which takes seconds. Here
    nothing is compiled by torch.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
