"""The handler module that goes into the archive. TorchServe wants exactly one class defined in it."""

from ts_pippy_handler import TextGenerationHandler


class PippyHandler(TextGenerationHandler):
    """Serves text as the package does; which model, and on how many GPUs, is in model-config.yaml."""
