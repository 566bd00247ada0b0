"""What the soak tests of the KV store share: a tiny model, real `headrace serve` processes, load, and right answers."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from headrace.bench.server_process import free_port
from headrace.store.catalog.local import LocalCatalog
from headrace.store.layout import aligned
from headrace.store.maintenance import Verified
from headrace.store.maintenance import verify as verify_tier
from headrace.store.tiers.files import FileTier

#: Machines stop for minutes at times; a condition that holds at last is met, however late.
PATIENCE = 600.0
CHUNK = 16
LAYERS, HEADS, HEAD_DIM = 4, 2, 16
#: Of a part in float32: a header, and K and V of each layer.
PART = 4096 + LAYERS * aligned(2 * HEADS * CHUNK * HEAD_DIM * 4)
NEW_TOKENS = 6

Right = dict[tuple[int, ...], tuple[int, ...]]


def prompts(seed: int, documents: int = 8, per_document: int = 4) -> list[tuple[int, ...]]:
    """Prompts of token ids, some over each of some documents; in all far more than the small tiers hold."""
    rng = random.Random(seed)

    def text(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 300) for _ in range(length))

    made = []
    for _ in range(documents):
        document = text(rng.randrange(150, 400))
        made += [
            document[: rng.randrange(100, len(document))] + text(rng.randrange(1, 60)) for _ in range(per_document)
        ]
    return made


@dataclass(frozen=True)
class Answer:
    """Of one prompt: what was generated, and how many of its tokens were not computed."""

    tokens: tuple[int, ...]
    cached: int


def await_true(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Return once a condition holds; fail when it never does."""
    deadline = time.monotonic() + patience
    look = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        look.wait(0.02)  # between two looks


class Refused(Exception):
    """The server answered with an error."""


