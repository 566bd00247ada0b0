"""The front of an engine: its tokenizer, its defaults, and a generator over an engine process of its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.cluster.places import ANYWHERE, Place, split_machine
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.events import EngineInfo
from headrace.core.sampling import SamplingParams
from headrace.front.generation_config import default_sampling
from headrace.front.generator import Generator
from headrace.front.tokenizer import Tokenizer
from headrace.model import hub


def load_front(
    info: EngineInfo, config: ModelConfig, chat_template: Path | None, generation_config: bool
) -> tuple[Tokenizer, SamplingParams]:
    """The tokenizer and default sampling parameters that go with a ready engine.

    Args:
        info: of the engine.
        config: its `tokenizer` wins over the model's own.
        chat_template: file that replaces the model's template.
        generation_config: take defaults from the model's `generation_config.json`.

    Raises:
        ModelError: one of the files cannot be read.
    """
    folder = Path(info.path)
    own = hub.resolve_tokenizer(config.tokenizer, config.revision) if config.tokenizer else folder
    return Tokenizer.load(own, chat_template), default_sampling(folder) if generation_config else SamplingParams()


@dataclass(frozen=True)
class Worker:
    """A generator over an engine process, and what that engine was configured with."""

    generator: Generator
    config: EngineConfig


async def launch_workers(
    config: EngineConfig, workers: int, progress: Callable[[str, float], None] | None = None
) -> list[Worker]:
    """Start several engine processes with the same model, each on its part of the machine, one after the other.

    Without `--threads` each has as many as its place has cores.

    Raises:
        ConfigError: the machine is too small for so many.
        HeadraceError: an engine cannot start; none is left then.
    """
    started: list[Worker] = []
    try:
        for number, place in enumerate(split_machine(workers)):
            model = config.model
            if started and model.device == "auto":  # all like the first: not on CPU because an accelerator is missing
                model = replace(model, device=started[0].generator.client.info.device)
            own = replace(config, model=replace(model, threads=model.threads or len(place.cpus)))
            generator = await launch_generator(own, progress=progress, place=place, sharers=workers - number)
            started.append(Worker(generator, own))
    except BaseException:
        for worker in started:
            await worker.generator.client.close()
        raise
    return started


async def launch_generator(
    config: EngineConfig,
    *,
    chat_template: Path | None = None,
    generation_config: bool = True,
    progress: Callable[[str, float], None] | None = None,
    place: Place = ANYWHERE,
    sharers: int = 1,
) -> Generator:
    """Start an engine process and put a generator in front of it; `generator.client.close()` ends it.

    Args:
        config: of the engine.
        chat_template: file that replaces the model's template.
        generation_config: take defaults from the model's `generation_config.json`.
        progress: told how far loading is.
        place: where it runs.
        sharers: engines that are about to be started on this host, this one counted.

    Raises:
        HeadraceError: the engine cannot start, or its tokenizer or template cannot be read.
    """
    from headrace.cluster.local import launch

    client = await launch(config, progress, place, sharers)
    try:
        tokenizer, defaults = load_front(client.info, config.model, chat_template, generation_config)
        return Generator(client, tokenizer, defaults, config.model.seed)
    except BaseException:
        await client.close()
        raise
