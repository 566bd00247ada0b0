"""Decode steps of fixed shape, unrecorded on CPU: the same numbers as the way that takes any plan."""

import dataclasses
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import transformers
from engine_world import config, drain, engine, request, tokens
from families import _COMMON as COMMON
from families import FAMILIES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.bench.forced import ForcedRun
from headrace.bench.parity_reference import Reference
from headrace.bench.random_decoder import random_decoder
from headrace.bench.tiny_models import save
from headrace.core.errors import ConfigError
from headrace.core.plan import Chunk, StepPlan
from headrace.engine.build import EngineParts, build, default_kv_bytes
from headrace.engine.core import Engine
from headrace.engine.graphs import DecodePath, StaticStep, row_buckets
from headrace.engine.kv_flow import RecordedFlow
from headrace.engine.kv_group import KVGroup, KVShape
from headrace.engine.runner import Runner
from headrace.kernels.attention import backend_for
from headrace.kernels.torch_attention import TorchAttention
from headrace.model.decoder import Decoder
from headrace.model.loader import load

PAGE = 8
#: Prompt and length of each sequence: page edges, one row alone at the end, one past a window and several pages.
PROMPTS, LENGTHS = (1, 7, 8, 9, 63), (3, 12, 17, 30, 66)


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2", "qwen3-moe", "opt"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load(save(request.param, tmp_path_factory.mktemp(request.param)), threads=1)


def pool(decoder: Decoder, kv_dtype: str = "float32", pages: int = 40) -> tuple[KVGroup, TorchAttention]:
    """Device planes full of NaN but for the scratch page, as pages are that a failed sequence left."""
    shape, backend = decoder.shape, TorchAttention("cpu")
    group = KVGroup(
        KVShape(range(shape.num_layers), range(shape.kv_heads), shape.head_dim, PAGE, kv_dtype), pages, backend
    )
    assert group.scratch_page == pages
    for layer in range(shape.num_layers):
        for planes in group.planes(layer):
            planes[:, :pages] = torch.nan
    return group, backend


class TapeRecorder(TorchDispatchMode):
    """Like a CUDA graph: a step's operations with the tensors they met, to be run again over the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.tape.append((func, args, kwargs or {}, out))
        return out

    def record(self, step: StaticStep) -> "TapeRecorder":
        graph = TapeRecorder()
        with graph:
            step.compute()
        return graph

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, before in self.tape:
            again = func(*args, **kwargs)
            for old, new in zip(*(tree_leaves(out) for out in (before, again)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def run(decoder: Decoder, static: bool, kv_dtype: str = "float32", recorder: Any = None) -> list[torch.Tensor]:
    group, backend = pool(decoder, kv_dtype)
    ids = [np.random.default_rng(i).integers(3, decoder.shape.vocab_size, length) for i, length in enumerate(LENGTHS)]
    forced = ForcedRun(decoder, group, backend, [each.tolist() for each in ids])
    path = DecodePath(decoder, group, backend, 6, 96, recorder) if static else None
    forced.prefill(PROMPTS)
    return forced.decode(PROMPTS, path)


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Largest difference in standard deviations of the logits; NaN if there is one."""
    return max(float((a - b).abs().max() / b.std()) for a, b in zip(found, wanted, strict=True))


def test_the_same_logits_in_every_bucket(decoder: Decoder) -> None:
    """1 to 5 rows in buckets of 1, 2, 4 and 8, contexts of 1 to 9 pages in buckets of 8 and 13."""
    wanted = run(decoder, static=False)
    assert worst(run(decoder, static=True), wanted) < 1e-4
    assert [len(rows) for rows in wanted] == [length - prompt for prompt, length in zip(PROMPTS, LENGTHS)]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "qwen3-moe", "opt", "granite"])
def test_a_recorded_step_takes_other_inputs(family: str) -> None:
    """Nothing of the step that was recorded is left in the record: every later step of its bucket replays it."""
    kind, own = FAMILIES["mistral-window" if family == "mistral" else family]
    settings = getattr(transformers, kind)(**{**COMMON, **own, "num_hidden_layers": 2})
    decoder = random_decoder(settings, torch.float32, torch.device("cpu"))
    graphs: list[TapeRecorder] = []

    class Recorder(TapeRecorder):
        def record(self, step: StaticStep) -> TapeRecorder:
            graphs.append(super().record(step))
            return graphs[-1]

    assert worst(run(decoder, True, recorder=Recorder()), run(decoder, False)) < 1e-4
    assert len(graphs) == 6
    assert sum(graph.replays for graph in graphs) == max(n - p for n, p in zip(LENGTHS, PROMPTS))


