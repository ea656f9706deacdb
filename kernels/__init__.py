"""The kernels of latentserve: one folder per family, each with a launcher, a reference and a kernel.

Kept import-light, with a version: transformers probes for a package of this name and reads ``__version__``.
"""

__version__ = "0.1.0"
