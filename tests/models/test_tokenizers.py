"""Tokenizers of every habit: with BOS, with EOS, with neither, padding on the left, larger or smaller than the model.

Words are whole tokens, so what a text's ids must be is written down here by hand.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from lenspipe.corpora.documents import Document
from lenspipe.errors import ModelError, RequestError
from lenspipe.grid import Site
from lenspipe.kernels import readout as kernel
from lenspipe.kernels.head import Request
from lenspipe.models.lens_model import LensModel, open_model
from lenspipe.models.tokenizer import Tokenizer, load_tokenizer, timeless
from lenspipe.recipe import make_recipe
from lenspipe.stages.capture import padded
from lenspipe.stages.encode import encode_documents
from tests.families.tiny import DEPTH, VOCAB, build

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "ran"]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
IDS = {word: i for i, word in enumerate([*SPECIAL, *WORDS, *(f" {word}" for word in WORDS)])}
PAD, BOS, EOS, UNK = range(4)
LAST = Site("resid_post", DEPTH - 1)

TEXT = "the cat sat"
TEXT_IDS = [IDS["the"], IDS[" cat"], IDS[" sat"]]

ADDS = {
    "neither": (None, []),
    "bos": ("<s> $A", ["<s>"]),
    "eos": ("$A </s>", ["</s>"]),
    "both": ("<s> $A </s>", ["<s>", "</s>"]),
}
CHAT = "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{% endfor %}"
BARE_CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def words(adds: str = "neither", vocabulary: dict[str, int] = IDS, **settings: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words with the space before them."""
    raw = RawTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[^ ]+"), "isolated")
    raw.decoder = decoders.Fuse()
    template, used = ADDS[adds]
    if template:
        raw.post_processor = processors.TemplateProcessing(template, special_tokens=[(t, IDS[t]) for t in used])
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"} | settings
    return PreTrainedTokenizerFast(tokenizer_object=raw, **named)


def loaded(folder: Path, hf: PreTrainedTokenizerFast) -> Tokenizer:
    hf.save_pretrained(folder)
    return load_tokenizer(folder)


def encode(tokenizer: Tokenizer, text: str = TEXT, bos: str = "auto") -> tuple[list[int], int]:
    return tokenizer.encode(text, bos, "line 1")


@pytest.mark.parametrize(
    "adds, bos, ids, prefix",
    [
        ("neither", "auto", TEXT_IDS, 0),
        ("neither", "always", [BOS, *TEXT_IDS], 1),
        ("neither", "never", TEXT_IDS, 0),
        ("bos", "auto", [BOS, *TEXT_IDS], 1),
        ("bos", "always", [BOS, *TEXT_IDS], 1),
        ("bos", "never", TEXT_IDS, 0),
        ("eos", "auto", [*TEXT_IDS, EOS], 0),
        ("eos", "always", [BOS, *TEXT_IDS, EOS], 1),
        ("eos", "never", TEXT_IDS, 0),
        ("both", "auto", [BOS, *TEXT_IDS, EOS], 1),
        ("both", "always", [BOS, *TEXT_IDS, EOS], 1),
        ("both", "never", TEXT_IDS, 0),
    ],
)
def test_a_text_has_the_special_tokens_that_tokenizer_and_recipe_say(
    tmp_path: Path, adds: str, bos: str, ids: list[int], prefix: int
) -> None:
    assert encode(loaded(tmp_path, words(adds)), bos=bos) == (ids, prefix)


def test_always_adds_no_bos_to_a_text_that_has_one(tmp_path: Path) -> None:
    assert encode(loaded(tmp_path, words()), "<s>the", "always") == ([BOS, IDS["the"]], 1)


def test_a_bos_that_the_text_has_itself_counts_as_one() -> None:
    assert encode(Tokenizer(words()), "<s>the") == ([BOS, IDS["the"]], 1)
    assert encode(Tokenizer(words("bos")), "<s>the", "never") == ([BOS, IDS["the"]], 1)


@pytest.mark.parametrize("bos", ["auto", "always"])
def test_a_doubled_bos_is_refused_with_the_way_out(bos: str) -> None:
    with pytest.raises(RequestError, match=r"line 1: begins with two BOS tokens \('<s>'\).*corpus.bos = \"never\""):
        encode(Tokenizer(words("bos")), "<s>the cat", bos)


