"""A chat's messages as its template gets them. Routers and replicas share this: equal chats must give equal prompts."""

from __future__ import annotations

from typing import Final

MOST_MESSAGES: Final = 8192
"""Of a chat. Each is looked at by itself, and a body has room for hundreds of thousands of empty ones."""
MOST_TEMPLATE_VARIABLES: Final = 256
"""Of a chat. The template's engine handles each by itself, several times."""


def template_message(role: str, content: str) -> dict[str, str]:
    """One message. Models know OpenAI's newer role `developer` under its older name."""
    return {"role": "system" if role == "developer" else role, "content": content}


def joined(texts: list[str]) -> str:
    """The content of a message that came as several parts of text."""
    return "\n".join(texts)
