"""Constrained sampling in one worker: every output is what was asked for, and nobody else's output changes."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from constrained import CASES, Case
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton.engine.grammar import Constrained, Grammars
from baton.engine.sampler import Mask, Row, sample, spread
from baton.proto import inference_pb2 as inference
from baton.proto.messages import LogitBias, Sampling
from baton.router.detokenizer import Detokenizer
from baton.router.grammar import translate
from baton.router.tokenizer import Tokenizer
from baton.scheduler.plan import Chunk, Step

EOS = 257
PROMPT = [72, 105, 32, 5]
BLANKS = [sorted(pre_tokenizers.ByteLevel.alphabet()).index(symbol) for symbol in "ĠĊĉč"]
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def runner(tiny_model_dir, runner_for) -> Any:
    return runner_for(tiny_model_dir("llama"))


@pytest.fixture(scope="module")
def text_of(tiny_model_dir):
    """The text of an output, by the router's own way of making it."""
    tokenizer = Tokenizer(tiny_model_dir("llama"))

    def decode(output: list[int], prompt: list[int] = PROMPT) -> str:
        detokenizer = Detokenizer(tokenizer, prompt, stop_token_ids=[EOS])
        return "".join(detokenizer.push([token]).text for token in output) + detokenizer.flush().text

    return decode


def notation(grammar: inference.Grammar) -> str:
    result = translate(grammar)
    assert isinstance(result, str), result
    return result


def generate(runner: Any, sequences: list[Any], num_tokens: int = 400) -> list[list[int]]:
    """The outputs of sequences that run together, each until its stop id."""
    for number, sequence in enumerate(sequences):
        sequence.block_ids = list(range(number * 30, number * 30 + 30))
    computed = [0] * len(sequences)
    for number in range(num_tokens):
        live = [i for i, s in enumerate(sequences) if s.token_ids[-1] not in s.stop_token_ids or not computed[i]]
        if not live:
            break
        chunks = [Chunk(sequences[i], computed[i], len(sequences[i].token_ids) - computed[i], True) for i in live]
        result = runner.run(Step(number, chunks, sum(chunk.num_tokens for chunk in chunks)))
        assert not result.refused
        for i, token in zip(live, result.token_ids, strict=True):
            computed[i] = len(sequences[i].token_ids)
            sequences[i].token_ids.append(token)
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


@by_name
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_weights_write_what_the_grammar_asks_for(
    runner: Any, new_sequence: Any, text_of: Any, case: Case, temperature: float
) -> None:
    sampling = {"temperature": temperature, "grammar": notation(case.grammar), "stop_token_ids": (EOS,)}
    if temperature == 0.0:
        # Greedy random weights love to repeat themselves, and JSON allows blanks nearly everywhere.
        sampling["logit_bias"] = tuple(LogitBias(token, -100.0) for token in BLANKS)
    # Filters that leave few tokens leave none of the allowed ones, unless the mask comes before them.
    filters = [{}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 40, "top_p": 0.9}]
    sequences = [new_sequence(PROMPT, seed=seed, **sampling, **filters[seed % 5]) for seed in range(5)]
    for output in generate(runner, sequences):
        assert output[-1] == EOS
        case.check(text_of(output))


def test_rows_without_a_grammar_are_as_they_are_alone(runner: Any, new_sequence: Any) -> None:
    free = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "logprobs": 2}]
    bound = {"temperature": 1.0, "grammar": notation(CASES[2].grammar), "stop_token_ids": (EOS,)}

    def outputs(constrained: bool) -> list[list[int]]:
        sequences = [new_sequence(PROMPT, seed=i, **options) for i, options in enumerate(free)]
        extra = [new_sequence(PROMPT, seed=i, **bound) for i in range(3)] if constrained else []
        return generate(runner, [*sequences, *extra], 40)[: len(free)]

    together = outputs(constrained=True)
    assert together == outputs(constrained=False)
    assert all(len(output) == 40 for output in together)


def test_bias_and_penalties_do_not_break_the_grammar(runner: Any, new_sequence: Any, text_of: Any) -> None:
    grammar = notation(inference.Grammar(regex="[ab]{8}"))
    bias = (*(LogitBias(token, 100.0) for token in (5, 6, EOS)), LogitBias(ord("a") - 33, -100.0))
    sequence = new_sequence(
        PROMPT, grammar=grammar, stop_token_ids=(EOS,), logit_bias=bias, presence_penalty=-2.0, repetition_penalty=10.0
    )
    assert set(text_of(generate(runner, [sequence])[0])) <= set("ab")


