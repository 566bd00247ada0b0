import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from vocabularies import byte_level, save_tokenizer, sentencepiece

from headrace.core.errors import InvalidRequest, ModelError
from headrace.core.sampling import SamplingParams
from headrace.front.generation_config import default_sampling
from headrace.front.tokenizer import Tokenizer

TEXTS = ["", "a", "Hello  12 wörld \U0001f600<|im_end|>\n x", " leading", "<tool call>{}</tool>"]
TEMPLATES = {
    "plain": None,
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }};{% endfor %}"
    ),
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{{ tools | tojson }}{% endif %}{{ messages[-1].content }}",
    "generation": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ bos_token }}"
    ),
    "blocks": (
        "{%- for m in messages %}\n  {% if m.content is string %}\n{{ m.content | trim }}\n  {% endif %}\n{% endfor %}"
    ),
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ 'x' in m }}{% endfor %}",
    "dates": "{{ strftime_now('%Y') }}{{ eos_token }}{{ enable_thinking }}{{ dict(a=1) | tojson }}",
}
MESSAGES = [
    {"role": "system", "content": "be <brief> & kind", "x": None},
    {"role": "user", "content": "  Grüße \U0001f600  "},
    {"role": "assistant", "content": "hm", "reasoning": "thought"},
    {"role": "user", "content": "go on  "},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "ä<b>", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(byte_level(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def test_encodes_as_transformers_does(folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert tokens == theirs(text).input_ids
        assert tokenizer.decode(tokens) == theirs.decode(tokens)
        assert tokenizer.decode(tokens, skip_special_tokens=True) == theirs.decode(tokens, skip_special_tokens=True)
    assert tokenizer.special_tokens == theirs.special_tokens_map | {}
    assert tokenizer.special_ids == set(theirs.all_special_ids)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("mode", ["open", "closed", "continue"])
def test_renders_chats_as_transformers_does(folder: Path, tokenizer: Tokenizer, name: str, mode: str) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    if mode == "continue" and name in ("namespace", "reasoning", "dates"):
        pytest.skip("these templates do not show the last message")
    options = {"add_generation_prompt": mode == "open", "continue_final_message": mode == "continue"}
    expected = theirs.apply_chat_template(
        MESSAGES, tools=TOOLS, chat_template=TEMPLATES[name], tokenize=False, enable_thinking=False, **options
    )
    found = tokenizer.render_chat(
        MESSAGES, tools=TOOLS, chat_template=TEMPLATES[name], variables={"enable_thinking": False}, **options
    )
    assert found == expected


@pytest.mark.parametrize("setting", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("processor", [True, False])
def test_begin_token_follows_the_tokenizer_file(tmp_path: Path, setting: dict[str, bool], processor: bool) -> None:
    """Transformers 5 goes by the file's post-processor and ignores the settings where there is a file."""
    from transformers import AutoTokenizer

    fast = sentencepiece()
    if processor:
        fast.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    save_tokenizer(fast, tmp_path)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **setting}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs, ours = AutoTokenizer.from_pretrained(str(tmp_path)), Tokenizer.load(tmp_path)
    for special in (True, False):
        expected = theirs("the fox", add_special_tokens=special).input_ids
        assert ours.encode("the fox", add_special_tokens=special) == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "undefined|no element"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "_x"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% if %}", "does not parse"),
    ],
)
def test_errors_of_a_template_become_the_clients(tokenizer: Tokenizer, template: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        tokenizer.render_chat(MESSAGES, chat_template=template)


def test_chat_template_file_replaces_the_models(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("{{ messages[0].content }}!")
    assert Tokenizer.load(folder, file).render_chat([{"role": "user", "content": "x"}]) == "x!"
    with pytest.raises(ModelError, match="cannot read the chat template"):
        Tokenizer.load(folder, tmp_path / "absent")
    file.write_text("{% for %}")
    with pytest.raises(ModelError, match="does not parse"):
        Tokenizer.load(folder, file)


def test_model_without_template_or_tokenizer_says_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    bare = Tokenizer.load(tmp_path)
    assert not bare.has_chat_template
    with pytest.raises(InvalidRequest, match="--chat-template"):
        bare.render_chat(MESSAGES)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_end_tokens_and_defaults_come_from_the_generation_config(folder: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == [2, 0]
    assert default_sampling(folder) == SamplingParams(temperature=0.6)


def test_too_long_texts_and_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="maximum context length is 3 tokens") as caught:
        tokenizer.encode("one two three four", limit=3)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequest, match="Unicode"):
        tokenizer.encode("\ud800")


def test_long_texts_do_not_block_the_event_loop(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox. " * 30_000
    started = time.perf_counter()
    expected = tokenizer.encode(text)
    alone = time.perf_counter() - started

    async def scenario() -> tuple[list[int], list[float]]:
        gaps, last = [], time.perf_counter()
        task = asyncio.create_task(tokenizer.encode_async(text))
        while not task.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        return await task, gaps

    tokens, gaps = asyncio.run(scenario())
    assert tokens == expected
    assert max(gaps) < max(0.5 * alone, 0.05)
    assert any(thread.name.startswith("tokenize") for thread in threading.enumerate())


def test_front_stays_light() -> None:
    """What a front process imports brings neither torch nor Transformers along."""
    code = (
        "import sys, headrace.front.generator, headrace.front.tokenizer, headrace.model.hub;"
        "sys.exit(','.join(m for m in ('torch', 'transformers', 'numba') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
