"""Tool calls of DeepSeek V3.1, as its chat template writes them:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from deploy.parsing.deepseek_calls import DeepSeekCalls


class DeepSeekV31Calls(DeepSeekCalls):
    """Reads one answer."""
