"""Servers that share a tier's folder: what they may share they do, within its capacity, and nothing else."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_chat_model
from soak_world import (
    CHUNK,
    HEAD_DIM,
    LAYERS,
    PART,
    Right,
    Server,
    answers,
    await_true,
    held,
    loaded,
    prompts,
    serving,
    verify,
)

from headrace.store.tiers.dir import DirTier

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

CAPACITY = 2 << 20


def stored(folder: Path) -> int:
    """Sealed parts in a folder. A server's own figures stand still while it has nothing to compute."""
    return len(list(folder.rglob("*.kv")))


@contextmanager
def sampled(folder: Path) -> Iterator[list[int]]:
    """Bytes in a folder, looked at all the time."""
    samples: list[int] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.002):
            samples.append(held(folder))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def test_two_servers_on_one_folder_and_the_owner_is_killed(
    tmp_path: Path, home: Path, model: Path, right: Right
) -> None:
    folder = tmp_path / "tier"
    flags = ("--no-recompute", "--tier", f"dir:{folder}:{CAPACITY}")
    asked = list(right)
    owner = Server(model, home, *flags)
    try:
        owner.ready()
        with serving(model, home, *flags) as other, sampled(folder) as samples:
            answered = owner.ask(asked[0])
            assert answered.tokens == right[asked[0]]
            await_true(lambda: stored(folder) >= len(asked[0]) // CHUNK, "a prompt that is stored")
            there = other.ask(asked[0])
            assert there.tokens == right[asked[0]]
            assert there.cached == (len(asked[0]) - 1) // CHUNK * CHUNK  # each chunk that one wrote, the other read
            assert owner.ask(asked[0]).cached > 0

            with loaded(owner, right, 4, clients=4) as first, loaded(other, right, 5, clients=4) as second:
                first.more(len(right))
                second.more(len(right))
                first.ending = True
                owner.kill()
                second.more(len(right))
            written, read = other.tier("writes"), other.tier("reads")
            with loaded(other, right, 6) as alone:
                await_true(
                    lambda: other.tier("writes") >= written + 20 and other.tier("reads") >= read + 20,
                    "the heir saves and loads",
                )
                with serving(model, home, *flags) as back:
                    again = answers(back, asked)
                    assert again == right
                    assert back.tier("reads") > 0
            print(
                f"{first.answered} + {second.answered} answers of two, {alone.answered} of the heir; at most "
                f"{max(samples)} of {CAPACITY} bytes in {len(samples)} samples, parts of {PART}"
            )
            assert len(samples) > 100
            assert CAPACITY / 2 < max(samples) <= CAPACITY + PART
    finally:
        if owner.pids():
            owner.kill()
        owner.http.close()
    tier = DirTier(folder, CAPACITY)
    verify(tier)
    tier.close()


def test_models_dtypes_and_salts_never_share(tmp_path: Path, home: Path, model: Path) -> None:
    flags = ("--no-recompute", "--tier", f"dir:{tmp_path / 'tier'}:64MiB")
    tuned = tiny_chat_model.make(tmp_path / "tuned", num_hidden_layers=LAYERS, head_dim=HEAD_DIM)
    change_one_tensor(tuned)
    (prompt,) = prompts(9, documents=1, per_document=1)
    whole = (len(prompt) - 1) // CHUNK * CHUNK
    kinds = [(path, dtype) for path in (model, tuned) for dtype in ("float32", "bfloat16")]
    expected = 0
    plain: dict[tuple[Path, str], tuple[int, ...]] = {}
    for path, dtype in kinds:
        with serving(path, home, "--dtype", dtype, *flags) as server:
            for salt in (None, "mine", "yours"):
                answer = server.ask(prompt, salt)
                assert answer.cached == 0, f"{path.name} {dtype} {salt} reads what is another's"
                assert plain.setdefault((path, dtype), answer.tokens) == answer.tokens
            expected += 3 * (len(prompt) // CHUNK)
            await_true(lambda: stored(tmp_path / "tier") >= expected, "three prompts stored")  # noqa: B023
    assert len({plain[kind] for kind in kinds if kind[1] == "float32"}) == 2, "the tensor changes nothing"
    # Each finds its own again, in a new process.
    for path, dtype in kinds[::3]:
        with serving(path, home, "--dtype", dtype, *flags) as server:
            for salt in ("yours", None, "mine"):
                answer = server.ask(prompt, salt)
                assert (answer.tokens, answer.cached) == (plain[path, dtype], whole)
            assert server.ask(prompt, "nobody's").cached == 0


def change_one_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    weights[f"model.layers.{LAYERS - 1}.mlp.down_proj.weight"].neg_()
    save_file(weights, file, metadata={"format": "pt"})
