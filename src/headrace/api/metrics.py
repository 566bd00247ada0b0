"""What the server counts, named as vLLM names it with the prefix `headrace:`."""

from headrace.api.histogram import Counter, Histogram, sample
from headrace.core.events import EngineStats

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_E2E = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """The server's own numbers; the engine's are read from its statistics when a scrape comes.

    Args:
        model: label `model_name` of every sample.
    """

    def __init__(self, model: str) -> None:
        self._labels = {"model_name": model}
        self.ttft = Histogram(
            "headrace:time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT
        )
        self.itl = Histogram("headrace:inter_token_latency_seconds", "Time between two output tokens.", _ITL)
        self.e2e = Histogram(
            "headrace:e2e_request_latency_seconds", "From a request's arrival to its last token.", _E2E
        )
        self.prompt = Histogram("headrace:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output = Histogram("headrace:request_generation_tokens", "Output tokens of a sequence.", _TOKENS)
        self.finished = Counter(
            "headrace:request_success_total", "Sequences finished, by reason.", ("finished_reason",)
        )
        self.http = Counter(
            "headrace:http_requests_total", "HTTP responses, by route and status code.", ("handler", "status")
        )
        self.http_active = 0
        self.loop_lag = 0.0

    def text(self, stats: EngineStats | None) -> str:
        """The exposition; without statistics (the engine is dead) the engine's part is left out."""
        lines: list[str] = []
        for metric in (self.ttft, self.itl, self.e2e, self.prompt, self.output, self.finished, self.http):
            lines += metric.lines(self._labels)
        lines += self._gauge("http_requests_active", "HTTP requests being served.", self.http_active)
        lines += self._gauge("event_loop_lag_seconds", "How late the front's event loop ran last.", self.loop_lag)
        lines += self._gauge("engine_up", "1 while the engine answers.", 0 if stats is None else 1)
        if stats is not None:
            lines += self._engine(stats)
        return "\n".join(lines) + "\n"

    def _engine(self, stats: EngineStats) -> list[str]:
        used = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        lines = self._gauge("num_requests_running", "Sequences that hold KV pages.", stats.running)
        lines += self._gauge("num_requests_waiting", "Sequences in the queue.", stats.waiting)
        lines += self._gauge("kv_cache_usage_perc", "Share of KV pages that running sequences hold, 0 to 1.", used)
        lines += self._gauge("kv_cache_pages", "KV pages of the pool.", stats.pages_total)
        counters = {
            "prompt_tokens_total": ("Prompt tokens of admitted sequences.", stats.prompt_tokens_total),
            "generation_tokens_total": ("Tokens generated.", stats.output_tokens_total),
            "prefix_cache_queries_total": ("Prompt tokens looked up in the prefix index.", stats.prompt_tokens_total),
            "prefix_cache_hits_total": ("Prompt tokens whose KV was at hand.", stats.hit_tokens_total),
            "computed_tokens_total": ("Tokens that went through the model.", stats.computed_tokens_total),
            "num_preemptions_total": ("Running sequences sent back to the queue.", stats.preemptions_total),
            "abandoned_steps_total": ("Offline steps given up for online work.", stats.abandoned_total),
            "steps_total": ("Forward passes completed.", stats.steps_total),
            "step_seconds_total": ("Time spent in forward passes.", stats.step_seconds_total),
        }
        for name, (help, value) in counters.items():
            lines += sample(f"headrace:{name}", help, "counter", value, self._labels)
        return lines

    def _gauge(self, name: str, help: str, value: float) -> list[str]:
        return sample(f"headrace:{name}", help, "gauge", value, self._labels)
