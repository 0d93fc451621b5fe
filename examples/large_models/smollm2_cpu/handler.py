"""The handler module that goes into the archive. TorchServe wants exactly one class defined in it."""

from ts_pippy_handler import TextGenerationHandler


class SmolLM2Handler(TextGenerationHandler):
    """Serves text as the package does; everything else is in model-config.yaml."""
