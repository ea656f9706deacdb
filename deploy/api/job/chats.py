"""From a chat to what is to be generated; endpoints of other shapes make a chat of their bodies first."""

from __future__ import annotations

from dataclasses import replace

from deploy.api.http.intake import Incoming
from deploy.api.job.bodies import ChatBody
from deploy.api.job.constraint import requested_grammar
from deploy.api.job.job import Job, Prompt, build_job, check_limits, encode
from deploy.api.job.prompts import needs_tokenizer, render_messages
from deploy.api.limits.front import Front


async def chat_job(front: Front, body: ChatBody, incoming: Incoming) -> Job:
    """What a chat asks of the engine; 400 for what cannot be, 429 where there is no room."""
    info = front.info()
    check_limits(body, front.tokenizer, front.config)
    front.check_size(1, body.n)
    front.check_room(1)
    text = await incoming.work(render_messages, front, body)
    tokenizer = needs_tokenizer(front, "messages")
    [ids] = await encode([text], body.add_special_tokens, tokenizer, info, "messages")
    reading = front.reader.reading(body, text)
    grammar = await requested_grammar(body, tokenizer, info, reading)
    job = await incoming.work(build_job, body, [Prompt(ids, text)], info, tokenizer, front.config, grammar)
    return replace(job, reading=reading)
