"""Deltas add up to the decoded output, whatever the tokens, the stop strings and the place where an output resumes.

The oracle decodes the whole output at once and searches it for stop strings.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton.router.detokenizer import Detokenizer
from baton.router.tokenizer import Tokenizer

CORPUS = [
    "hello world, hello there. the quick brown fox jumps over the lazy dog",
    "你好世界 你们好 今天天气很好 世界你好",
    "🎉🎊👩‍👩‍👧‍👦 👍🏽 🇩🇪 e\u0301a\u0308o\u0308 नमस्ते สวัสดี ﷽",
]
PIECES = ["hello", " world", "你", "好", "世", "界", "🎉", "👩‍👩‍👧", "e\u0301", "ab", "a", "b", "\n", " ", "�", "สวัส"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=20).map("".join)
STOPS = st.lists(
    st.one_of(
        st.sampled_from(["ab", "ba", "aab", "aba", "你", "好世", "🎉", "world", " ", "�"]), st.text("ab", min_size=1)
    ),
    max_size=4,
    unique=True,
).filter(all)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Like GPT-2, Llama 3 and Qwen: tokens are byte strings, which here often end within a character."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS * 3, trainer)
    return _saved(library, tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Like Llama 2 and Mistral: words begin with a mark for their space, rare characters are written in byte tokens."""
    words = ["<end>", "▁", "▁hello", "▁world", "hello", "world", "你", "a", "b", "ab", "\n"]
    vocabulary = {word: position for position, word in enumerate(words)}
    vocabulary |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    library = Library(models.BPE(vocab=vocabulary, merges=[("a", "b")], byte_fallback=True))
    library.add_special_tokens(["<end>"])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _saved(library, tmp_path_factory.mktemp("byte_fallback"))


def _saved(library: Library, folder: Path) -> Tokenizer:
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def spoken(detokenizer: Detokenizer, token_ids: list[int], flush: bool = True) -> list[str]:
    """The deltas when tokens come one by one, as far as the output goes."""
    deltas = []
    for token_id in token_ids:
        delta = detokenizer.push([token_id])
        deltas.append(delta.text)
        if delta.stopped is not None:
            return deltas
    return [*deltas, detokenizer.flush().text] if flush else deltas


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is completed first; of several completed at once, the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_deltas_of_any_tokens_add_up_to_the_decoded_output(byte_level: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=60))
    assert "".join(spoken(Detokenizer(byte_level, []), ids)) == byte_level.decode(ids)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, stops=STOPS)
def test_output_ends_before_the_first_stop_string_that_is_completed(
    byte_level: Tokenizer, text: str, stops: list[str]
) -> None:
    ids = byte_level.encode(text)
    detokenizer = Detokenizer(byte_level, [], stops)
    expected, stop = cut(byte_level.decode(ids), stops)
    assert "".join(spoken(detokenizer, ids)) == expected
    assert detokenizer.stopped == stop


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, stops=STOPS, data=st.data())
def test_what_is_emitted_does_not_depend_on_how_tokens_are_grouped(
    byte_level: Tokenizer, text: str, stops: list[str], data: st.DataObject
) -> None:
    ids = byte_level.encode(text)
    split = data.draw(st.integers(0, len(ids)))
    single, grouped = Detokenizer(byte_level, [], stops), Detokenizer(byte_level, [], stops)
    before = "".join(single.push([token_id]).text for token_id in ids[:split])
    assert grouped.push(ids[:split]).text == before
    after = "".join(single.push([token_id]).text for token_id in ids[split:])
    assert grouped.push(ids[split:]).text == after
    assert grouped.flush() == single.flush()


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, stops=STOPS, data=st.data())
def test_a_resumed_output_joins_the_delivered_text_without_gap_or_repeat(
    byte_level: Tokenizer, text: str, stops: list[str], data: st.DataObject
) -> None:
    ids = byte_level.encode(text)
    split = data.draw(st.integers(0, len(ids)))
    first = Detokenizer(byte_level, [], stops)
    delivered = spoken(first, ids[:split], flush=False)
    second = Detokenizer(byte_level, [], stops, delivered_ids=ids[: len(delivered)])
    rest = [] if first.stopped is not None else spoken(second, ids[split:])
    assert "".join(delivered + rest) == cut(byte_level.decode(ids), stops)[0]
    assert second.stopped == cut(byte_level.decode(ids), stops)[1]


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, stops=STOPS)
def test_no_delta_shows_half_a_character_or_part_of_a_stop_string(
    byte_level: Tokenizer, text: str, stops: list[str]
) -> None:
    text = text.replace("�", "")
    detokenizer = Detokenizer(byte_level, [], stops)
    expected = cut(text, stops)[0]
    shown = ""
    for delta in spoken(detokenizer, byte_level.encode(text)):
        shown += delta
        assert expected.startswith(shown)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, prompt=TEXTS, stops=STOPS)
