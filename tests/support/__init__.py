"""Helpers for the tests of Triton and Gluon kernels on a machine without a GPU: a repaired interpreter, and a
compiler."""
