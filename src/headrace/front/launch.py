"""The front of an engine: its tokenizer, its defaults, and a generator over an engine process of its own."""

from collections.abc import Callable
from pathlib import Path

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


async def launch_generator(
    config: EngineConfig,
    *,
    chat_template: Path | None = None,
    generation_config: bool = True,
    progress: Callable[[str, float], None] | None = None,
) -> Generator:
    """Start an engine process and put a generator in front of it; `generator.client.close()` ends it.

    Raises:
        HeadraceError: the engine cannot start, or its tokenizer or template cannot be read.
    """
    from headrace.cluster.local import launch

    client = await launch(config, progress)
    try:
        tokenizer, defaults = load_front(client.info, config.model, chat_template, generation_config)
        return Generator(client, tokenizer, defaults, config.model.seed)
    except BaseException:
        await client.close()
        raise
