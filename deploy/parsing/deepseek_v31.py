"""Tool calls of DeepSeek V3.1, as its chat template writes them:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from deploy.parsing.json_calls import JsonCalls


class DeepSeekV31Calls(JsonCalls):
    """Of one answer."""

    section_begin = "<｜tool▁calls▁begin｜>"
    section_end = "<｜tool▁calls▁end｜>"
    call_begin = "<｜tool▁call▁begin｜>"
    call_end = "<｜tool▁call▁end｜>"
    separator = "<｜tool▁sep｜>"
    markers = (section_begin, section_end, call_begin, call_end, separator)
