import asyncio
import gc
from collections.abc import AsyncIterator

import pytest
from scripted_engine import ScriptedEngine
from vocabularies import byte_level, front

from headrace.core.errors import EngineDead, InvalidRequest, QueueFull
from headrace.core.request import Request
from headrace.core.sampling import GrammarSpec, SamplingParams
from headrace.front.generator import Generator
from headrace.front.output import TextDelta
from headrace.front.tokenizer import Tokenizer

EOS = 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return front(byte_level())


def text_script(tokenizer: Tokenizer, text: str, end: bool = True):
    ids = tokenizer.encode(text) + ([EOS] if end else [])
    return lambda request, position: ids[position % len(ids)]


async def collect(stream: AsyncIterator[TextDelta]) -> dict[int, tuple[str, TextDelta, list[int]]]:
    found: dict[int, tuple[str, TextDelta, list[int]]] = {}
    async for delta in stream:
        text, _, tokens = found.get(delta.index, ("", delta, []))
        found[delta.index] = (text + delta.text, delta, tokens + delta.tokens)
    return found


async def settled(engine: ScriptedEngine) -> None:
    """Everything cancelled has ended: no request runs, no iterator is open, no task but this one is left."""
    gc.collect()
    for _ in range(20):
        await asyncio.sleep(0)
    assert engine.running == {}
    assert engine.queues == {}
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("burst", [1, 3])
def test_text_ends_at_end_of_sequence(tokenizer: Tokenizer, burst: int) -> None:
    text = "Grüße \U0001f469‍\U0001f467 und mehr!"

    async def scenario() -> None:
        engine = ScriptedEngine(tokenizer.vocab_size, [EOS], text_script(tokenizer, text), burst=burst)
        generator = Generator(engine, tokenizer)
        out = await collect(generator.generate([5, 6], SamplingParams(max_tokens=100, logprobs=0), request_id="a"))
        joined, last, tokens = out[0]
        assert joined == text
        assert (last.finish, last.stop_reason, last.prompt_tokens, last.cached_tokens) == ("stop", None, 2, 3)
        assert tokens[-1] == EOS
        await settled(engine)

    asyncio.run(scenario())


def test_stop_string_over_two_tokens_ends_text_and_engine(tokenizer: Tokenizer) -> None:
    async def scenario(include: bool) -> None:
        script = text_script(tokenizer, "one two STOP three four five six", end=False)
        engine = ScriptedEngine(tokenizer.vocab_size, [EOS], script, max_model_len=4000)
        params = SamplingParams(stop=("o ST", "OP th"), include_stop_str_in_output=include, logprobs=1)
        parts, tokens = [], 0
        async for delta in await Generator(engine, tokenizer).start([5], params, request_id="a"):
            parts.append(delta.text)
            tokens += len(delta.tokens)
            assert delta.logprobs is not None
            assert len(delta.logprobs) == len(delta.tokens)
        assert "".join(parts) == ("one two ST" if include else "one tw")
        assert (delta.finish, delta.stop_reason) == ("stop", "o ST")
        assert engine.aborted == ["a-0"]
        assert engine.queues == {}  # nobody needs to close a stream read to its end
        await settled(engine)
        assert engine.produced["a-0"] < 100  # of 3999 it was allowed

    asyncio.run(scenario(False))
    asyncio.run(scenario(True))


def test_length_flushes_what_was_held(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        ids = tokenizer.encode("abc é")
        script = text_script(tokenizer, "abc é", end=False)
        engine = ScriptedEngine(tokenizer.vocab_size, [EOS], script)
        params = SamplingParams(max_tokens=len(ids), stop=("é!",))
        joined, last, _ = (await collect(Generator(engine, tokenizer).generate([5], params, request_id="a")))[0]
        assert (joined, last.finish) == ("abc é", "length")

    asyncio.run(scenario())


def test_n_sequences_have_their_own_seeds_and_all_finish(tokenizer: Tokenizer) -> None:
    def script(request: Request, position: int) -> int:
        assert request.params.seed is not None
        return EOS if position == request.params.seed - 40 else 70

    async def scenario() -> None:
        engine = ScriptedEngine(tokenizer.vocab_size, [EOS], script)
        out = await collect(
            Generator(engine, tokenizer).generate([5], SamplingParams(n=5, seed=41), request_id="x", priority=3)
        )
        assert {i: len(tokens) for i, (_, _, tokens) in out.items()} == {0: 2, 1: 3, 2: 4, 3: 5, 4: 6}
        assert [request.id for request in engine.submitted] == [f"x-{i}" for i in range(5)]
        assert all(request.params.n == 1 and request.priority == 3 for request in engine.submitted)
        await settled(engine)

    asyncio.run(scenario())


def test_seed_is_drawn_once_per_request(tokenizer: Tokenizer) -> None:
    async def seeds(seed: int) -> list[int | None]:
        engine = ScriptedEngine(tokenizer.vocab_size, [EOS], lambda request, position: EOS)
        generator = Generator(engine, tokenizer, seed=seed)
        for name in "ab":
            await collect(generator.generate([5], SamplingParams(), request_id=name))
        return [request.params.seed for request in engine.submitted]

    first, again, other = (asyncio.run(seeds(seed)) for seed in (7, 7, 0))
    assert first == again != other
    assert first[0] != first[1]


def test_what_the_context_cannot_hold_is_refused_with_its_numbers(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(tokenizer.vocab_size, [EOS], max_model_len=20)
        generator = Generator(engine, tokenizer)
        for length, tokens in ((20, None), (21, 1), (15, 6)):
            with pytest.raises(InvalidRequest, match=f"length is 20 tokens.*{length} in the prompt") as caught:
                await generator.start([5] * length, SamplingParams(max_tokens=tokens), request_id="a")
            assert caught.value.code == "context_length_exceeded"
        assert engine.submitted == []
        out = await collect(generator.generate([70] * 15, SamplingParams(), request_id="a"))
        assert len(out[0][2]) == 5  # what the context had left

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], SamplingParams(), "prompt"),
        ([5, -1], SamplingParams(), "prompt"),
        ([100_000], SamplingParams(), "prompt"),
        ([5], SamplingParams(temperature=-1), "temperature"),
        ([5], SamplingParams(stop=("x" * 5000,)), "stop"),
        ([5], SamplingParams(min_tokens=500), "min_tokens"),
        ([5], SamplingParams(logit_bias={100_000: 1}), "logit_bias"),
    ],
)
def test_wrong_requests_never_reach_the_engine(
    tokenizer: Tokenizer, prompt: list[int], params: SamplingParams, param: str
) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(tokenizer.vocab_size, [EOS])
        with pytest.raises(InvalidRequest) as caught:
            await Generator(engine, tokenizer).start(prompt, params, request_id="a")
        assert caught.value.param == param
        assert engine.submitted == []

    asyncio.run(scenario())


