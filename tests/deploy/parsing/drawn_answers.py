"""Answers as models write them when they do not keep to the form: the canonical answer with one to three deviations
that were reported of these models, the calls that were meant, and the words around them.

Every deviation leaves no doubt what was meant. Which ones are drawn together is up to a seed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from written_calls import TOOLS, Calls, dumps

OUTPUTS = 450
"""Answers of each format."""
REASONING = {
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "kimi_k2": "kimi_k2",
    "glm": "glm",
    "hermes": "deepseek_v3",
    "mistral": "mistral",
}


@dataclass
class Drawn:
    """An answer and what is to be found in it."""

    name: str
    kinds: frozenset[str]
    text: str = ""
    calls: Calls = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    """All of the content but white space, as far as it can be foretold."""
    thought: str | None = None
    """The reasoning that the answer begins with; None: it is read without."""
    cut: bool = False
    """The last call is cut: something of it is content."""


def drawn_answers(name: str, count: int = OUTPUTS) -> Iterator[Drawn]:
    """The answers of a format, always the same ones."""
    for seed in range(count):
        yield Writer(name, random.Random(f"{name} {seed}")).answer()


EVERYWHERE = ["words before", "words between", "words behind", "reasoning", "cut", "stray ends"]
JSON = [
    "no section begin", "no section end", "no section", "no call end", "no last call end", "two section begins",
    "two call begins", "two separators", "two call ends", "space around heads", "newlines", "other fence", "indented",
    "empty section", "a section each", "no call begin", "no separator", "other head", *(LOOSE := [
        "python spelling", "commas too many", "commas missing", "comments", "bare keys", "braces too many",
        "brackets missing", "a string of JSON", "in an array", "odd escapes", "three marks", "marks within",
        "other separators",
    ]),
]  # fmt: skip
TAGGED = [
    "newlines", "no call end", "no last call end", "body", "fenced body", "python values", "space around names",
    "words between arguments", "two call begins", "no last value end",
]  # fmt: skip
KINDS = {
    "deepseek_v3": [*JSON, *EVERYWHERE, "as python", "spelled out"],
    "deepseek_v31": [*JSON, *EVERYWHERE, "as python", "spelled out"],
    "kimi_k2": [*JSON, *EVERYWHERE, "as python", "singular", "other head", "other head"],
    "glm": [
        *TAGGED, *EVERYWHERE, "as python", "two key begins", "two value begins", "no key begin", "call begin for key",
        "no key end", "no value begin", "stray value end",
    ],
    "hermes": [
        *EVERYWHERE, "newlines", "no call end", "no last call end", "two call begins", "two call ends", "other fence",
        "indented", "other order", "no brace", "as python", *LOOSE,
    ],
    "mistral": [
        *EVERYWHERE, "newlines", "two call begins", "two separators", "no separator", "space around heads", "indented",
        "other fence", "own ids", "as python", *(kind for kind in LOOSE if kind != "brackets missing"),
    ],
    "deepseek_v32": [
        *TAGGED, *EVERYWHERE, "no section begin", "no section end", "no section", "other section", "two section begins",
        "empty section", "a section each", "no string", "other attributes", "closed tag", "bare parameters",
        "other bars", "two value begins",
    ],
}  # fmt: skip
APART = [
    {"no section begin", "no section", "no call begin"},
    {"no section begin", "no section", "empty section", "a section each", "two section begins"},
    {"no call begin", "two call begins", "no separator"},
    {"no separator", "two separators"},
    {"no separator", "other head"},
    {"no call begin", "space around heads"},
    {"no call end", "two call ends", "no last call end", "no last value end"},
    {"cut", "python values", "no last call end", "no last value end", "words behind", "body", "fenced body",
     "no call end", "stray ends"},
    {"newlines", "no last value end"},
    {"no last call end", "no last value end", "words behind", "stray ends", "reasoning"},
    {"body", "fenced body", "python values", "words between arguments", "no last value end", "no string",
     "bare parameters", "closed tag", "no key begin", "call begin for key", "no key end", "no value begin",
     "two value begins", "two key begins", "other attributes"},
    {"other bars", "no last value end"},
    {"no value begin", "no last value end"},
    {"two call begins", "call begin for key", "no call end"},
    {"space around names", "no key begin", "call begin for key"},
    {"no brace", "other order", "cut", "no call end", "no last call end", "other fence"},
    {"other order", "cut"},
    {*LOOSE, "cut", "indented", "no separator", "no brace", "other order"},
    {"brackets missing", "no call end", "no last call end"},
    {"a string of JSON", "in an array", "other fence"},
    *({"as python", kind} for kind in (
        *LOOSE, *TAGGED, "cut", "indented", "other fence", "other order", "no brace", "own ids", "other head",
        "no call begin", "no separator", "two separators", "space around heads", "two key begins", "two value begins",
        "no key begin", "call begin for key", "no key end", "no value begin", "stray value end",
    )),
]  # fmt: skip
"""Sets of which an answer has one member at most: together they would leave it open what was meant."""

WORDS = ["Sure.", "Then", "the", "rest:", "東京", "a<b", "{ok}", "`x`", "next,"]


class Writer:
    """Writes one answer. Without deviations it is the canonical one."""

    def __init__(self, name: str, draw: random.Random, kinds: frozenset[str] | None = None) -> None:
        self.name, self.draw = name, draw
        self.drawn = Drawn(name, self.kinds() if kinds is None else kinds)

    def has(self, kind: str) -> bool:
        return kind in self.drawn.kinds

    def kinds(self) -> frozenset[str]:
        """One to three that go together."""
        chosen: set[str] = set()
        for kind in self.draw.sample(KINDS[self.name], k=self.draw.choice([1, 2, 2, 3])):
            if not any(kind in apart and apart & chosen for apart in APART):
                chosen.add(kind)
        return frozenset(chosen)

    def answer(self) -> Drawn:
        drawn = self.drawn
        calls = [self.call() for _ in range(self.draw.choice([1, 1, 2, 3]))]
        if calls[-1][0] == "now" and drawn.kinds & {"cut", "python values", "no last call end", "no last value end"}:
            calls[-1] = ("get_weather", {"city": "Oslo"})
        if self.has("no call begin"):
            calls = [(name, arguments) for name, arguments in calls if arguments] or [("get_weather", {"city": "Oslo"})]
        thought = "I look: "
        text = self.said("words before") if not self.has("reasoning") else ""
        text += self.write(calls)
        drawn.calls = calls
        if self.has("cut"):
            text = text[: self.cut_at(text, calls[-1])]
            drawn.calls, drawn.cut = calls[:-1], True
        if self.has("stray ends"):
            text += self.said() + self.stray() + self.said()
        if self.has("reasoning"):
            drawn.thought = thought.strip()
            close = "[/THINK]" if self.name == "mistral" else "</think>"
            closing = "" if self.has("cut") else self.draw.choice(["", close, f"\n{close}\n\n", f"{close}\n"])
            text = thought + text + closing
        text += self.said("words behind")
        drawn.text = text
        return drawn

    def write(self, calls: Calls) -> str:
        """All calls."""
        text = self.written(calls)
        if self.has("spelled out"):
            bar, blank = self.either("｜", "|"), self.either("_", " ", "▁")
            text = re.sub(r"<｜[^>]*｜>", lambda mark: mark.group().replace("｜", bar).replace("▁", blank), text)
        return text

    def as_python(self, name: str, arguments: dict[str, Any]) -> str:
        """A call as Python writes it."""
        space = self.either("", " ", "\n  ")
        call = f"{name}({space}{f', {space}'.join(f'{key}={value!r}' for key, value in arguments.items())})"
        return self.either(call, f"[{call}]") if arguments else f"[{call}]"

    def written(self, calls: Calls) -> str:
        if self.name in OBJECTS:
            return OBJECTS[self.name](self).write(calls)
        if self.name == "glm":
            return Glm(self).write(calls)
        return DeepSeekV32(self).write(calls) if self.name == "deepseek_v32" else JsonFormat(self).write(calls)

    def call(self) -> tuple[str, dict[str, Any]]:
        draw = self.draw
        if draw.random() < 0.2:
            return "now", {}
        arguments: dict[str, Any] = {
            "city": draw.choice(["Paris", 'a "quoted" \\ word', "東京, 23", "5", "two\nlines"])
        }
        for key, choices in {
            "days": [3, -1, 10],
            "unit": ["C", "F"],
            "exact": [True, False, None],
            "places": [[{"a": None}], []],
            "note": ["a note", None],
            "free": [[1, 2.5], {"deep": {"er": ["x"]}}],
        }.items():
            if draw.random() < 0.35:
                arguments[key] = draw.choice(choices)
        return "get_weather", arguments

    def said(self, kind: str = "") -> str:
        """Words, if the answer has them here."""
        if kind and not self.has(kind):
            return ""
        words = self.draw.sample(WORDS, k=self.draw.choice([1, 2, 3]))
        self.drawn.words += words
        return self.draw.choice([" ", "\n"]) + " ".join(words) + self.draw.choice([" ", "\n\n"])

    def stray(self) -> str:
        """Markers that end nothing."""
        return self.draw.choice(
            {
                "glm": ["</tool_call>", "</arg_value>", "</arg_key>"],
                "deepseek_v32": ["</｜DSML｜function_calls>", "</｜DSML｜invoke>", "</｜DSML｜parameter>"],
                "kimi_k2": ["<|tool_call_end|>", "<|tool_calls_section_end|>"],
                "hermes": ["</tool_call>"],
                "mistral": ["[ARGS]", "[CALL_ID]"],
            }.get(self.name, ["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"])
        )

    def cut_at(self, text: str, last: tuple[str, dict[str, Any]]) -> int:
        """A place within the last value of the last call, before its end."""
        _, arguments = last
        if self.name in ("glm", "deepseek_v32"):
            value = list(arguments.values())[-1]
            written = value if isinstance(value, str) else dumps(value)
            place = text.rindex(written)
            return place + self.draw.randrange(1, len(written) + 1)
        begin = text.rindex("{", 0, text.rindex('"city"'))
        end = text.rindex("}")
        end = text.rindex("}", 0, end) if self.name == "hermes" else end
        return begin + self.draw.randrange(1, end - begin + 1)

    def either(self, *options: str) -> str:
        return self.draw.choice(options)


class JsonFormat:
    """DeepSeek V3, V3.1 and Kimi K2."""

    def __init__(self, writer: Writer) -> None:
        self.writer, self.draw, self.has = writer, writer.draw, writer.has
        if writer.name in OBJECTS:
            return
        if writer.name == "kimi_k2":
            plural = "call" if self.has("singular") else "calls"
            self.section = (f"<|tool_{plural}_section_begin|>", f"<|tool_{plural}_section_end|>")
            self.marks = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
        else:
            self.section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
            self.marks = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")

    def space(self, kind: str = "newlines") -> str:
        return self.draw.choice(["\n", " ", "", "\n\n"]) if self.has(kind) else ""

    def write(self, calls: Calls) -> str:
        begin, end = self.section
        begin = "" if self.has("no section") or self.has("no section begin") else begin
        begin = begin * 2 if self.has("two section begins") else begin
        end = "" if self.has("no section") or self.has("no section end") or self.has("no last call end") else end
        empty = begin + self.space() + self.section[1] if self.has("empty section") else ""
        between = "\n" if self.writer.name == "deepseek_v3" else ""
        between = end + begin if self.has("a section each") else between
        texts = []
        for index, call in enumerate(calls):
            texts.append(self.one(index, *call, index == len(calls) - 1))
            if index < len(calls) - 1:
                texts.append(self.space() + (self.writer.said("words between") or between) + self.space())
                if self.has("a section each") and self.has("words between"):
                    texts.append(end + begin)
        return empty + begin + self.space() + "".join(texts) + self.space() + end

    def one(self, index: int, name: str, arguments: dict[str, Any], last: bool) -> str:
        begin, separator, end = self.marks
        begin = "" if self.has("no call begin") else begin * 2 if self.has("two call begins") else begin
        separator = "" if self.has("no separator") else separator * 2 if self.has("two separators") else separator
        if self.has("no call end") or (last and self.has("no last call end")):
            end = ""
        end = end * 2 if self.has("two call ends") else end
        if self.has("as python"):
            return begin + self.space() + self.writer.as_python(name, arguments) + self.space() + end
        space = self.space("space around heads")
        body = self.body(arguments)
        head = self.head(index, name)
        if self.writer.name == "kimi_k2":
            return begin + space + head + space + separator + self.space() + self.fenced(body, False) + end
        fenced = self.fenced(body, self.writer.name == "deepseek_v3")
        first, second = head.split("|") if "|" in head else ("", head)
        if not first:
            break_ = "" if separator or self.has("no separator") else "\n"
            return begin + space + second + space + separator + break_ + self.space() + fenced + end
        if self.has("no separator"):
            return f"{begin}{space}{second}{space}\n{fenced}{end}"
        return f"{begin}{space}{first}{space}{separator}{space}{second}{space}\n{fenced}{end}"

    def body(self, arguments: dict[str, Any]) -> str:
        """The arguments as the model spells them."""
        if self.has("python spelling"):
            return repr(arguments)
        body = json.dumps(arguments, ensure_ascii=False, indent=2 if self.has("indented") else None)
        inner = body[1:-1]
        if self.has("commas too many") and inner:
            body = self.draw.choice([f"{{{inner},}}", f"{{{inner} ,\n}}", f"{{,{inner},,}}"])
        if self.has("commas missing"):
            body = "{" + " ".join(f"{dumps(key)}: {dumps(value)}" for key, value in arguments.items()) + "}"
        if self.has("comments"):
            body = self.draw.choice(
                [f"{{ // one, }}\n{inner}}}", f"{{{inner} /* }} * / **/}}", f"{{/**/{inner}// x\n}}"]
            )
        if self.has("three marks") and "city" in arguments:
            bare = dumps(arguments["city"])[1:-1].replace('\\"', '"').replace("\\n", "\n")
            body = body.replace(dumps(arguments["city"]), f'"""{bare}"""', 1)
        if self.has("marks within") and "city" in arguments:
            body = body.replace(dumps(arguments["city"]), dumps(arguments["city"]).replace('\\"', '"'), 1)
        if self.has("other separators"):
            between, of = self.draw.choice([("; ", ": "), (", ", " => "), ("; ", " = ")])
            body = "{" + between.join(f"{dumps(key)}{of}{dumps(value)}" for key, value in arguments.items()) + "}"
        if self.has("bare keys"):
            body = "{" + ", ".join(f"{key}: {dumps(value)}" for key, value in arguments.items()) + "}"
        if self.has("braces too many"):
            body = self.draw.choice([f"{body}}}", f"{body}\n}}", f"{{{body}}}", f"{body} }} }}"])
        if self.has("brackets missing"):
            body = body[:-1].removesuffix("]")
        if self.has("a string of JSON"):
            body = dumps(body)
        if self.has("in an array"):
            body = self.draw.choice([f"[{body}]", f"[\n{body}\n]"] + (["[]", "null", '""'] if not arguments else []))
        if self.has("odd escapes"):
            body = body.replace("Paris", "\\Paris").replace("two", "\\'two")
            arguments.update(
                {k: v.replace("Paris", "\\Paris").replace("two", "'two") for k, v in arguments.items() if k == "city"}
            )
        return body

    def head(self, index: int, name: str) -> str:
        """Write what stands before the arguments; in V3's form its two parts."""
        if self.writer.name == "kimi_k2":
            if not self.has("other head"):
                return f"functions.{name}:{index}"
            heads = [
                f"{name}:{index}", name, f"functions.{name}", f"functions{name}{index}", f"functions.{name}.{index}",
                f"functions_{name}_{index}", f"tools.{name}:{index}", f"function.{name}:{index}", f"{name}.{index}",
                f"functions.{name}{index}", f"functions:{name}:{index}", f"multi_tool_use.{name}:{index}",
            ]  # fmt: skip
            if not self.has("no call begin"):
                heads += [f"functions.\n{name}:{index}", f" functions . {name} : {index} "]
                heads += [str(index), "call_0a1B2c"] if name == "get_weather" else []
            return self.draw.choice(heads)
        two = (self.writer.name == "deepseek_v3") != self.has("other head")
        return (
            f"{self.draw.choice(['function', 'function', 'tool']) if self.has('other head') else 'function'}|{name}"
            if two
            else name
        )

    def fenced(self, body: str, usual: bool) -> str:
        fenced = f"```json\n{body}\n```"
        if not self.has("other fence"):
            return fenced if usual else body
        others = [f"```\n{body}\n```", f"``` json\n{body}\n```", f"```json {body}```", f"```JSON\n\n{body}\n\n```\n"]
        others += [body, f"{body}\n```", f"```json\n{body}\n"] if usual else [fenced]
        return self.draw.choice(others)


