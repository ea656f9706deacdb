"""Weights: from a checkpoint's files to this rank's memory."""
