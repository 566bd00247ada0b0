"""`headrace serve`."""

from headrace.cli.options import with_settings
from headrace.core.config import Config


@with_settings(Config)
def serve(config: Config) -> None:
    """Serve a model through the OpenAI HTTP API until interrupted."""
    from headrace.api.server import serve as run_server

    run_server(config)