class Hermes(JsonFormat):
    """Youtu-LLM."""

    def write(self, calls: Calls) -> str:
        texts = []
        for index, call in enumerate(calls):
            texts.append((self.writer.said("words between") or "\n" + self.space()) if index else "")
            texts.append(self.one(index, *call, index == len(calls) - 1))
        return "".join(texts)

    def one(self, index: int, name: str, arguments: dict[str, Any], last: bool) -> str:
        begin = "<tool_call>" * (2 if self.has("two call begins") else 1)
        end = "</tool_call>" * (2 if self.has("two call ends") else 1)
        if self.has("no call end") or (last and self.has("no last call end")):
            end = ""
        if self.has("as python"):
            return f"{begin}\n{self.writer.as_python(name, arguments)}\n{end}"
        call = {"name": name, "arguments": arguments}
        if self.has("other order"):
            call = self.draw.choice([{"arguments": arguments, "name": name}, {"id": 1, **call}, {**call, "id": "x"}])
        body = json.dumps(call, ensure_ascii=False, indent=2 if self.has("indented") else None)
        if not self.has("other order"):
            body = (
                f'{{"name": {dumps(name)}, "arguments": {self.body(arguments)}}}' if not self.has("indented") else body
            )
        body = body[:-1].rstrip() if self.has("no brace") else body
        return f"{begin}{self.space()}\n{self.fenced(body, False)}{self.space()}\n{end}"


