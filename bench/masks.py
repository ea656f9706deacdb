"""Time that rank 0 takes for the masks of a step: what `ConstrainedRows` does between two steps, without a model.

    python bench/masks.py                                  # 32 rows of width 3, a vocabulary of 129,280 ids
    python bench/masks.py --rows 8 --width 1 --kinds text,limited
    python bench/masks.py --kinds text,limited --rules     # with what automata are for
    python bench/masks.py --kinds plain,patch              # a grammar in Lark's syntax beside a schema

The vocabulary is made up: single bytes, words with a space before them and without, digits, pieces of JSON. Every row
writes a text of its own, drawn beforehand, of a few dozen to some hundred tokens; a draft is the text's next token with
a probability of `--accepted`, else any token. A step is timed as it happens: the tokens that were gained are accepted,
then all masks are filled. Of a step are printed the median and the 99th percentile by the clock; the processor's time
of all threads, and of the thread that asked, which is what holds up launching; and how many masks it had. Of each
grammar, how long it took to compile.

With `--rules` xgrammar follows expressions and lengths of strings by rules, as it does where it has no automaton that
is right (`workers/grammar/quick.py`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tokenizers import AddedToken, Tokenizer, decoders, models

from workers.grammar import build
from workers.grammar.compiler import Compiled, Compiler
from workers.grammar.rows import ConstrainedRows
from workers.grammar.text_grammar import TextGrammar
from workers.protocol.grammar import Grammar, Kind
from workers.protocol.plan import Admission, BatchLayout, SamplingParams
from workers.step.masks import StepMasks
from workers.vocabulary.folder import text_of_tokens
from workers.vocabulary.spelling import byte_alphabet

EOS = 0
PLAIN = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
LIMITED = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 200} for name in ("title", "author", "text")},
    "required": ["title", "author", "text"],
}
LISTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "kind": {"enum": ["red", "green", "blue"]},
            "note": {"type": "string"},
        },
        "required": ["id", "kind", "note"],
    },
}
PATCH = r"""
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Add File: " name LF ("+" line LF)+ | "*** Delete File: " name LF | "*** Update File: " name LF move? change?
name: /.+/
line: /.*/
move: "*** Move to: " name LF
change: (("@@" | "@@ " name) LF | ("+" | "-" | " ") line LF)+ ("*** End of File" LF)?
%import common.LF
"""
"""What a coding agent's patches are held to."""
KINDS: dict[str, tuple[Kind, object]] = {
    "json": ("json", None),
    "plain": ("json_schema", PLAIN),
    "lists": ("json_schema", LISTS),
    "limited": ("json_schema", LIMITED),
    "text": ("regex", r"([A-Z][a-zA-Z]+( [a-zA-Z]+)*\. )+"),
    "patch": ("ebnf", TextGrammar("lark", PATCH).ebnf()),
}


def write_vocabulary(folder: Path, vocab: int) -> None:
    """A tokenizer of so many tokens."""
    rng = random.Random(0)
    tokens = [bytes([number]) for number in range(256)]
    marks = ['{"', '": ', '", "', '"}', '":"', ",", ", ", "[{", "}]", "},", '":', '": "', '",\n', "\n\n", "  ", "    "]
    tokens += [mark.encode() for mark in marks] + [str(number).encode() for number in range(10, 1000)]
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    weights = [1 / (2 + place) for place in range(len(letters))]
    while len(tokens) < vocab - 1:
        for _ in range(vocab):
            word = "".join(rng.choices(letters, weights, k=rng.choice((2, 3, 4, 5, 6, 7, 8, 10))))
            shape = rng.random()
            word = word.capitalize() if shape < 0.2 else word + rng.choice('",.:;)(!?=') if shape < 0.25 else word
            word = "".join(chr(rng.randrange(0x4E00, 0x9FFF)) for _ in range(2)) if shape > 0.92 else word
            tokens.append(((" " if rng.random() < 0.5 else "") + word).encode())
        tokens = list(dict.fromkeys(tokens))
    spelled = {number: letter for letter, number in byte_alphabet().items()}
    texts = ["<|eos|>", *("".join(spelled[number] for number in token) for token in tokens[: vocab - 1])]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(texts)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(texts[EOS], special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))


def write(kind: str, words: list[str], rng: random.Random) -> str:
    """A text that the grammar of this kind allows."""

    def some(least: int, most: int) -> str:
        return "".join(rng.choice(words) for _ in range(rng.randint(least, most)))

    note = {"id": rng.randrange(10**6), "kind": rng.choice(("red", "green", "blue")), "note": some(5, 15)}
    match kind:
        case "json":
            return json.dumps({some(1, 1): some(10, 30), some(1, 2): [rng.random(), note, True], "text": some(20, 60)})
        case "plain":
            return json.dumps({"a": some(50, 100), "b": rng.randrange(10**9)})
        case "lists":
            return json.dumps([{**note, "note": some(2, 20)} for _ in range(6)])
        case "limited":
            return json.dumps({name: some(60, 60)[: rng.randint(100, 200)] for name in ("title", "author", "text")})
        case "patch":
            lines = "".join(f"+{some(5, 15)}\n" for _ in range(8))
            return f"*** Begin Patch\n*** Add File: {some(1, 1)}.py\n{lines}*** End Patch"
    return "".join(f"Abc{some(5, 10)}. " for _ in range(8))


