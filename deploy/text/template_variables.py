"""The variables that a chat template reads, and those that no request may set."""

from __future__ import annotations

from functools import lru_cache

from jinja2 import Environment, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

RESERVED_TEMPLATE_NAMES = frozenset(
    (
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    )
)
"""Names that a request's `chat_template_kwargs` must not set."""


class Generation(Extension):
    """transformers' own tag: `{% generation %}` ... `{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012

    @override
    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> Environment:
    """Return an environment in which chat templates compile as in transformers."""
    return ImmutableSandboxedEnvironment(extensions=[loopcontrols, Generation])


@lru_cache(maxsize=16)
def read_variables(template: str) -> frozenset[str]:
    """The variables that `template` reads without setting them; none of one that does not compile."""
    try:
        return frozenset(find_undeclared_variables(environment().parse(template)))
    except TemplateSyntaxError:
        return frozenset()
