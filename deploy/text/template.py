"""Chat templates before they are used."""

from __future__ import annotations

from jinja2 import Environment, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser


class _Generation(Extension):
    """transformers' own tag: `{% generation %}` ... `{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        """See jinja2."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def syntax_problem(template: str) -> str | None:
    """Why `template` is no Jinja as transformers reads it, None where it is: templates that do not compile would refuse
    every chat as if its messages were wrong."""
    try:
        Environment(extensions=[loopcontrols, _Generation]).compile(template)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return None