def test_log_probabilities_are_those_of_the_free_model(runner: Any, new_sequence: Any) -> None:
    """Finite, though the mask hides nearly everything, and equal to the ones that no grammar changes."""
    choice = notation(inference.Grammar(choices=inference.Choices(texts=["zebra"])))
    sequence = new_sequence(PROMPT, temperature=1.0, grammar=choice, stop_token_ids=(EOS,), logprobs=3)
    free = new_sequence(PROMPT, temperature=0.0, logprobs=3)
    sequence.block_ids, free.block_ids = [0], [1]
    result = runner.run(Step(0, [Chunk(sequence, 0, 4, True), Chunk(free, 0, 4, True)], 8))
    sampled, plain = result.logprobs[0].sampled, result.logprobs[1].sampled
    assert sampled.token_id == result.token_ids[0]
    assert math.isfinite(sampled.logprob)
    assert sampled.top_ids == plain.top_ids
    assert sampled.top_logprobs == plain.top_logprobs


def test_an_output_that_contradicts_its_grammar_is_refused(runner: Any, new_sequence: Any) -> None:
    grammar = notation(inference.Grammar(regex="[0-9]{4}"))
    output = [ord(c) - 33 for c in "12x"]
    sequence = new_sequence(PROMPT + output, len(PROMPT), grammar=grammar, stop_token_ids=(EOS,))
    free = new_sequence(PROMPT, temperature=0.0)
    sequence.block_ids, free.block_ids = [0], [1]
    result = runner.run(Step(0, [Chunk(sequence, 0, 7, True), Chunk(free, 0, 4, True)], 11))
    assert result.token_ids[0] == EOS
    assert list(result.refused) == [0]
    assert "output token 2" in result.refused[0]


# --- masks, against the library's tokenizer alone --------------------------------------------------------------------


def raw_tokenizer(without: str = "") -> RawTokenizer:
    alphabet = [symbol for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()) if symbol not in without]
    tokenizer = RawTokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def saved(tokenizer: RawTokenizer, directory: Path) -> Path:
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def words_dir(tmp_path_factory) -> Path:
    """A tokenizer with tokens of several characters, among them pieces of JSON."""
    tokenizer = raw_tokenizer()
    corpus = [str(case.grammar) for case in CASES] + [
        '{"name": "abc", "age": 12}',
        "[true, false, null]",
        '{"o":{"p":{',
    ] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return saved(tokenizer, tmp_path_factory.mktemp("words"))


def constrained(grammar: str, output: list[int], row: int = 0, eos: int = 0, name: str = "s") -> Constrained:
    return Constrained(row, name, grammar, output, 0, len(output), (eos,))


def allowed(mask: Mask | None, index: int = 0) -> list[int]:
    assert mask is not None
    return np.unpackbits(mask.bits_RW[index].numpy().view(np.uint8), bitorder="little").nonzero()[0].tolist()


def test_a_kept_matcher_and_a_rebuilt_one_allow_the_same(words_dir: Path) -> None:
    """Also one that several tokens are new to, and one that was copied from a compiled grammar which others used."""
    tokenizer = RawTokenizer.from_file(str(words_dir / "tokenizer.json"))
    eos, width = tokenizer.token_to_id("<eos>"), tokenizer.get_vocab_size()
    kept, fresh = (Grammars(words_dir, width, (eos,), 1) for _ in range(2))
    for number, case in enumerate(CASES):
        rng, output, grammar = random.Random(number), [], notation(case.grammar)
        for _ in range(60):
            ids = allowed(fresh.begin([constrained(grammar, list(output), eos=eos)]).result(30).mask)
            if rng.random() < 0.6:
                assert (
                    allowed(kept.begin([constrained(grammar, output, eos=eos, name=case.name)]).result(30).mask) == ids
                )
            token = rng.choice(ids)
            if token == eos:
                break
            output.append(token)


def test_ids_without_text_are_never_allowed(tmp_path: Path) -> None:
    directory = saved(raw_tokenizer(), tmp_path)
    mask = (
        Grammars(directory, 256 + 1 + 63, (256,), 1)
        .begin([constrained("start: /(.|\\n)*/", [], eos=256)])
        .result(30)
        .mask
    )
    ids = allowed(mask)
    assert max(ids) == 256
    assert set(ids) > set(range(94))


def test_a_grammar_that_the_tokenizer_cannot_write_is_refused(tmp_path: Path) -> None:
    grammars = Grammars(saved(raw_tokenizer(without="Q"), tmp_path), 256, (255,), 1)
    limits = grammars.begin(
        [constrained("start: /Q/", [], 0, 255, "a"), constrained("start: /R/", [], 3, 255, "b")]
    ).result(30)
    assert list(limits.refused) == [0]
    assert "nothing can follow output token 0" in limits.refused[0]
    assert limits.mask is not None
    assert limits.mask.rows == [3]


