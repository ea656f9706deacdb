"""Whether what is used of another project's private parts is there, and what it costs where it is not.

Private parts change without notice. Whoever needs some names them in a `PrivateApi`, says what is lost without
them, and asks before the first use. The docstring of such a file says which version it was written for.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any, Final

logger = logging.getLogger("latentserve.private_api")

TESTED: Final = {"triton": ">=3.6,<3.7", "torch": ">=2.11,<2.14", "ray": "==2.60.0", "xgrammar": ">=0.2.8,<0.3"}
"""The versions whose private parts are known here, as pyproject.toml has them."""


class PrivateApiGone(RuntimeError):
    """Error for private parts of another project that have changed; the message says which version to install."""


@dataclass(eq=False)
class PrivateApi:
    """Private parts of a project that one purpose needs."""

    project: str
    """Name of the project for pip."""
    needs: tuple[str, ...]
    """Dotted names; with "(x, y)" behind the name of what is called, if it takes these arguments, in this order."""
    otherwise: str
    """Consequence of their absence, and its cost."""
    _found: bool | None = field(default=None, init=False)
    _told: bool = field(default=False, init=False)

    def there(self) -> bool:
        """Whether all of it is there, looked up once; the first time that it is not, a line is logged."""
        if self._found is None:
            gone = self.missing()
            if gone:
                self.lost(gone)
            self._found = not gone
        return self._found

    def lost(self, what: str) -> None:
        """Log, once, that `what` is not there: for what can only be seen where it is used."""
        if not self._told:
            logger.warning("%s has no %s: %s", self._project(), what, self.otherwise)
        self._told = True

    def require(self) -> None:
        """PrivateApiGone unless all of it is there."""
        if gone := self.missing():
            raise PrivateApiGone(self.problem(gone))

    def problem(self, what: str) -> str:
        """Return the error message where `what` is missing and nothing goes on without it, with advice."""
        advice = f"pip install '{self.project}{TESTED[self.project]}'"
        return f"{self._project()} has no {what}: {self.otherwise}; install a version that was tested (`{advice}`)"

    def missing(self) -> str:
        """The names that cannot be found, with commas between; empty when all can."""
        return ", ".join(name for name in self.needs if not _is_there(name))

    def _project(self) -> str:
        try:
            return f"{self.project} {metadata.version(self.project)}"
        except metadata.PackageNotFoundError:
            return self.project


def lacking(thing: Any, names: Sequence[str]) -> str:
    """The attributes that `thing` does not have, with commas between; empty when it has all."""
    return ", ".join(f"{type(thing).__name__}.{name}" for name in names if not hasattr(thing, name))


def _is_there(name: str) -> bool:
    dotted, _, listed = name.rstrip(")").partition("(")
    try:
        found = _found(dotted)
        parameters = list(inspect.signature(found).parameters) if listed else []
    except (AttributeError, ImportError, TypeError, ValueError):
        return False
    wanted = listed.split(", ") if listed else []
    return [parameter for parameter in parameters if parameter in wanted] == wanted


def _found(dotted: str) -> Any:
    first, *rest = dotted.split(".")
    found, path = import_module(first), first
    for name in rest:
        path = f"{path}.{name}"
        try:
            found = getattr(found, name)
        except AttributeError:
            found = import_module(path)
    return found
