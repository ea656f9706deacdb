"""A tokenizer that a test trains itself: byte-level BPE, special and ordinary added tokens, a chat template."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import deploy.text.tokenizer
from deploy.text.encoders import Encoder

TEXTS = [
    "def read_lines(path):\n    with open(path) as file:\n        return file.readlines()\n",
    "the quick brown fox jumps over the lazy dog. STOP and END of it all\n",
    "Grüße aus Köln, naïve café, 東京タワー, Привет, мир! 👩‍🚀🚀 e\u0301\n",
]
SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<\uff5codd\u2581one\uff5c>"]
TEMPLATE = (
    "{% if loud %}{{ raise_exception('nobody may be loud') }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def backend() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("über", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return tokenizer


@cache
def with_special(*special: str) -> deploy.text.tokenizer.Tokenizer:
    """The same with further special tokens."""
    copy = Tokenizer.from_str(backend().to_str())
    copy.add_special_tokens([AddedToken(token, special=True) for token in special])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=copy, bos_token="<|bos|>", eos_token="<|eos|>", chat_template=TEMPLATE
    )
    return deploy.text.tokenizer.Tokenizer(hf)


@cache
def without_template(encoder: Encoder | None, *special: str) -> deploy.text.tokenizer.Tokenizer:
    """The same without a chat template, where `encoder` writes chats."""
    copy = Tokenizer.from_str(backend().to_str())
    copy.add_special_tokens([AddedToken(token, special=True) for token in special])
    hf = PreTrainedTokenizerFast(tokenizer_object=copy, bos_token="<|bos|>", eos_token="<|eos|>")
    return deploy.text.tokenizer.Tokenizer(hf, encoder)


@cache
def tiny() -> deploy.text.tokenizer.Tokenizer:
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend(), bos_token="<|bos|>", eos_token="<|eos|>", chat_template=TEMPLATE
    )
    return deploy.text.tokenizer.Tokenizer(hf)
