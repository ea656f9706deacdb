"""What every constraint of an answer needs of the model, and the bound of its reasoning."""

from __future__ import annotations

import msgspec

from deploy.api.http.errors import invalid
from deploy.api.job.bodies import ChatBody
from deploy.api.job.reading import Reading
from deploy.parsing.reasoning import CLOSE, OPEN
from deploy.parsing.registry import REASONING_PARSERS
from deploy.text.tokenizer import Tokenizer
from workers.protocol.front import ModelInfo
from workers.protocol.grammar import Grammar


def check_possible(name: str, tokenizer: Tokenizer | None, info: ModelInfo) -> None:
    """400 where no answer of this model can be bound, as the field `name` wants it."""
    why = ""
    if tokenizer is None or not tokenizer.writes_bytes:
        why = "this model has no tokenizer whose tokens are bytes of text"
    elif not info.eos_ids:
        why = "this model has no end-of-sequence id"
    if why:
        raise invalid(f"{name}: {why}, so structured output is not possible", name, "unsupported_parameter")


def problem_of(grammar: Grammar) -> str | None:
    """What is wrong with a constraint. In a thread: the first one loads xgrammar."""
    from workers.grammar.build import GrammarError, build

    try:
        build(grammar)
    except GrammarError as error:
        return str(error)
    return None


def one_token(text: str, tokenizer: Tokenizer, param: str) -> tuple[int, ...]:
    """The id of the token that `text` is; 400 where it is not one, as the field `param` needs it."""
    ids = tokenizer.encode(text[:256], add_special_tokens=False)
    if len(ids) != 1:
        raise invalid(
            f"{param}: {text[:64]!r} must be one token of the model's vocabulary, as the end of reasoning often is; it "
            f"is {len(ids)}",
            param,
        )
    return tuple(ids)


def bounded(
    grammar: Grammar | None, body: ChatBody, reading: Reading | None, tokenizer: Tokenizer | None
) -> Grammar | None:
    """The constraint with the bound of the reasoning that stands before it, `max_reasoning_tokens`."""
    most, name = body.max_reasoning_tokens, "max_reasoning_tokens"
    if most is None:
        return grammar
    if reading is None or reading.reasoning is None or tokenizer is None:
        raise invalid(
            f"{name}: it is not known how this model reasons; leave it out, or start the server with "
            f"--reasoning-parser ({', '.join(REASONING_PARSERS)})",
            name,
        )
    if reading.where == "outside":
        return grammar
    close = one_token(CLOSE, tokenizer, name)
    if reading.where == "inside":
        if grammar is not None and grammar.begin_after != close:
            raise invalid(f"{name}: does not go with guided_begin_after", name, "conflicting_parameters")
        bound = grammar or Grammar("free", begin_after=close, begun_by=also_begun_by(reading, tokenizer))
        return msgspec.structs.replace(bound, most_before=most)
    if grammar is not None:
        raise invalid(
            f"{name}: this model decides itself whether to reason, and does not where its answer is bound to a form or "
            "to strict tools: leave it out",
            name,
            "conflicting_parameters",
        )
    begun_by = also_begun_by(reading, tokenizer)
    opened_by = one_token(OPEN, tokenizer, name)
    return Grammar("free", begin_after=close, begun_by=begun_by, most_before=most, opened_by=opened_by)


def also_begun_by(reading: Reading, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token that ends reasoning without its closing tag, and begins calls, if the model has one."""
    marker = reading.reasoning.also_closed_by if reading.reasoning is not None else None
    if marker is None or reading.calls is None:
        return ()
    ids = tokenizer.encode(marker, add_special_tokens=False)
    return tuple(ids) if len(ids) == 1 else ()
