"""Tool calls of DeepSeek V3 (0324) and R1 (0528), as their chat templates write them:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
```json
ARGUMENTS
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from typing_extensions import override

from deploy.parsing.call_grammar import AllowedTool, Tag, json_object, name_of, sequence, text
from deploy.parsing.deepseek_calls import DeepSeekCalls


class DeepSeekV3Calls(DeepSeekCalls):
    """Reads one answer."""

    between = "\n"

    @override
    @classmethod
    def one_call(cls, tool: AllowedTool) -> Tag:
        """A call, as `grammar_for` has it."""
        head = (text(f"{cls.call_begin}function{cls.separator}"), name_of(tool), text("\n```json\n"))
        return sequence(*head, json_object(tool), text(f"\n```{cls.call_end}"))
