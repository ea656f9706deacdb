"""Families of models, a file each; `workers.models.registry` lists them."""