def test_a_tokenizer_without_bos_refuses_always_and_has_no_prefix_otherwise() -> None:
    tokenizer = Tokenizer(words(bos_token=None))
    assert tokenizer.hf.bos_token_id is None
    assert encode(tokenizer) == (TEXT_IDS, 0)
    assert encode(tokenizer, bos="never") == (TEXT_IDS, 0)
    with pytest.raises(RequestError, match=r'"always", but this tokenizer has no BOS token: use "auto" or "never"'):
        encode(tokenizer, bos="always")


def test_a_bos_that_is_the_eos_too_is_found_at_the_front_only() -> None:
    tokenizer = Tokenizer(words(bos_token="</s>"))
    assert encode(tokenizer, "the</s>") == ([IDS["the"], EOS], 0)
    assert encode(tokenizer, bos="always") == ([EOS, *TEXT_IDS], 1)


@pytest.mark.parametrize("adds", ADDS)
@pytest.mark.parametrize("bos", ["auto", "always", "never"])
def test_a_text_that_tokenizes_to_nothing_is_refused_even_where_specials_are_added(adds: str, bos: str) -> None:
    with pytest.raises(RequestError, match="line 1: tokenizes to nothing; remove the document"):
        encode(Tokenizer(words(adds)), "", bos)


def test_padding_and_truncation_that_a_tokenizer_file_asks_for_are_not_done(tmp_path: Path) -> None:
    hf = words("bos", model_max_length=2)
    hf.backend_tokenizer.enable_truncation(2)
    hf.backend_tokenizer.enable_padding(length=9, pad_token="<pad>")
    hf.backend_tokenizer.save(str(tmp_path / "raw.json"))
    raw = RawTokenizer.from_file(str(tmp_path / "raw.json"))
    assert len(raw.encode(TEXT).ids) == 9
    kept = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", pad_token="<pad>", model_max_length=2)
    assert encode(loaded(tmp_path / "saved", kept)) == ([BOS, *TEXT_IDS], 1)
    assert loaded(tmp_path / "saved", kept).pieces(TEXT) == TEXT_IDS


def test_fragments_and_answers_have_no_special_tokens() -> None:
    tokenizer = Tokenizer(words("both"))
    assert tokenizer.pieces(" cat") == [IDS[" cat"]]
    assert tokenizer.answer("cat sat", " ") == (IDS[" cat"], 2)
    assert tokenizer.answer(" cat", " ") == (IDS[" cat"], 1)
    assert tokenizer.answer("cat", "") == (IDS["cat"], 1)


def test_a_tracked_string_that_is_one_token_with_a_space_is_pointed_to() -> None:
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS, " cat", "c", "at"])}
    raw = RawTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r" cat|c(?=at)|at"), "isolated")
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>"))
    assert tokenizer.single(" cat", VOCAB) == vocabulary[" cat"]
    with pytest.raises(RequestError, match=r"'cat' is 2 tokens: 'c' \(13\), 'at' \(14\).* ' cat' is one token"):
        tokenizer.single("cat", VOCAB)


@pytest.mark.parametrize("adds", ["bos", "eos"])
def test_padding_on_the_left_changes_no_ids_and_no_states(tmp_path: Path, llama: Any, adds: str) -> None:
    """The library pads for itself, on the right, whatever side a tokenizer prefers."""
    texts = [TEXT, "on a mat and the cat ran", "a"]
    found = {}
    for side in ("right", "left"):
        tokenizer = loaded(tmp_path / side, words(adds, padding_side=side))
        assert tokenizer.hf.padding_side == side
        model = open_model(llama, tokenizer=tokenizer)
        found[side] = [model.to_tokens(text) for text in texts], _states(model, texts)
    left, right = found["left"], found["right"]
    assert [ids.tolist() for ids in left[0]] == [ids.tolist() for ids in right[0]]
    torch.testing.assert_close(left[1], right[1], rtol=0, atol=0)
    for ids, state in zip(left[0], left[1], strict=True):
        alone = _own_last_state(llama, ids)
        torch.testing.assert_close(state[: len(ids)], alone, rtol=0, atol=1e-5 * float(alone.abs().max()))


