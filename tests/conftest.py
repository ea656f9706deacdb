"""Puts this folder on the import path, so that tests can share helpers such as `tiny_models`."""