class Server:
    """`headrace serve` in a session of its own, not ready yet.

    Args:
        model: its folder.
        home: `HEADRACE_HOME`.
        flags: besides those all of them have.
        inside: words before the command, such as those that enter a namespace of its own.
    """

    def __init__(self, model: Path, home: Path, *flags: str, inside: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        command = [sys.executable, "-m", "headrace.cli", "serve", str(model), "--port", str(self.port)]
        common = ["--kv-memory", "1MiB", "--threads", "1", "--chunk-tokens", str(CHUNK), "--replication", "all"]
        self.log = home / f"log-{self.port}-{time.monotonic_ns()}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*inside, *command, *common, *flags],
                stdout=log,
                stderr=log,
                env={**environ, "HEADRACE_HOME": str(home), "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=PATIENCE,
            trust_env=False,
            limits=httpx.Limits(max_connections=64),
        )

    def ready(self) -> "Server":
        """Wait until it answers."""

        def answers() -> bool:
            assert self.process.poll() is None, self.words()
            try:
                return self.http.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        await_true(answers, "a server that is ready")
        return self

    def words(self) -> str:
        """What it said."""
        return self.log.read_text("utf-8", "replace")[-4000:]

    def ask(self, prompt: Sequence[int], salt: str | None = None) -> Answer:
        """The greedy answer to a prompt of token ids.

        Raises:
            Refused: it answers with an error.
            httpx.TransportError: the server is gone.
        """
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if salt is not None:
            body["cache_salt"] = salt
        response = self.http.post("/v1/completions", json=body)
        if response.status_code != 200:
            raise Refused(response.text)
        found = response.json()
        details = found["usage"].get("prompt_tokens_details") or {}
        return Answer(tuple(found["choices"][0]["token_ids"]), details.get("cached_tokens") or 0)

    def metrics(self) -> dict[str, float]:
        """Samples by name; those of tiers as `name@tier`, those of sources as `name@source`."""
        text = self.http.get("/metrics").text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                of = sample.labels.get("tier") or sample.labels.get("source")
                name = sample.name.removeprefix("headrace:").removesuffix("_total") + (f"@{of}" if of else "")
                found[name] = found.get(name, 0.0) + sample.value
        return found

    def tier(self, name: str) -> float:
        """A figure of its only `dir` tier."""
        found = [v for k, v in self.metrics().items() if k.startswith(f"store_tier_{name}@dir:")]
        return found[0] if found else 0.0  # not told yet, soon after the start

    def idle(self) -> None:
        """Wait until no page and no sequence is held: nothing has leaked."""

        def free() -> bool:
            now = self.metrics()
            return now["num_requests_running"] == now["num_requests_waiting"] == now["kv_cache_usage_perc"] == 0

        await_true(free, "nothing held any more")

    def pids(self) -> list[int]:
        """Of all its processes that live."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                    # A zombie may still have threads that end, and with them what they hold open and locked.
                    dead = state == "Z" and len(os.listdir(folder / "task")) <= 1
                    if int(session) == self.process.pid and not dead:
                        found.append(int(folder.name))
        return found

    def worker(self) -> int:
        """The engine's process."""
        (worker,) = [
            pid for pid in self.pids() if b"headrace.cluster.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return worker

    def kill(self, pid: int | None = None) -> None:
        """Kill -9 all of its processes, or one; return when all are gone: the others follow by themselves."""
        with contextlib.suppress(ProcessLookupError):
            if pid is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        await_true(lambda: not self.pids(), "all processes gone")

    def stop(self) -> None:
        """End as on SIGTERM, after a look for leaks."""
        assert self.process.poll() is None, self.words()
        self.idle()
        self.process.terminate()
        assert self.process.wait(PATIENCE) == 0, self.words()
        await_true(lambda: not self.pids(), "all processes gone")
        self.http.close()
        assert "Traceback" not in self.words(), self.words()


@contextmanager
def serving(model: Path, home: Path, *flags: str, inside: Sequence[str] = ()) -> Iterator[Server]:
    """A server that is ready; stopped, with a look for leaks, at the end; killed where a test fails."""
    server = Server(model, home, *flags, inside=inside)
    try:
        yield server.ready()
        server.stop()
    finally:
        if server.pids():
            server.kill()


@dataclass
class Load:
    """Clients that ask at random until told to stop; each answer is compared with the right one.

    Attributes:
        right: the right answers.
        answered: answers so far.
        cached: tokens of their prompts that were not computed.
        wrong: what was wrong with which.
        gone: clients that found no server any more.
        ending: the server is about to be killed, and that is no fault of it.
    """

    server: Server
    right: Right
    seed: int
    clients: int = 6
    answered: int = 0
    cached: int = 0
    wrong: list[str] = field(default_factory=list)
    gone: int = 0
    ending: bool = False

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(self.clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        asked = list(self.right)
        while not self._stop.is_set():
            prompt = rng.choice(asked)
            try:
                answer = self.server.ask(prompt)
            except (httpx.TransportError, Refused) as error:
                with self._lock:
                    self.gone += 1
                    if not self.ending:
                        self.wrong.append(repr(error))
                return
            with self._lock:
                self.answered += 1
                self.cached += answer.cached
                if answer.tokens != self.right[prompt]:
                    self.wrong.append(f"{len(prompt)} tokens, {answer.cached} cached: {answer.tokens}")

    def more(self, count: int) -> None:
        """Wait for so many answers more."""
        wanted = self.answered + count
        await_true(lambda: self.answered >= wanted or self.wrong, f"{count} more answers")
        self.check()

    def check(self) -> None:
        """Everybody is being served, and rightly."""
        assert not self.wrong, f"{self.wrong[:3]}\n{self.server.words()}"

    def stop(self) -> None:
        """Let clients finish."""
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


@contextmanager
def loaded(server: Server, right: Right, seed: int, clients: int = 6) -> Iterator[Load]:
    """Load on a server, all of it answered rightly."""
    load = Load(server, right, seed, clients)
    try:
        yield load
    finally:
        load.stop()
    load.check()


def answers(server: Server, asked: Sequence[tuple[int, ...]]) -> Right:
    """The answers of a server to each prompt."""
    with ThreadPoolExecutor(4) as pool:
        return {prompt: answer.tokens for prompt, answer in zip(asked, pool.map(server.ask, asked))}


def files(folder: Path) -> dict[int, int]:
    """Inode and bytes of all parts that lie in a `dir` tier, those being written too."""
    found: dict[int, int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith((".kv", ".part")):
                with contextlib.suppress(FileNotFoundError):
                    stat = os.lstat(os.path.join(place, name))
                    found[stat.st_ino] = stat.st_size
    return found


def held(folder: Path) -> int:
    """Bytes that lay in a folder at one moment between two looks: what both of them saw."""
    first, second = files(folder), files(folder)
    return sum(min(nbytes, second[inode]) for inode, nbytes in first.items() if inode in second)


def verify(tier: FileTier) -> Verified:
    """Read everything in a tier that no server uses: nothing is wrong, nothing half written, and not too much."""
    found = verify_tier(tier, LocalCatalog(tier))  # its scan removes what the dead have left
    assert (found.wrong, found.unreadable) == ([], [])
    assert found.nbytes <= tier.capacity
    assert not list(tier.folder.rglob("*.part"))
    return found


def verify_by_command(folder: Path, capacity: str, home: Path, *words: str) -> dict[str, Any]:
    """What `headrace store verify --json` says of a tier."""
    command = [sys.executable, "-m", "headrace.cli", "store", "verify", "--json", *words]
    done = subprocess.run(
        [*command, "--tier", f"dir:{folder}:{capacity}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HEADRACE_HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    (row,) = json.loads(done.stdout)["tiers"]
    return dict(row)