def _states(model: LensModel, texts: Sequence[str]) -> torch.Tensor:
    recipe = make_recipe({"model": {"source": "none"}, "corpus": {"source": "none"}})
    documents = [Document(text, {}, f"text {i}") for i, text in enumerate(texts)]
    shard = encode_documents(documents, recipe, 64, model.require_tokenizer())
    ids, mask = padded(shard, torch.arange(len(texts)).numpy())
    return model.states(ids, mask, [LAST])[LAST] * mask[:, :, None]


def _own_last_state(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _m, args: found.append(args[0][0].clone()))
    with torch.no_grad():
        model(ids[None])
    handle.remove()
    return found[0]


def test_special_positions_of_a_shard_are_the_tokenizers_own() -> None:
    recipe = make_recipe({"model": {"source": "none"}, "corpus": {"source": "none"}})
    shard = encode_documents([Document("the<unk> cat", {}, "text 0")], recipe, 64, Tokenizer(words("both")))
    assert shard.input_id.tolist() == [BOS, IDS["the"], UNK, IDS[" cat"], EOS]
    assert shard.is_special.tolist() == [True, False, True, False, True]


def test_tokens_added_beyond_the_vocabulary_are_encoded_spelled_and_special_where_they_say_so(tmp_path: Path) -> None:
    hf = words("bos")
    n = len(IDS)
    hf.add_tokens([AddedToken("mouse", normalized=False)])
    hf.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    tokenizer = loaded(tmp_path, hf)
    assert encode(tokenizer, "<tool>the mouse")[0][:3] == [BOS, n + 1, IDS["the"]]
    assert n in encode(tokenizer, "the mouse")[0]
    assert tokenizer.strings(n + 2)[n:] == ["mouse", "<tool>"]
    assert n + 1 in tokenizer.special_ids
    assert n not in tokenizer.special_ids
    assert tokenizer.single("<tool>", n + 2) == n + 1


def test_strings_are_each_ids_own_spelling_with_its_space() -> None:
    strings = Tokenizer(words()).strings(len(IDS))
    assert strings == list(IDS)


def test_ids_of_the_model_that_the_tokenizer_lacks_are_empty_strings() -> None:
    strings = Tokenizer(words()).strings(VOCAB)
    assert len(strings) == VOCAB
    assert strings[: len(IDS)] == list(IDS)
    assert set(strings[len(IDS) :]) == {""}


def test_strings_of_a_vocabulary_smaller_than_the_tokenizer_stop_with_it() -> None:
    assert Tokenizer(words()).strings(6) == list(IDS)[:6]


def test_ids_that_the_tokenizer_lacks_are_ranked_like_any_other(llama: Any) -> None:
    model = open_model(llama, tokenizer=Tokenizer(words()))
    ids = model.to_tokens("on a mat and the cat ran sat")
    with torch.no_grad():
        theirs = llama(ids[None]).logits[0].double()
    target = torch.arange(len(ids)) + VOCAB - len(ids)
    state = model.states(ids[None], torch.ones_like(ids[None]), [LAST])[LAST][0]
    request = Request(frozenset({"target", "topk"}), 5)
    found = kernel.read_rows(model.unembed.head, model.unembed.normed(state)[None], request, {"target": target})
    found = {name: values[0] for name, values in found.items()}
    for row in range(len(ids)):
        rank = sum(float(value) > float(theirs[row, target[row]]) for value in theirs[row])
        assert int(found["target_rank"][row]) == rank
        assert found["topk_id"][row].tolist() == theirs[row].argsort(descending=True)[:5].tolist()
    assert (found["topk_id"] >= len(IDS)).any()


def test_a_tracked_id_that_only_the_model_has_is_accepted_and_one_beyond_it_is_not() -> None:
    tokenizer = Tokenizer(words())
    assert tokenizer.single(VOCAB - 1, VOCAB) == VOCAB - 1
    with pytest.raises(RequestError, match="token id 97: the vocabulary has ids 0 to 96"):
        tokenizer.single(VOCAB, VOCAB)


MESSAGES = [{"role": "cat", "content": "sat"}]


