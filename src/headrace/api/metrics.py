"""What the server counts, named as vLLM names it with the prefix `headrace:`."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from headrace.api.store_metrics import store_metrics
from headrace.core.events import EngineStats
from headrace.offline.jobs.progress import Progress

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_E2E = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_MODEL = ("model_name",)


class Metrics:
    """The server's own numbers; the engine's are read from its statistics when a scrape comes.

    Args:
        model: label `model_name` of every sample.
    """

    def __init__(self, model: str) -> None:
        self._registry = registry = CollectorRegistry()
        self._engine = _EngineCollector(model)
        registry.register(self._engine)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"headrace:{name}", help, _MODEL, buckets=buckets, registry=registry).labels(model)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"headrace:{name}", help, _MODEL, registry=registry).labels(model)

        self.ttft = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT)
        self.itl = histogram("inter_token_latency_seconds", "Time between two output tokens.", _ITL)
        self.e2e = histogram("e2e_request_latency_seconds", "From a request's arrival to its last token.", _E2E)
        self.prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output = histogram("request_generation_tokens", "Output tokens of a sequence.", _TOKENS)
        self.batches = 0
        self.batch: Progress | None = None
        self.http_active = 0
        self.loop_lag = 0.0
        self._model = model
        self._finished = Counter(
            "headrace:request_success",
            "Sequences finished, by reason.",
            (*_MODEL, "finished_reason"),
            registry=registry,
        )
        self._http = Counter(
            "headrace:http_requests",
            "HTTP responses, by route and status code.",
            (*_MODEL, "handler", "status"),
            registry=registry,
        )
        self._batch_lines = Counter(
            "headrace:batch_requests",
            "Lines of batches that have their result.",
            (*_MODEL, "result"),
            registry=registry,
        )
        running = "Lines of the running batch that are being generated."
        gauge("batches_unfinished", "Batches that have not ended.").set_function(lambda: self.batches)
        gauge("batch_requests_running", running).set_function(lambda: self.batch.running if self.batch else 0)
        gauge("batch_seconds_left", "Expected time to the end of the running batch; 0 without one.").set_function(
            lambda: (self.batch.eta_s or 0.0) if self.batch else 0.0
        )
        gauge("http_requests_active", "HTTP requests being served.").set_function(lambda: self.http_active)
        gauge("event_loop_lag_seconds", "How late the front's event loop ran last.").set_function(lambda: self.loop_lag)

    def finish(self, reason: str) -> None:
        """Count a finished sequence."""
        self._finished.labels(self._model, reason).inc()

    def begin_batch(self, completed: int, failed: int) -> None:
        """A batch is taken up that has so many results already."""
        self._counted = {"completed": completed, "failed": failed}

    def tell_batch(self, progress: Progress | None) -> None:
        """Where the running batch stands; None: none runs."""
        self.batch = progress
        if progress is not None:
            for result, now in (("completed", progress.completed), ("failed", progress.failed)):
                self._batch_lines.labels(self._model, result).inc(max(0, now - self._counted[result]))
                self._counted[result] = now

    def respond(self, handler: str, status: str) -> None:
        """Count an HTTP response."""
        self._http.labels(self._model, handler, status).inc()

    def text(self, stats: EngineStats | None) -> bytes:
        """The exposition; without statistics (the engine is dead) the engine's part is left out."""
        self._engine.stats = stats
        text: bytes = generate_latest(self._registry)
        return text


class _EngineCollector:
    """Turns the engine's latest statistics into samples."""

    def __init__(self, model: str) -> None:
        self.stats: EngineStats | None = None
        self._model = model

    def describe(self) -> Iterator[Metric]:
        """Names known beforehand: none, so that registering reads nothing."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Samples of one scrape."""
        stats = self.stats
        yield self._gauge("engine_up", "1 while the engine answers.", stats is not None)
        if stats is None:
            return
        used = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        yield self._gauge("num_requests_running", "Sequences that hold KV pages.", stats.running)
        yield self._gauge("num_requests_waiting", "Sequences in the queue.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV pages that running sequences hold, 0 to 1.", used)
        yield self._gauge("kv_cache_pages", "KV pages of the pool.", stats.pages_total)
        counters = {
            "prompt_tokens": ("Prompt tokens of admitted sequences.", stats.prompt_tokens_total),
            "generation_tokens": ("Tokens generated.", stats.output_tokens_total),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix index.", stats.prompt_tokens_total),
            "prefix_cache_hits": ("Prompt tokens whose KV was at hand.", stats.hit_tokens_total),
            "computed_tokens": ("Tokens that went through the model.", stats.computed_tokens_total),
            "num_preemptions": ("Running sequences sent back to the queue.", stats.preemptions_total),
            "abandoned_steps": ("Offline steps given up for online work.", stats.abandoned_total),
            "steps": ("Forward passes completed.", stats.steps_total),
            "step_seconds": ("Time spent in forward passes.", stats.step_seconds_total),
            "compute_seconds": ("Compute-bound work of forward passes, by the profile.", stats.compute_seconds_total),
            "memory_seconds": ("Memory-bound work of forward passes, by the profile.", stats.memory_seconds_total),
            "attention_seconds": ("Time spent in attention.", stats.attention_seconds_total),
            "store_loads": ("Stored prefixes asked for.", stats.loads_total),
            "store_loads_failed": ("Loads of which some was missing or wrong, and computed.", stats.loads_failed_total),
            "store_load_wait_seconds": ("Time forward passes waited for KV.", stats.load_wait_seconds_total),
        }
        for name, (help, value) in counters.items():
            family = CounterMetricFamily(f"headrace:{name}", help, labels=_MODEL)
            family.add_metric((self._model,), value)
            yield family
        yield self._by_source(stats)
        if stats.store:
            yield from store_metrics(self._model, stats)

    def _by_source(self, stats: EngineStats) -> Metric:
        family = CounterMetricFamily(
            "headrace:prompt_tokens_by_source",
            "Prompt tokens of admitted sequences by where their KV came from; they add up to prompt_tokens.",
            labels=(*_MODEL, "source"),
        )
        computed = stats.prompt_tokens_total - stats.hit_tokens_total
        for source, tokens in {"computed": computed, "pool": 0, **stats.hit_tokens_by_source}.items():
            family.add_metric((self._model, source), tokens)
        return family

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"headrace:{name}", help, labels=_MODEL)
        family.add_metric((self._model,), float(value))
        return family