def test_a_step_that_cannot_be_recorded_runs_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Refusing:
        def record(self, step: StaticStep) -> NoReturn:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    decoder = load(save("llama", tmp_path), threads=1)
    group, backend = pool(decoder)
    forced = ForcedRun(decoder, group, backend, [[5, 6, 7]] * 3)
    path = DecodePath(decoder, group, backend, 4, 64, Refusing())
    batch = forced.batch([(0, 0, 1), (1, 0, 1)])
    assert path.accepts(StepPlan(1, (chunk(), chunk())))
    assert worst([path.run(batch)], [forced.compute(batch)]) < 1e-4
    assert not path.accepts(StepPlan(1, (chunk(), chunk())))
    assert [record.getMessage() for record in caplog.records] == [
        "decode steps run without CUDA graphs: 2 rows of 8 pages cannot be recorded: "
        "operation not permitted when stream is capturing"
    ]


def test_kv_stored_in_16_bits(tmp_path: Path) -> None:
    decoder = load(save("gemma2", tmp_path), threads=1)
    assert worst(run(decoder, True, "bfloat16"), run(decoder, False, "bfloat16")) < 1e-4


def test_padding_touches_no_page_but_the_scratch_page(tmp_path: Path) -> None:
    decoder = load(save("qwen2", tmp_path), threads=1)
    group, backend = pool(decoder)
    forced = ForcedRun(decoder, group, backend, [[5, 6, 7]] * 3)
    path = DecodePath(decoder, group, backend, 8, 64)
    path.run(forced.batch([(0, 0, 1), (1, 0, 1), (2, 0, 1)]))
    for layer in range(decoder.shape.num_layers):
        for planes in group.planes(layer):
            written = ~planes.isnan().all(-1)
            assert int(written[:, :-1].sum()) == 3 * decoder.shape.kv_heads  # one slot of each sequence
            assert planes[:, -1, 0].abs().sum() > 0
            assert not planes[:, -1, 1:].any()


class Operations(TorchDispatchMode):
    """Names of the operations that run, those inside composite ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        with self:
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put_", "index_put") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self.seen.add(f"{name} by a mask" if masked else name)
        return func(*args, **(kwargs or {}))


#: What a CUDA device cannot do without the host: hand over a number, find out how large a result is, make a tensor of
#: Python numbers (`lift_fresh`).
HOST = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "lift_fresh", "index by a mask",
        "index_put_ by a mask", "index_put by a mask", "repeat_interleave"}  # fmt: skip


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_operation_of_a_step_needs_the_host(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be said on CPU of whether a step can be captured: modules as on CUDA, operations as they are called."""
    kind, own = FAMILIES[family]
    settings = getattr(transformers, kind)(**{**COMMON, **own, "num_hidden_layers": 2})
    decoder = random_decoder(settings, torch.float32, torch.device("cpu"))
    group, backend = pool(decoder)
    path = DecodePath(decoder, group, backend, 4, 64)
    batch = ForcedRun(decoder, group, backend, [[5, 6, 7]] * 3).batch([(0, 0, 1), (1, 0, 1), (2, 0, 1)])
    path.run(batch)
    if decoder._tables is not None:  # on CPU alone its tables grow with the positions it is asked for
        monkeypatch.setattr(decoder._tables, "_device", torch.device("cuda"))
    operations = Operations()
    with torch.inference_mode(), operations:
        next(iter(path._steps.values())).compute()
    assert operations.seen & HOST == set()
    assert {"mm", "addmm", "linear"} & operations.seen


def test_buckets_of_rows() -> None:
    assert row_buckets(64) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    for most in range(1, 300):
        found = row_buckets(most)
        assert found == sorted(set(found))
        assert found[-1] >= most > ([0, *found][-2])


def chunk(**fields: object) -> Chunk:
    return dataclasses.replace(Chunk("a", 5, 1, 1, "decode"), **fields)  # type: ignore[arg-type]


def test_accepts_nothing_but_single_decode_rows(tmp_path: Path) -> None:
    decoder = load(save("llama", tmp_path), threads=1)
    group, backend = pool(decoder)
    path = DecodePath(decoder, group, backend, 4, 64)
    assert path.accepts(StepPlan(1, (chunk(), chunk(seq="b"))))
    for other in (chunk(length=2), chunk(sample=0), chunk(phase="prefill")):
        assert not path.accepts(StepPlan(1, (chunk(), other)))


def test_refuses_what_would_copy_too_much(tmp_path: Path) -> None:
    decoder = load(save("llama", tmp_path), threads=1)
    group, backend = pool(decoder)
    page_bytes = group.shape.page_bytes // 3
    path = DecodePath(decoder, group, backend, 8, 512, most_copied=4 * 16 * page_bytes)
    short, long = chunk(start=8 * PAGE - 1), chunk(start=16 * PAGE - 1)  # 8 and 16 pages
    assert path.accepts(StepPlan(1, (short,) * 8))
    assert path.accepts(StepPlan(1, (long,) * 4))
    assert not path.accepts(StepPlan(1, (long,) * 5))


