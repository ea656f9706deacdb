"""From a chat's fields to its prompt text, for replicas, which check the fields first, and routers, which do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.text.effort import Thinking
from deploy.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatPrompts:
    """How the chats of an application are written."""

    tokenizer: Tokenizer
    template: str | None = None
    """The chat template of the settings, which replaces the model folder's."""
    control_tokens_in_text: bool = False

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        thinking: Thinking,
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """The prompt text of a chat; see `Tokenizer.render_chat`. `variables`: the request's `chat_template_kwargs`,
        which have the last word on how the model is to think."""
        told = self.tokenizer.thinking_variables(thinking, self.template, bool(tools))
        return self.tokenizer.render_chat(
            messages,
            tools=tools,
            template=self.template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            extra={**told, **variables},
            control_tokens_in_text=self.control_tokens_in_text,
        )