class Mistral(JsonFormat):
    """Mistral Small 4 and Mistral Large 3."""

    def write(self, calls: Calls) -> str:
        texts = []
        for index, call in enumerate(calls):
            texts.append((self.writer.said("words between") or self.space()) if index else "")
            texts.append(self.one(index, *call, index == len(calls) - 1))
        return "".join(texts)

    def one(self, index: int, name: str, arguments: dict[str, Any], last: bool) -> str:
        begin = "[TOOL_CALLS]" * (2 if self.has("two call begins") else 1)
        if self.has("as python"):
            return begin + self.writer.as_python(name, arguments)
        separator = "" if self.has("no separator") else "[ARGS]" * (2 if self.has("two separators") else 1)
        if self.has("own ids"):
            separator = f"[CALL_ID]{self.draw.choice(['aB3dE6g', 'no id', 'x'])}{index:02}{separator}"
        body = self.body(arguments)
        space = self.space("space around heads")
        return begin + space + name + space + separator + self.space() + self.fenced(body, False)


OBJECTS: dict[str, type[JsonFormat]] = {"hermes": Hermes, "mistral": Mistral}
PYTHON = {True: "True", False: "False", None: "None"}


class Glm:
    """GLM-4.5 to GLM-5."""

    def __init__(self, writer: Writer) -> None:
        self.writer, self.draw, self.has = writer, writer.draw, writer.has

    def space(self, kind: str = "newlines") -> str:
        return self.draw.choice(["\n", " ", "", "\n\n"]) if self.has(kind) else ""

    def write(self, calls: Calls) -> str:
        text = ""
        for index, call in enumerate(calls):
            text += self.space() + self.writer.said("words between") + self.space() if index else ""
            text += self.one(*call, index == len(calls) - 1)
        return text

    def one(self, name: str, arguments: dict[str, Any], last: bool) -> str:
        begin, end = "<tool_call>" * (2 if self.has("two call begins") else 1), "</tool_call>"
        ends_itself = bool(arguments) or (not last and not self.has("words between"))
        if (self.has("no call end") or (last and self.has("no last call end"))) and ends_itself:
            end = ""
        if self.has("no call end") and last and self.has("stray ends"):
            end = "</tool_call>"
        if self.has("as python"):
            return begin + self.space() + self.writer.as_python(name, arguments) + self.space() + end
        body = dumps(arguments)
        text = begin + self.space("space around names") + name + self.space("space around names")
        if self.has("body") and arguments:
            return f"{text}\n{body}\n{end}"
        if self.has("fenced body") and arguments:
            return f"{text}\n```json\n{body}\n```{end}"
        text += self.space()
        odd = self.draw.randrange(len(arguments)) if arguments else 0
        for place, (key, value) in enumerate(arguments.items()):
            text += self.argument(key, value, place == odd, not place, last and place == len(arguments) - 1)
            if place < len(arguments) - 1:
                text += self.writer.said("words between arguments")
        text += "</arg_value>" if self.has("stray value end") else ""
        return text + self.space() + end

    def argument(self, key: str, value: Any, odd: bool, first: bool, last: bool) -> str:
        """`odd`: it has the deviations of arguments."""
        key_begin, key_end, value_begin, value_end = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
        text = value if isinstance(value, str) else dumps(value)
        if self.has("python values") and not isinstance(value, str):
            text = f"{value}.0" if key == "days" else repr(value)
        if odd:
            key_begin *= 2 if self.has("two key begins") else 1
            value_begin *= 2 if self.has("two value begins") else 1
            if self.has("no key begin") and not self.has("words between arguments"):
                key_begin = ""
            if self.has("no key end"):
                key_end = ""
            elif self.has("no value begin") and not self.has("two value begins"):
                value_begin = ""
        if self.has("call begin for key") and first:
            key_begin = "<tool_call>"
        if last and self.has("no last value end") and value_begin:
            value_end = ""
        space = self.space("space around names")
        between = self.space() if value_begin else ""
        return f"{key_begin}{space}{key}{space}{key_end}{between}{value_begin}{text}{value_end}{self.space()}"