@pytest.mark.parametrize("adds", ["neither", "bos", "both"])
def test_a_chat_template_that_writes_bos_gets_no_second_one(tmp_path: Path, adds: str) -> None:
    tokenizer = loaded(tmp_path, words(adds, chat_template=CHAT))
    for bos in ("auto", "always"):
        assert tokenizer.encode(MESSAGES, bos, "line 1") == ([BOS, IDS["cat"], IDS[" sat"]], 1)
    assert tokenizer.encode(MESSAGES, "never", "line 1") == ([IDS["cat"], IDS[" sat"]], 0)


def test_a_chat_template_without_bos_gets_one_only_when_always() -> None:
    tokenizer = Tokenizer(words("bos", chat_template=BARE_CHAT))
    assert tokenizer.encode(MESSAGES, "auto", "line 1") == ([IDS["sat"]], 0)
    assert tokenizer.encode(MESSAGES, "always", "line 1") == ([BOS, IDS["sat"]], 1)


LLAMA_DATE = """{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- date_string }}"""


@pytest.mark.parametrize(
    "template, expected",
    [
        (LLAMA_DATE, "26 Jul 2024"),
        ("{{ strftime_now('%A, %-d %B %Y, %H:%M') }}", "Friday, 26 July 2024, 00:00"),
        ("\n  {% if true %}\n{{ strftime_now('%Y-%m-%d') }}{% endif %}!\n!", "\n2024-07-26!\n!"),
    ],
)
def test_a_chat_template_that_writes_todays_date_writes_the_same_on_any_day(template: str, expected: str) -> None:
    hf = words("bos", chat_template=template)
    assert hf.apply_chat_template(MESSAGES, tokenize=False, chat_template=timeless(template)) == expected
    assert hf.apply_chat_template(MESSAGES, tokenize=False) != expected
    told = "{{ 'cat' if strftime_now('%Y') == '2024' else 'sat' }}"
    assert Tokenizer(words("bos", chat_template=told)).encode(MESSAGES, "never", "line 1")[0] == [IDS["cat"]]


def test_messages_without_a_template_or_that_it_refuses_or_without_content_are_refused() -> None:
    with pytest.raises(RequestError, match="needs a chat template, and this tokenizer has none: use corpus"):
        Tokenizer(words()).encode(MESSAGES, "auto", "line 1")
    raises = words(chat_template="{{ raise_exception('no cats') }}")
    with pytest.raises(RequestError, match="line 1: the chat template refuses these messages: no cats"):
        Tokenizer(raises).encode(MESSAGES, "auto", "line 1")
    with pytest.raises(RequestError, match="line 1: tokenizes to nothing"):
        Tokenizer(words(chat_template=BARE_CHAT)).encode([{"role": "a", "content": ""}], "auto", "line 1")


def test_to_tokens_and_to_string_are_the_tokenizers_own(llama: Any) -> None:
    model = open_model(llama, tokenizer=Tokenizer(words("both")))
    assert model.to_tokens(TEXT).tolist() == [BOS, *TEXT_IDS, EOS]
    assert model.to_tokens(TEXT, bos="never").dtype == torch.int64
    assert model.to_string(model.to_tokens(TEXT, bos="never")) == TEXT
    assert model.to_string(IDS[" cat"]) == " cat"
    assert model.to_string([IDS["the"], IDS[" cat"]]) == "the cat"


def test_a_model_without_tokenizer_says_how_to_give_one(llama: Any) -> None:
    model = open_model(llama)
    for call in (lambda: model.to_tokens(TEXT), lambda: model.to_string([5])):
        with pytest.raises(RequestError, match="came without a tokenizer: pass tokenizer="):
            call()


def test_a_folder_that_holds_no_tokenizer_is_refused_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ModelError, match=f"cannot load the tokenizer in {tmp_path}"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_with_gaps_keeps_the_strings_beyond_them() -> None:
    from tokenizers import Tokenizer as Raw  # noqa: PLC0415
    from tokenizers.models import WordLevel  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    raw = Raw(WordLevel({"the": 0, "cat": 1, "zebra": 50}, unk_token="the"))
    strings = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw)).strings(97)
    assert (strings[1], strings[50], strings[20], len(strings)) == ("cat", "zebra", "", 97)