def test_a_device_gives_most_of_its_memory_but_no_more_than_is_of_use() -> None:
    gib = 1 << 30
    assert default_kv_bytes("cpu", 8 * gib, 1000 * gib) == int(3.2 * gib)
    assert default_kv_bytes("cpu", 100 * gib, 1000 * gib) == 4 * gib
    assert default_kv_bytes("cuda", 100 * gib, 1000 * gib) == 80 * gib
    assert default_kv_bytes("cuda", 100 * gib, 2 * gib) == 8 * gib


def test_planes_of_the_host_are_refused(tmp_path: Path) -> None:
    decoder = load(save("llama", tmp_path), threads=1)
    backend = backend_for("cpu", threads=1)
    group = KVGroup(KVShape(range(3), range(2), 16, PAGE, "float32"), 8, backend)
    with pytest.raises(ConfigError, match="not in those of 'numba'"):
        DecodePath(decoder, group, backend, 4, 64)


class Counted(DecodePath):
    """Counts the plans it runs."""

    runs = 0

    def run(self, batch):  # type: ignore[no-untyped-def]
        self.runs += 1
        return super().run(batch)


def with_path(model: Path, depth: int = 1, flow: RecordedFlow | None = None) -> tuple[Engine, EngineParts, Counted]:
    """An engine over device planes in the host's memory, its decode steps of fixed shape."""
    settings = config(model, pipeline_depth=depth, max_num_batched_tokens=24)
    parts = build(settings)
    backend = TorchAttention("cpu")
    group = KVGroup(parts.group.shape, parts.group.pages, backend)
    group.allocator, group.index = parts.group.allocator, parts.group.index
    path = Counted(parts.decoder, group, backend, 16, parts.info.max_model_len)
    runner = Runner(
        parts.decoder,
        group,
        backend,
        parts.sampler,
        16,
        parts.info.max_model_len,
        flow=None if flow is None else (flow, flow),
        depth=depth,
        decode_path=path,
    )
    parts = dataclasses.replace(parts, group=group, runner=runner)
    return Engine(settings, parts), parts, path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("mistral", tmp_path_factory.mktemp("tiny"))


def test_an_engine_decodes_on_it(model: Path) -> None:
    """Arrivals, ends, prefix hits and page edges: tokens as plain Transformers', decode steps on the path."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 300, length).tolist() for length in (1, 8, 15, 33, 40)]
    requests = [request(f"r{i}", prompt, 6 + 4 * i) for i, prompt in enumerate(prompts)]
    running, parts, path = with_path(model)
    reference = Reference(model)
    for _ in range(2):  # the second time with prefix hits
        for name, output in tokens(drain(running, requests)).items():
            assert reference.judge(prompts[int(name[1:])], output).holds
    stats = running.stats()
    assert stats.hit_tokens_total > 0
    assert 0 < path.runs < stats.steps_total
    assert parts.group.allocator.used == 0


def test_log_probabilities_and_sampling_are_the_same(model: Path) -> None:
    wanted = {"logprobs": 3, "prompt_logprobs": 2, "temperature": 0.8, "seed": 5}
    items = [request(f"r{i}", list(range(5, 20 + 9 * i)), 12, **wanted) for i in range(3)]
    with_, without = drain(with_path(model)[0], items), drain(engine(config(model))[0], items)
    assert tokens(with_) == tokens(without)
    for name, deltas in with_.items():
        for ours, theirs in zip(deltas, without[name], strict=True):
            assert [p.token for p in ours.logprobs or []] == [p.token for p in theirs.logprobs or []]
            ours_p, theirs_p = ([p.logprob for p in d.logprobs or []] for d in (ours, theirs))
            assert ours_p == pytest.approx(theirs_p, abs=1e-3)
            assert (ours.prompt_logprobs is None) == (theirs.prompt_logprobs is None)


def test_with_plans_in_flight_or_a_store_the_other_way_is_taken(model: Path) -> None:
    items = [request(f"r{i}", list(range(5, 15 + 9 * i)), 10) for i in range(4)]
    wanted = tokens(drain(engine(config(model))[0], items))
    deep, _, _ = with_path(model, depth=3)
    assert tokens(drain(deep, items)) == wanted
    flow = RecordedFlow()
    stored, _, path = with_path(model, flow=flow)
    assert tokens(drain(stored, items)) == wanted
    assert path.runs == 0
    assert len({plan for _, plan, _ in flow.calls}) == stored.stats().steps_total
