"""The begin and end of a sequence that a folder's tokenizer_config.json declares are added to a text once."""

import json

import pytest
from tokenizers import Tokenizer, processors
from transformers import LlamaTokenizerFast, PreTrainedTokenizerFast

from deploy.text.tokenizer import Tokenizer as FrontTokenizer
from tests.deploy.text.tiny_tokenizer import TEMPLATE, backend
from workers.vocabulary.folder import load_tokenizer

BOS, EOS = 0, 1
TEXT = "the quick brown fox"


def folder_of(path, config, template=None, single=None):
    """A folder whose tokenizer.json has no template for begin and end but `single`, as DeepSeek R1 is shipped."""
    tokenizer = Tokenizer.from_str(backend().to_str())
    tokenizer.post_processor = (
        processors.ByteLevel(trim_offsets=False)
        if single is None
        else processors.TemplateProcessing(single=single, special_tokens=[("<|bos|>", BOS), ("<|user|>", 2)])
    )
    tokenizer.save(str(path / "tokenizer.json"))
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps({**named, **config}))
    return path


@pytest.mark.parametrize(
    ("config", "before", "behind"),
    [
        ({"add_bos_token": True, "add_eos_token": False, "tokenizer_class": "LlamaTokenizerFast"}, [BOS], []),
        ({"add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}, [BOS], []),
        ({"add_bos_token": True, "add_eos_token": True}, [BOS], [EOS]),
        ({"add_eos_token": True}, [], [EOS]),
        ({"tokenizer_class": "LlamaTokenizerFast"}, [BOS], []),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": None}, [BOS], []),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, [], []),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, [], []),
        ({}, [], []),
    ],
)
@pytest.mark.parametrize("single", [None, "$A"])
def test_ids_that_the_folder_declares_are_added(tmp_path, config, before, behind, single):
    tokenizer = load_tokenizer(folder_of(tmp_path, config, single=single))
    plain = tokenizer.backend_tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.backend_tokenizer.encode(TEXT).ids == [*before, *plain, *behind]
    again = FrontTokenizer.load(tmp_path)
    assert again is not None
    assert again.encode(TEXT) == [*before, *plain, *behind]
    assert again.encode(TEXT, add_special_tokens=False) == plain


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("adds_eos", [True, False])
def test_they_are_those_that_the_makers_class_adds(tmp_path, adds_bos, adds_eos):
    folder = folder_of(tmp_path, {"add_bos_token": adds_bos, "add_eos_token": adds_eos})
    whole = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    makers = LlamaTokenizerFast(
        tokenizer_object=whole.backend_tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        add_bos_token=adds_bos,
        add_eos_token=adds_eos,
    )
    makers.update_post_processor()
    added = makers.backend_tokenizer.encode("").ids
    assert added == [*([BOS] if adds_bos else []), *([EOS] if adds_eos else [])]
    ours = load_tokenizer(folder)
    plain = ours(TEXT, add_special_tokens=False).input_ids
    assert plain
    assert ours(TEXT).input_ids == [*added[: int(adds_bos)], *plain, *added[int(adds_bos) :]]


def test_what_tokenizer_json_adds_is_not_added_twice(tmp_path):
    tokenizer = load_tokenizer(folder_of(tmp_path, {"add_bos_token": True}, single="<|bos|> $A"))
    assert tokenizer(TEXT).input_ids.count(BOS) == 1


def test_what_tokenizer_json_adds_and_the_folder_rules_out_is_left_out(tmp_path):
    tokenizer = load_tokenizer(folder_of(tmp_path, {"add_bos_token": False}, single="<|bos|> $A"))
    assert BOS not in tokenizer(TEXT).input_ids


def test_other_ids_of_tokenizer_json_stay(tmp_path):
    tokenizer = load_tokenizer(folder_of(tmp_path, {"add_bos_token": True}, single="<|bos|> <|user|> $A"))
    assert tokenizer(TEXT).input_ids[:2] == [BOS, 2]


def test_a_chat_gets_one(tmp_path):
    tokenizer = FrontTokenizer.load(folder_of(tmp_path, {"add_bos_token": True}, template="{{ bos_token }}" + TEMPLATE))
    assert tokenizer is not None
    text = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.encode(text, add_special_tokens=False).count(BOS) == 1


def test_an_id_that_has_no_name_is_asked_for(tmp_path):
    with pytest.raises(ValueError, match="add_bos_token, but no token of the vocabulary as bos_token"):
        load_tokenizer(folder_of(tmp_path, {"add_bos_token": True, "bos_token": None}))
