"""Chat templates before they are used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import TemplateError, TemplateSyntaxError

from deploy.text.chat import ChatTemplateError, template_message
from deploy.text.template_variables import environment
from workers.vocabulary.folder import PROCESSOR_TEMPLATE

if TYPE_CHECKING:
    from deploy.text.tokenizer import Tokenizer

_USER = template_message("user", "Hello")
PROBES = (
    (_USER,),
    (template_message("system", "Be brief."), _USER),
    (_USER, template_message("assistant", "Hello!"), _USER),
)
"""Conversations that a template must be able to write, or refuse by its own words."""


def syntax_problem(template: str) -> str | None:
    """Return why `template` is no Jinja as transformers reads it; None if it is. Templates that do not compile would
    refuse every chat as if its messages were wrong."""
    try:
        environment().compile(template)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return None


def check_template(tokenizer: Tokenizer, folder: Path, template: str | None) -> None:
    """ValueError for a chat template that cannot write the simplest chats: clients would be told that their messages
    are wrong. A template that refuses one of them itself (`raise_exception`) is a good one; so is none at all.

    `template`: the one of the settings, which replaces that of the model's `folder`.
    """
    for messages in PROBES:
        try:
            tokenizer.render_chat(messages, template=template)
        except ChatTemplateError as error:
            cause = error.__cause__
            # Exactly this class is what raise_exception raises; jinja's own errors are its subclasses.
            if cause is None or type(cause) is TemplateError:
                continue
            where = f"line {cause.lineno}: " if isinstance(cause, TemplateSyntaxError) else ""
            source = template_file(folder) if template is None else "given as api.chat_template"
            roles = " and ".join(dict.fromkeys(message["role"] for message in messages))
            raise ValueError(
                f"the chat template {source} cannot write a chat of {roles}: {where}{cause}; correct it, or give "
                "another as api.chat_template"
            ) from error


def why_no_chat(tokenizer: Tokenizer | None, folder: Path, template: str | None) -> str | None:
    """Return why every chat is refused, and what to do; None where chats can be written. `template`: that of the
    settings."""
    if tokenizer is None:
        return f"chats are refused: {folder} has no tokenizer"
    if template is None and not tokenizer.has_chat_template:
        return f"chats are refused: {folder} has no chat template; name a file that holds one with --chat-template"
    return None


def template_file(folder: Path) -> str:
    """Return the place of a model folder's chat template, in words that follow `the chat template`."""
    inline = folder / "tokenizer_config.json"
    files = [folder / "chat_template.jinja", inline]
    if inline.is_file() and '"chat_template"' not in inline.read_text("utf-8"):
        files[-1:] = [folder / PROCESSOR_TEMPLATE, inline]
    return f"in {next((file for file in files if file.is_file()), folder)}"
