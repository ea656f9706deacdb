"""Reads the text of a kernel (NVIDIA, PTX ISA 8.7, syntax) into a list of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_BLANK = re.compile(r"\s*")
_LABEL = re.compile(r"([$\w]+):(?!:)")
_STATEMENT = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)")


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@guard op operands`."""

    text: str
    guard: str
    """The predicate that chooses lanes, or nothing."""
    negated: bool
    parts: tuple[str, ...]
    """The opcode, split at its dots."""
    operands: tuple[str, ...]
    targets: tuple[int, ...]
    """Indices into the code of the places to which it may branch."""


@dataclass(frozen=True)
class Program:
    """One entry of a PTX module."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    """(type, name); a block of bytes, which a descriptor is, has type b8."""
    threads: int
    """Threads a block."""
    code: tuple[Instruction, ...]

    def uses(self, *parts: str) -> bool:
        """Whether an instruction begins with these parts."""
        return any(instruction.parts[: len(parts)] == parts for instruction in self.code)


def split(text: str) -> tuple[str, ...]:
    """The pieces between the commas that are in no brackets."""
    if "{" not in text and "[" not in text:
        return tuple(piece.strip() for piece in text.split(",")) if text else ()
    found, depth, begin = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            found.append(text[begin:i].strip())
            begin = i + 1
    last = text[begin:].strip()
    return (*found, last) if last else tuple(found)


@lru_cache(maxsize=1 << 14)
def inside(vector: str) -> tuple[str, ...]:
    """The pieces in brackets; a piece without brackets is alone."""
    return split(vector[1:-1]) if vector[0] in "{[" else (vector,)


def parse(ptx: str) -> Program:
    """The only entry of a module.

    Raises:
        ValueError: a statement that cannot be read.
    """
    ptx = re.sub(r"//.*|^\s*\.loc\s.*", "", ptx, flags=re.MULTILINE)
    head, _, body = ptx[ptx.index(".entry") :].partition("{")
    name, threads = re.match(r"\.entry\s+(\w+)", head), re.search(r"\.reqntid\s+(\d+)", head)
    if name is None or threads is None:
        raise ValueError(f"no entry with a number of threads: {head}")
    parameters = re.findall(r"\.param\s+(?:\.align \d+ )?\.(\w+)[^,)]*?(\w+_param_\d+)", head)
    return Program(name[1], tuple(parameters), int(threads[1]), _code(body))


def _code(body: str) -> tuple[Instruction, ...]:
    """A label is known within the braces in which it stands: inline assembly has its own."""
    statements: list[tuple[str, list[int]]] = []
    labels: dict[tuple[int, str], int] = {}
    tables: dict[str, tuple[str, ...]] = {}
    scopes, opened, at, last = [0], 0, 0, ""
    while scopes:
        at = _BLANK.match(body, at).end()  # type: ignore[union-attr]
        label = _LABEL.match(body, at)
        if body[at] == "{":
            opened += 1
            scopes.append(opened)
            at += 1
        elif body[at] == "}":
            scopes.pop()
            at += 1
        elif label:
            last = label[1]
            labels[scopes[-1], last] = len(statements)
            at = label.end()
        else:
            end = body.index(";", at)
            text = " ".join(body[at:end].split())
            if text.startswith(".branchtargets"):
                tables[last] = split(text.removeprefix(".branchtargets"))
            elif text and not text.startswith("."):
                statements.append((text, list(scopes)))
            at = end + 1
    return tuple(_instruction(text, scopes, labels, tables) for text, scopes in statements)


def _instruction(
    text: str, scopes: list[int], labels: dict[tuple[int, str], int], tables: dict[str, tuple[str, ...]]
) -> Instruction:
    found = _STATEMENT.fullmatch(text)
    if found is None:
        raise ValueError(f"cannot read {text!r}")
    parts, operands = tuple(found[3].split(".")), split(found[4])
    names = {"bra": operands, "brx": tables.get(operands[-1], ()) if operands else ()}.get(parts[0], ())
    targets = tuple(next(labels[i, name] for i in reversed(scopes) if (i, name) in labels) for name in names)
    return Instruction(text, found[2] or "", bool(found[1]), parts, operands, targets)
