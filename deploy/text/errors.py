"""Errors in a chat."""

from __future__ import annotations


class ChatTemplateError(Exception):
    """The messages do not fit the chat template, or there is none; the text says why."""


class ToolsUnknown(ChatTemplateError):
    """The chat template would leave tools, or what was done with them, out without a word. The text names
    them."""