def tokens_of(text: str, ids: dict[bytes, int]) -> list[int]:
    """The longest token first."""
    left, found = text.encode(), []
    while left:
        length = next(length for length in range(min(24, len(left)), 0, -1) if left[:length] in ids)
        found.append(ids[left[:length]])
        left = left[length:]
    return [*found, EOS]


class Rows:
    """Rows that write their texts over and over."""

    def __init__(self, compiled: Compiled, texts: list[list[int]], vocab: int, width: int, accepted: float) -> None:
        self._texts, self._vocab, self._width, self._accepted = texts, vocab, width, accepted
        self._rng = random.Random(1)
        self.rows = ConstrainedRows(vocab, (EOS,), lambda grammar_id: compiled)
        self.masks = StepMasks(len(texts) * width, vocab, torch.device("cpu"))
        self._slots = list(range(len(texts)))
        self._layout = BatchLayout(width, len(texts))
        self._place = [0] * len(texts)
        self._gained: list[tuple[int, ...]] = [()] * len(texts)
        self._drafts: list[list[int]] = []
        self.filled = 0
        self._admit(self._slots)

    def _admit(self, slots: list[int]) -> None:
        params = SamplingParams(1000, stop_ids=(EOS,))
        self.rows.admit([Admission(slot, params, grammar=1) for slot in slots])
        for slot in slots:
            self._place[slot], self._gained[slot] = 0, ()

    def prepare(self) -> None:
        """Prepare what the target chose in the step before, and the drafts for the next one."""
        self._drafts = []
        for slot, text in enumerate(self._texts):
            if self._place[slot] + self._width > len(text):
                self._admit([slot])
            place = self._place[slot]
            said = text[place : place + self._width - 1]
            self._drafts.append(
                [token if self._rng.random() < self._accepted else self._rng.randrange(self._vocab) for token in said]
            )

    def step(self) -> None:
        """Do rank 0's work for a step."""
        self.rows.gained(self._slots, self._gained, self._slots)
        for slot, drafts in enumerate(self._drafts):
            self.rows.drafted(slot, drafts)
        self.masks.clear()
        dead_ends = self.rows.fill(self._layout, self._slots, self._slots, self.masks)
        assert not dead_ends
        self.filled += self.masks._used

    def verify(self) -> None:
        """Choose the target's tokens of this step."""
        for slot, drafts in enumerate(self._drafts):
            place, text = self._place[slot], self._texts[slot]
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == text[place + accepted]:
                accepted += 1
            self._gained[slot] = tuple(text[place : place + accepted + 1])
            self._place[slot] += accepted + 1


def measure(rows: Rows, steps: int) -> str:
    clock, cpu, own = [], [], []
    for number in range(steps + 5):
        rows.prepare()
        before = time.perf_counter(), time.process_time(), time.thread_time()
        rows.step()
        after = time.perf_counter(), time.process_time(), time.thread_time()
        rows.verify()
        if number >= 5:
            for times, begin, end in zip((clock, cpu, own), before, after, strict=True):
                times.append(1e3 * (end - begin))
    p99 = sorted(clock)[int(0.99 * len(clock))]
    figures = statistics.median(clock), p99, statistics.fmean(cpu), statistics.fmean(own)
    return "".join(f"{figure:>12.3f}" for figure in figures) + f"{rows.filled / (steps + 5):>12.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=129_280)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--accepted", type=float, default=0.7, help="probability that a draft is the text's next token")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rules", action="store_true", help="no automata")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rules:
        build.for_automaton = lambda *_, **__: None
    with tempfile.TemporaryDirectory() as made:
        write_vocabulary(Path(made), arguments.vocab)
        read = text_of_tokens(Path(made))
        assert read is not None, "the folder that was just written has a vocabulary"
        table, _ = read
        ids = {token: index for index, token in enumerate(table)}
        words = [token.decode() for token in table[1500:] if token[:1] == b" " and token[1:].isalpha()]
        compiler = Compiler(Path(made), arguments.vocab, (EOS,), lambda grammar_id, error: None)
        columns = ("median", "p99", "all threads", "own", "masks", "compile ms")
        print("ms a step".ljust(12) + "".join(f"{name:>12}" for name in columns))
        for name in arguments.kinds.split(","):
            kind, text = KINDS[name]
            grammar = Grammar(kind, text if isinstance(text, str) else json.dumps(text) if text else "")
            began = time.perf_counter()
            compiled, rng = compiler.compile(grammar), random.Random(0)
            compiling = 1e3 * (time.perf_counter() - began)
            texts = [tokens_of(write(name, words, rng), ids) for _ in range(arguments.rows)]
            rows = Rows(compiled, texts, arguments.vocab, arguments.width, arguments.accepted)
            print(name.ljust(12) + measure(rows, arguments.steps) + f"{compiling:>12.0f}", flush=True)


if __name__ == "__main__":
    main()
