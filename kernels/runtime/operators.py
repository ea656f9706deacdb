"""A mode that sees every operator of torch that a piece of code calls.

Written for torch 2.11 to 2.13, whose dispatch modes are private. Without them a mode sees nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from kernels.private_api import PrivateApi

WATCHING: Final = PrivateApi(
    "torch",
    ("torch.utils._python_dispatch.TorchDispatchMode",),
    "operators are not watched, so an allocation while a graph is captured is not noticed, and every layer launches "
    "its kernels for itself, which takes the host several times as long",
)

if TYPE_CHECKING or WATCHING.there():
    from torch.utils._python_dispatch import TorchDispatchMode
else:

    class TorchDispatchMode:
        """Substitute for torch's class, where that is missing."""

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            pass


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that leaves torch's compiler alone.

    Torch would keep the compiler from following it into a mode, and import it for that, which takes seconds. Here
    nothing is compiled by torch.
    """

    @override
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
