"""Events that parsers find in a model's text, in the order in which it was written."""

from __future__ import annotations

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Next part of the answer itself."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Next part of what the model thinks before it answers."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """A tool call begins."""

    index: int
    """Counts the calls of an answer from 0."""
    id: str
    """Id under which the tool's result is sent back."""
    name: str


class Arguments(msgspec.Struct, frozen=True):
    """Next part of a call's arguments. All parts together are the text of one JSON object once the call has ended."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """A call is complete."""

    index: int


class CallBroken(msgspec.Struct, frozen=True):
    """A call that began turned out to be none. Its text comes next, as content."""

    index: int


Event = Content | Reasoning | CallBegin | Arguments | CallEnd | CallBroken
