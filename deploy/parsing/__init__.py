"""Parsing of a model's output: reasoning and tool calls are told from content while the text arrives."""
