"""Ids, texts and chat prompts equal transformers' on the same directory; text streams by whole characters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fidelity import DEFAULT_MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from llm.decoder_config import ConfigError
from llm.request import RequestError
from llm.text.chat_template import ChatTemplate
from llm.text.tokenizer import IncrementalDecoder, Tokenizer

OURS = Tokenizer.from_directory(DEFAULT_MODEL)
THEIRS = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
SAMPLES = ["Total: 12,50 €", "日本語と emoji 🧾🧾", "a\n\n  b\t", "<image>x"]
TEXTS = st.text(max_size=60) | st.sampled_from(SAMPLES)


@settings(deadline=None, max_examples=150)
@given(TEXTS)
def test_ids_equal_transformers_and_come_back_as_the_text(text: str) -> None:
    ids = OURS.encode(text)
    assert ids == THEIRS.encode(text, add_special_tokens=False)
    assert OURS.decode(ids, skip_special=False) == text


@settings(deadline=None, max_examples=150)
@given(TEXTS, st.sampled_from(["", "<image>", "<|im_start|>", "<end_of_utterance>"]))
def test_special_tokens_in_a_literal_text_stay_characters(text: str, special: str) -> None:
    ids = OURS.encode(text + special, allow_special=False)
    assert all(OURS.token_bytes(i) for i in ids)
    assert OURS.decode(ids) == text + special


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, OURS.vocab_size - 1), max_size=40), st.integers(1, 5))
def test_streamed_text_equals_decoding_at_once_for_any_ids(ids: list[int], step: int) -> None:
    """Random ids hold broken UTF-8 as well."""
    decoder = OURS.decoder()
    pieces = [decoder.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert "".join(pieces) + decoder.flush() == OURS.decode(ids)


@settings(deadline=None, max_examples=50)
@given(st.text(alphabet="é€🧾日a ", max_size=20))
def test_no_streamed_piece_holds_half_a_character(text: str) -> None:
    decoder = OURS.decoder()
    for token_id in OURS.encode(text):
        assert "\ufffd" not in decoder.push([token_id])
    assert decoder.flush() == ""


def test_vocabulary_bytes_spell_what_tokens_decode_to() -> None:
    vocabulary = OURS.vocabulary()
    assert len(vocabulary) == OURS.vocab_size == len(THEIRS)
    for i, data in enumerate(vocabulary):
        assert data.decode(errors="replace") == OURS.decode([i])
    for i, data in enumerate(OURS.vocabulary(skip_special=False)):
        assert data.decode(errors="replace") == OURS.decode([i], skip_special=False)
    assert OURS.token_bytes(OURS.vocab_size + 5) == b""


def test_every_byte_has_a_token() -> None:
    assert {bytes([b]) for b in range(256)} <= set(OURS.vocabulary())


def test_special_tokens_are_found_by_name() -> None:
    assert OURS.token_id("<image>") == THEIRS.convert_tokens_to_ids("<image>")
    assert "<image>" in OURS.special_tokens()
    with pytest.raises(ConfigError):
        OURS.token_id("<none such>")


def test_eos_comes_from_the_generation_config_then_the_config(tmp_path: Path) -> None:
    assert OURS.eos_ids == {THEIRS.eos_token_id}
    (tmp_path / "tokenizer.json").write_bytes((DEFAULT_MODEL / "tokenizer.json").read_bytes())
    assert Tokenizer.from_directory(tmp_path).eos_ids == frozenset()
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 7}}')
    assert Tokenizer.from_directory(tmp_path).eos_ids == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert Tokenizer.from_directory(tmp_path).eos_ids == {3, 4}


def sentencepiece_like(prepend_scheme: str = "always", specials: tuple[str, ...] = ()) -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁he", "llo", "▁wor", "ld", "h", "e"]
    fast = FastTokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens(list(specials))
    return Tokenizer(fast.to_str())


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.text("helo wrd\n", max_size=8), min_size=1, max_size=5), st.sampled_from(["first", "never"])
)
def test_texts_cut_at_special_tokens_have_the_ids_of_the_whole_text(texts: list[str], scheme: str) -> None:
    """transformers tokenises the expanded text at once; the prompt builder goes from image to image."""
    tokenizer = sentencepiece_like(scheme, ("<row>",))
    row = tokenizer.token_id("<row>")
    cut: list[int] = []
    for index, text in enumerate(texts):
        cut += [row] * (index > 0) + tokenizer.encode(text, starts=not cut and index == 0)
    assert cut == tokenizer.encode("<row>".join(texts))


def test_sentencepiece_tokens_stream_like_they_decode() -> None:
    tokenizer = sentencepiece_like()
    euro = [1 + b for b in "€".encode()]
    for ids in ([258, 259, 260, 261, *euro, 257, 258], [257, 257, 259], euro, [259, 258]):
        decoder = IncrementalDecoder(tokenizer)
        streamed = "".join(decoder.push([i]) for i in ids) + decoder.flush()
        assert streamed == tokenizer.decode(ids)


CHATS = [
    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is <it>?"}]}],
    [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "b & c"}]},
        {"role": "user", "content": [{"type": "text", "text": "ü"}]},
    ],
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_prompts_equal_transformers(chat: list[dict[str, object]], add_generation_prompt: bool) -> None:
    want = THEIRS.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert OURS.render(chat, add_generation_prompt=add_generation_prompt) == want


TEXT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{%- if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}{% generation %}[assistant]{% endgeneration %}{% endif %}"
)


def test_a_text_template_gets_joined_parts_and_equals_transformers_on_strings() -> None:
    template = ChatTemplate(TEXT_TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"})
    parts = [{"type": "image"}, {"type": "text", "text": "hi"}, {"type": "text", "text": " you "}]
    rendered = template.render([{"role": "user", "content": parts}], placeholder="<image>")
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL, bos_token="<s>", eos_token="</s>")
    chat = [{"role": "user", "content": "<image>hi you "}]
    want = tokenizer.apply_chat_template(
        chat, chat_template=TEXT_TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    assert rendered == want


def test_a_template_that_refuses_names_its_reason() -> None:
    template = ChatTemplate(TEXT_TEMPLATE, {})
    with pytest.raises(RequestError, match="no role tool"):
        template.render([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for i in range(99999) %}{{ 'abcdefghij' * 100 }}{% endfor %}",
        "{{ messages[0]['content']['no'].x.y }}",
    ],
)
def test_a_hostile_template_is_stopped(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(RequestError) as caught:
        template.render([{"role": "user", "content": "hi"}])
    assert not isinstance(caught.value, TemplateError)


@pytest.mark.parametrize("source", ["{% for %}", "x" * 300_000])
def test_a_broken_or_huge_template_is_refused_at_load(source: str) -> None:
    with pytest.raises(ConfigError):
        ChatTemplate(source, {})


def test_template_files_are_looked_up_as_transformers_does(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((DEFAULT_MODEL / "tokenizer.json").read_bytes())
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(ConfigError):
        Tokenizer.from_directory(tmp_path).render(chat)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ bos_token }}1", "bos_token": {"content": "<b>"}})
    )
    assert Tokenizer.from_directory(tmp_path).render(chat) == "<b>1"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "2"}')
    assert Tokenizer.from_directory(tmp_path).render(chat) == "2"
    (tmp_path / "chat_template.jinja").write_text("3")
    assert Tokenizer.from_directory(tmp_path).render(chat) == "3"


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_missing_or_broken_tokenizer_file_is_one_clear_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError):
        Tokenizer.from_directory(tmp_path)
