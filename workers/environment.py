"""Checks of the installation that have to come before anything else starts."""

from __future__ import annotations

from importlib import metadata


class EnvironmentProblem(RuntimeError):
    """The installation cannot run latentserve; the message says what to do."""


def check_environment() -> None:
    """Raises EnvironmentProblem if another distribution claims one of our package names.

    The Hugging Face package `kernels` installs an import package of the same name: whichever was installed last would
    win, and transformers probes for it.
    """
    try:
        found = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    raise EnvironmentProblem(
        f"the distribution `kernels` {found} is installed and hides latentserve's package of the same name; "
        "run `pip uninstall kernels`, then reinstall latentserve"
    )