class DeepSeekV32(Glm):
    """DeepSeek V3.2."""

    def __init__(self, writer: Writer) -> None:
        super().__init__(writer)
        self.bars = "｜DSML｜"
        if self.has("other bars"):
            self.bars = writer.either("｜｜DSML｜｜", "|DSML|")

    def write(self, calls: Calls) -> str:
        section = self.writer.either("tool_calls", "function_calls") if self.has("other section") else "function_calls"
        begin, end = f"<{self.bars}{section}>\n", f"</{self.bars}{section}>"
        empty = begin + end + "\n" if self.has("empty section") else ""
        if self.has("other section"):
            end = f"</{self.bars}{self.writer.either('tool_calls', 'function_calls')}>"
        begin = "" if self.has("no section") or self.has("no section begin") else begin
        begin *= 2 if self.has("two section begins") else 1
        bare_end = self.has("no section") or self.has("no section end") or self.has("no last call end")
        end = "" if bare_end else end
        texts = []
        for index, call in enumerate(calls):
            last = index == len(calls) - 1
            texts.append(self.one(*call, last))
            if not last:
                texts.append(end + begin if self.has("a section each") else "")
                texts.append(self.writer.said("words between"))
        return empty + begin + self.space() + "".join(texts) + end

    def one(self, name: str, arguments: dict[str, Any], last: bool) -> str:
        line = "" if self.has("newlines") and self.draw.random() < 0.5 else "\n"
        space = self.draw.choice([" ", "\n"]) if self.has("space around names") else ""
        begin, end = f'<{self.bars}invoke name="{space}{name}{space}">{line}', f"</{self.bars}invoke>{line}"
        if not arguments and self.has("closed tag"):
            return begin.rstrip("\n")[:-1] + self.writer.either("/>", " />") + line
        if self.has("two call begins"):
            begin = begin.removesuffix("\n") + (begin if arguments else begin.removesuffix("\n"))
        open_ends = self.has("no section") or self.has("no section end") or self.has("no last call end")
        ends_itself = bool(arguments) or (not last and not self.has("words between")) or (last and not open_ends)
        if self.has("a section each") or self.has("stray ends"):
            ends_itself = ends_itself and bool(arguments)
        if (self.has("no call end") or (last and self.has("no last call end"))) and ends_itself:
            end = ""
        if self.has("body") and arguments:
            return f"{begin}{dumps(arguments)}\n{end}"
        if self.has("fenced body") and arguments:
            return f"{begin}```json\n{dumps(arguments)}\n```\n{end}"
        text = begin
        for place, (key, value) in enumerate(arguments.items()):
            text += self.parameter(key, value, line, last and place == len(arguments) - 1)
            if place < len(arguments) - 1:
                text += self.writer.said("words between arguments")
        return text + self.space() + end

    def parameter(self, key: str, value: Any, line: str, last: bool) -> str:
        string = dumps(isinstance(value, str))
        text = value if isinstance(value, str) else dumps(value)
        if self.has("python values") and not isinstance(value, str):
            text = f"{value}.0" if key == "days" else repr(value)
        attributes = f'name="{key}" string="{string}"'
        if self.has("no string"):
            attributes = f'name="{key}"'
        elif self.has("other attributes"):
            attributes = self.writer.either(
                f'string="{string}" name="{key}"',
                f"name='{key}' string='{string}'",
                f'name = "{key}" string = {string}',
            )
        bars = "" if self.has("bare parameters") and self.draw.random() < 0.7 else self.bars
        begin = f"<{bars}parameter {attributes}>" * (2 if self.has("two value begins") else 1)
        end = f"</{bars if self.draw.random() < 0.5 else self.bars}parameter>"
        if last and self.has("no last value end") and bars:
            end = ""
        return begin + text + end + line


assert set(KINDS) == set(REASONING)
assert TOOLS.keys() == {"get_weather", "now"}