@example(text=" world", prompt="好hello", stops=[])
def test_byte_fallback_output_follows_its_prompt_as_in_one_text(
    byte_fallback: Tokenizer, text: str, prompt: str, stops: list[str]
) -> None:
    prompt_ids, ids = (byte_fallback.encode(part.replace(" ", "▁")) for part in ("a" + prompt, text))
    whole = byte_fallback.decode([*prompt_ids, *ids])
    expected, stop = cut(whole[len(byte_fallback.decode(prompt_ids)) :], stops)
    detokenizer = Detokenizer(byte_fallback, prompt_ids, stops)
    if "�" not in prompt + text:
        assert "".join(spoken(detokenizer, ids)) == expected
        assert detokenizer.stopped == stop


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_byte_fallback_tokens_are_survived_and_nothing_stays_held_back(
    byte_fallback: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_fallback.vocab_size - 1), max_size=80))
    detokenizer = Detokenizer(byte_fallback, [])
    spoken(detokenizer, ids)
    assert detokenizer.flush().text == ""


def test_the_first_word_keeps_its_space_behind_a_prompt(byte_fallback: Tokenizer) -> None:
    hello, world = byte_fallback.encode("▁hello")[-1:], byte_fallback.encode("▁world")
    assert "".join(spoken(Detokenizer(byte_fallback, hello), world)).startswith(" ")


def test_a_prompt_that_ends_within_a_character_does_not_swallow_the_first_byte_of_output(
    byte_level: Tokenizer, byte_fallback: Tokenizer
) -> None:
    for tokenizer in (byte_level, byte_fallback):
        lead, *rest = tokenizer.encode("龘")
        assert rest
        assert "".join(spoken(Detokenizer(tokenizer, [lead]), rest)) == tokenizer.decode(rest)


def test_special_tokens_and_stop_tokens_are_silent(byte_level: Tokenizer) -> None:
    end, word = 0, byte_level.encode("a")
    assert "".join(spoken(Detokenizer(byte_level, []), [end, *word, end, *word])) == "aa"
    assert "".join(spoken(Detokenizer(byte_level, [], stop_token_ids=word), [*word, end])) == ""


def test_a_stop_tells_how_many_of_the_pushed_tokens_belong_to_the_output(byte_level: Tokenizer) -> None:
    ids = [token_id for character in "xyabz" for token_id in byte_level.encode(character)]
    delta = Detokenizer(byte_level, [], ["ab"]).push(ids)
    assert (delta.text, delta.num_tokens, delta.stopped) == ("xy", 4, "ab")


def test_nothing_comes_after_a_stop(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, [], ["a"])
    detokenizer.push(byte_level.encode("a"))
    assert detokenizer.push(byte_level.encode("b")).text == ""
    assert detokenizer.flush().text == ""


def test_a_stop_string_within_the_first_min_tokens_is_text(byte_level: Tokenizer) -> None:
    ids = [byte_level.encode(character)[0] for character in "aabab"]
    detokenizer = Detokenizer(byte_level, [], ["ab", "a"], min_tokens=3)
    assert "".join(spoken(detokenizer, ids)) == "aab"
    assert detokenizer.stopped == "a"


def test_at_most_one_character_is_held_back_even_when_every_token_ends_within_one(byte_level: Tokenizer) -> None:
    broken = [token_id for token_id in range(byte_level.vocab_size) if byte_level.decode([token_id]).endswith("�")]
    ids = [broken[count * 7 % len(broken)] for count in range(500)]
    detokenizer = Detokenizer(byte_level, [])
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        shown += detokenizer.push([token_id]).text
        assert len(byte_level.decode(ids[:count])) - len(shown) <= 1


def test_the_work_for_a_token_does_not_grow_with_the_output(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 0
    decode = Tokenizer.decode

    def measured(self: Tokenizer, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(self, token_ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", measured)
    garbage = next(i for i in range(byte_level.vocab_size) if decode(byte_level, [i]) == "�")
    detokenizer = Detokenizer(byte_level, byte_level.encode("hello" * 100))
    for token_id in [*byte_level.encode("hello 你好🎉" * 200), *[garbage] * 500]:
        detokenizer.push([token_id])
    assert longest <= 32
