"""Structured output: grammars are compiled beside the steps, and rank 0 fills masks with what they allow.

xgrammar does both. It imports torch, so neither the scheduler nor a router may import this room.
"""
