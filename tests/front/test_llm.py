"""LLM and AsyncLLM over real engines: a tiny model with random weights."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM
from vocabularies import byte_level, save_tokenizer

import headrace
from headrace import LLM, AsyncLLM, GrammarSpec, SamplingParams
from headrace.bench.tiny_models import save
from headrace.core.errors import ConfigError, InvalidRequest
from headrace.front.options import engine_config
from headrace.front.output import RequestOutput, TextDelta

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS = {"max_model_len": 256, "kv_memory": "4MiB", "threads": 1, "dtype": "float32", "seed": 5, "store": False}
MESSAGES = [{"role": "user", "content": "the fox"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tokenizer(byte_level(), path)
    return save("llama", path, vocab_size=byte_level().get_vocab_size())


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_queue=6, **OPTIONS) as made:
        yield made


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    out = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=count, min_new_tokens=count, temperature=None
    )
    return out[0, len(prompt) :].tolist()


def test_every_kind_of_prompt_gives_plain_transformers_tokens(llm: LLM, folder: Path) -> None:
    text = "The quick brown fox"
    ids = llm.tokenizer.encode(text)
    suppressed = SamplingParams(temperature=0, max_tokens=12, min_tokens=12)  # as `min_new_tokens`
    expected = greedy(folder, ids, 12)
    for prompts in (text, [text], ids, [ids], {"prompt": text}, {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]):
        (output,) = llm.generate(prompts, suppressed)
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].text == llm.tokenizer.continuation(expected)
        assert output.prompt_token_ids == ids
        assert output.prompt == (text if text in str(prompts) else None)
    assert llm.generate([], GREEDY) == []


def test_more_prompts_than_the_queue_holds_come_back_in_order(llm: LLM) -> None:
    prompts = [[10 + i, 20, 30 + i] for i in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 7, ignore_eos=True, n=1 + i % 3) for i in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=True)
    assert [output.prompt_token_ids for output in outputs] == prompts
    for output, wanted in zip(outputs, params, strict=True):
        assert [c.index for c in output.outputs] == list(range(wanted.n))
        assert all(len(c.token_ids) == wanted.max_tokens and c.finish_reason == "length" for c in output.outputs)
    assert llm.stats().pages_used == 0


def test_stop_strings_end_a_sequence_and_free_its_pages(llm: LLM) -> None:
    whole = llm.generate("the fox", GREEDY)[0].outputs[0]
    stop = whole.text[3:5]
    (output,) = llm.generate("the fox", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, stop=(stop,)))
    (cut,) = output.outputs
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert len(cut.token_ids) < 12
    llm.close()
    assert (llm.stats().pages_used, llm.stats().running, llm.stats().waiting) == (0, 0, 0)


def test_seeds_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, seed=3, n=3, logprobs=2, ignore_eos=True)
    first, again = llm.generate("the fox", params), llm.generate("the fox", params)
    assert first[0].outputs == again[0].outputs
    assert len({tuple(c.token_ids) for c in first[0].outputs}) == 3
    for completion in first[0].outputs:
        assert completion.logprobs is not None
        assert [entry.token for entry in completion.logprobs] == completion.token_ids
        assert all(len(entry.top) >= 2 for entry in completion.logprobs)
    free = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    one, two = (llm.generate("the fox", free)[0].outputs[0].token_ids for _ in range(2))
    assert one != two


def test_prompt_logprobs_come_once(llm: LLM) -> None:
    (output,) = llm.generate("the fox", SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [entry.token for entry in output.prompt_logprobs[1:] if entry] == output.prompt_token_ids[1:]


def test_chat_renders_and_answers_one_or_several_conversations(llm: LLM) -> None:
    (one,) = llm.chat(MESSAGES, GREEDY)
    assert one.prompt == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    assert one.prompt_token_ids == llm.tokenizer.encode(one.prompt)
    several = llm.chat([MESSAGES, MESSAGES], GREEDY)
    assert [output.outputs for output in several] == [one.outputs] * 2
    with pytest.raises(InvalidRequest):
        llm.chat([], GREEDY)


def test_grammar_constrains_the_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, grammar=GrammarSpec("regex", "(yes|no) [0-9]{3}"))
    (output,) = llm.generate("the fox", params)
    assert output.outputs[0].text[:2] in ("ye", "no")
    assert output.outputs[0].finish_reason == "stop"


def test_one_wrong_prompt_and_nothing_runs(llm: LLM) -> None:
    before = llm.stats().requests_total
    for prompts, params in (
        (["fine", "x" * 5000], GREEDY),
        (["fine", [10**6]], GREEDY),
        (["fine", ""], GREEDY),
        (["fine", 3.5], GREEDY),
        (["fine", {"text": "x"}], GREEDY),
        (["fine"], [GREEDY, GREEDY]),
        (["fine"], SamplingParams(top_p=0)),
    ):
        with pytest.raises(InvalidRequest):
            llm.generate(prompts, params)  # type: ignore[arg-type]
    assert llm.stats().requests_total == before
    assert llm.stats().waiting == 0


def test_works_inside_a_running_event_loop(llm: LLM) -> None:
    expected = llm.generate("the fox", GREEDY)[0].outputs

    async def cell() -> None:
        assert llm.generate("the fox", GREEDY)[0].outputs == expected

    asyncio.run(cell())


def test_interrupted_generation_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("the fox", GREEDY)[0].outputs
    steps, poll = 0, llm.client.poll

    def interrupted() -> list[object]:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise KeyboardInterrupt
        return poll()

    monkeypatch.setattr(llm.client, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6]] * 4, GREEDY)
    monkeypatch.undo()
    assert llm.generate("the fox", GREEDY)[0].outputs == expected
    assert llm.stats().pages_used == 0


def test_generate_without_parameters_ends_after_16_tokens_and_chat_does_not(llm: LLM) -> None:
    def longest(outputs: list[RequestOutput]) -> int:
        return max(len(output.outputs[0].token_ids) for output in outputs)

    assert 1 < longest(llm.generate(["the fox"] * 4)) <= 16
    assert longest(llm.generate(["the fox"] * 4, SamplingParams())) > 16
    assert longest(llm.chat([MESSAGES] * 4)) > 16


def test_the_package_lists_what_it_exports() -> None:
    assert {"LLM", "AsyncLLM", "SamplingParams"} <= set(dir(headrace))


def test_options_take_our_names_and_vllms() -> None:
    config = engine_config("m", {"enable_prefix_caching": False, "kv_memory": "1GiB", "max_num_seqs": 3, "seed": None})
    assert (config.model.model, config.cache.prefix_caching, config.cache.kv_memory) == ("m", False, 1 << 30)
    assert (config.scheduler.max_num_seqs, config.model.seed) == (3, 0)
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        engine_config("m", {"max_modl_len": 3})
    with pytest.raises(ConfigError, match="--kv-memory 8GiB"):
        engine_config("m", {"gpu_memory_utilization": 0.5})
    with pytest.raises(ConfigError, match="not one of"):
        engine_config("m", {"dtype": "int3"})
    with pytest.raises(ConfigError, match="given twice"):
        engine_config("m", {"enable_prefix_caching": False, "prefix_caching": True})


def test_async_llm_streams_from_a_process_of_its_own(llm: LLM, folder: Path) -> None:
    expected = llm.generate("the fox", GREEDY)[0].outputs[0]
    (chat,) = llm.chat(MESSAGES, GREEDY)

    async def scenario() -> int:
        async with AsyncLLM(str(folder), **OPTIONS) as remote:
            pid = remote.generator.client.info.pid

            async def run(i: int) -> list[TextDelta]:
                return [delta async for delta in remote.generate("the fox", GREEDY, request_id=f"r{i}")]

            for parts in await asyncio.gather(*map(run, range(5))):
                assert "".join(part.text for part in parts) == expected.text
                assert [token for part in parts for token in part.tokens] == expected.token_ids
                assert parts[-1].finish == "length"
            answer = [delta.text async for delta in remote.chat(MESSAGES, GREEDY)]
            assert "".join(answer) == chat.outputs[0].text
            assert sum([len(delta.tokens) async for delta in remote.generate("the fox")]) <= 16
            async for _ in remote.generate("the fox", SamplingParams(n=3, ignore_eos=True)):
                break  # and go away
            with pytest.raises(InvalidRequest):
                await anext(remote.generate([10**6], GREEDY))
            while (await remote.stats()).requests_total.get("abort", 0) < 3:
                await run(9)  # the counters come with the engine's messages
            assert (await remote.stats()).pages_used == 0
            assert psutil.pid_exists(pid)
        return pid

    pid = asyncio.run(asyncio.wait_for(scenario(), 120))
    assert not psutil.pid_exists(pid)