def test_a_broken_grammar_and_a_broken_tokenizer_are_refused(tmp_path: Path) -> None:
    whole = Grammars(saved(raw_tokenizer(), tmp_path), 257, (256,), 1)
    assert "cannot be followed" in whole.begin([constrained("start: (", [], eos=256)]).result(30).refused[0]
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = Grammars(tmp_path, 257, (256,), 1)
    assert "tokenizer" in broken.begin([constrained("start: /a/", [], eos=256)]).result(30).refused[0]


def test_an_end_id_that_would_not_end_the_output_is_not_allowed(tmp_path: Path) -> None:
    directory = saved(raw_tokenizer(), tmp_path)
    grammars = Grammars(directory, 257, (256, 0), 1)
    for stop, expected in ((256, [256]), (0, [0])):
        assert allowed(grammars.begin([constrained('start: ""', [], eos=stop)]).result(30).mask) == expected
    assert grammars.begin([constrained('start: ""', [], eos=9)]).result(30).refused


def test_matchers_that_nobody_asks_for_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.grammar._KEPT_MATCHERS", 4)
    grammars = Grammars(saved(raw_tokenizer(), tmp_path), 257, (256,), 1)

    def ask(names: Iterable[str]) -> None:
        grammars.begin([constrained("start: /a*/", [64], i, 256, name) for i, name in enumerate(names)]).result(30)

    for number in range(20):
        ask([f"s{number}"])
    assert len(grammars._matchers) == 4
    ask("abcdefgh")
    assert set("abcdefgh") <= set(grammars._matchers)


# --- the mask in the sampler ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [31, 32, 33, 70])
def test_the_sampler_chooses_among_what_the_mask_leaves(vocabulary: int) -> None:
    rng, generator = random.Random(vocabulary), torch.Generator().manual_seed(vocabulary)
    settings = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 2.0, "top_p": 0.2},
    ]
    for trial in range(20):
        rows = [Row(Sampling(seed=trial, grammar="g", logprobs=2, **settings[i % 4]), [1, 2], 1, 2) for i in range(8)]
        masked = sorted(rng.sample(range(8), rng.randint(1, 8)))
        leaves = [set(rng.sample(range(vocabulary), rng.choice([1, 2, 9]))) for _ in masked]
        bits = np.zeros((len(masked), (vocabulary + 31) // 32 * 32), dtype=np.uint8)
        for i, ids in enumerate(leaves):
            bits[i, list(ids)] = 1
        mask = Mask(masked, torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32)))
        logits = torch.randn(8, vocabulary, generator=generator)
        free = sample(logits.clone(), rows)
        bound = sample(logits.clone(), rows, mask)
        for i in range(8):
            if i in masked:
                assert bound.token_ids[i] in leaves[masked.index(i)]
            else:
                assert bound.token_ids[i] == free.token_ids[i]
            assert math.isfinite(bound.logprobs[i].logprob)
            assert bound.logprobs[i].top_logprobs == free.logprobs[i].top_logprobs


@pytest.mark.parametrize("num_bits", [1, 31, 32, 33, 200, 224])
def test_bits_are_spread_on_a_device_as_numpy_does_it(num_bits: int) -> None:
    words = np.random.default_rng(num_bits).integers(-(2**31), 2**31, (5, 7)).astype(np.int32)
    expected = np.unpackbits(words.view(np.uint8), axis=1, count=num_bits, bitorder="little").astype(bool)
    assert np.array_equal(spread(torch.from_numpy(words), num_bits).numpy(), expected)


def test_texts_of_a_tokenizer_that_marks_words_are_exact(tmp_path: Path) -> None:
    """Such a tokenizer drops a space in front of a text's first word, and writes rare characters as bytes."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *'abc{}:"', "▁a", "ab", "▁b"]
    tokenizer = RawTokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    reader, grammars = Tokenizer(tmp_path), Grammars(tmp_path, len(pieces), (1,), 1)
    pattern = "[ ]?[ab]{1,3}[ ][ab☃]{2,5}"
    for seed in range(40):
        rng, output = random.Random(seed), []
        while not output or output[-1] != 1:
            mask = grammars.begin([constrained(f"start: /{pattern}/", output, 0, 1, str(seed))]).result(30).mask
            output.append(rng.choice(allowed(mask)))
        for prompt in ([], [1], [pieces.index("c")], [pieces.index("▁")]):
            detokenizer = Detokenizer(reader, prompt, stop_token_ids=[1])
            text = "".join(detokenizer.push([token]).text for token in output) + detokenizer.flush().text
            assert re.fullmatch(pattern, text), (prompt, output, text)