def test_wrong_grammar_is_refused(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(tokenizer.vocab_size, [EOS])
        params = SamplingParams(grammar=GrammarSpec("regex", "(unclosed"))
        with pytest.raises(InvalidRequest):
            await Generator(engine, tokenizer).start([5], params, request_id="a")
        assert engine.submitted == []

    asyncio.run(scenario())


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("way", ["close", "break", "cancel", "raise", "never read", "dropped"])
def test_whoever_goes_away_leaves_nothing_behind(tokenizer: Tokenizer, n: int, way: str) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(tokenizer.vocab_size, [EOS], lambda request, position: 70, max_model_len=10**6)
        generator = Generator(engine, tokenizer)
        params = SamplingParams(n=n)

        async def consume(seen: asyncio.Event, fail: bool = False) -> None:
            async for _ in generator.generate([5], params, request_id="a"):
                seen.set()
                if fail:
                    raise KeyError("the consumer's own fault")

        if way == "close":
            stream = await generator.start([5], params, request_id="a")
            await anext(stream)
            await stream.aclose()
            await stream.aclose()
        elif way == "break":
            async for _ in generator.generate([5], params, request_id="a"):
                break
        elif way == "cancel":
            seen = asyncio.Event()
            task = asyncio.create_task(consume(seen))
            await seen.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del task
        elif way == "raise":
            with pytest.raises(KeyError):
                await consume(asyncio.Event(), fail=True)
        elif way == "never read":
            stream = await generator.start([5], params, request_id="a")
            await asyncio.sleep(0)
            await stream.aclose()
        else:
            stream = await generator.start([5], params, request_id="a")
            await anext(stream)
            del stream
        await settled(engine)
        assert engine.aborted == [f"a-{i}" for i in range(n)]  # told, not left to notice a closed iterator

    asyncio.run(scenario())


def test_full_queue_gives_back_what_was_taken(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(tokenizer.vocab_size, [EOS], lambda request, position: 70, 10**6, capacity=3)
        generator = Generator(engine, tokenizer)
        with pytest.raises(QueueFull):
            await generator.start([5], SamplingParams(n=4), request_id="a")
        await settled(engine)
        stream = await generator.start([5], SamplingParams(n=3), request_id="b")
        await anext(stream)
        await stream.aclose()
        await settled(engine)

    asyncio.run(scenario())


@pytest.mark.parametrize("n", [1, 3])
def test_death_of_the_engine_reaches_the_consumer(tokenizer: Tokenizer, n: int) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(tokenizer.vocab_size, [EOS], lambda request, position: 70, 10**6)
        stream = await Generator(engine, tokenizer).start([5], SamplingParams(n=n), request_id="a")
        await anext(stream)
        engine.die()
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass
        await settled(engine)
        with pytest.raises(EngineDead):
            await Generator(engine, tokenizer).start([5], SamplingParams(), request_id="b")

    asyncio.run(scenario())


def test_slow_reader_holds_up_nobody_and_little_waits_for_it(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(tokenizer.vocab_size, [EOS], lambda request, position: 70)
        generator = Generator(engine, tokenizer)
        slow = await generator.start([5], SamplingParams(n=3, max_tokens=50), request_id="slow")
        await anext(slow)
        out = await collect(generator.generate([5], SamplingParams(max_tokens=200), request_id="fast"))
        assert len(out[0][2]) == 200
        assert slow._ready.qsize() <= 3
        await slow.aclose()
        await settled(engine)

    asyncio.run(scenario())
