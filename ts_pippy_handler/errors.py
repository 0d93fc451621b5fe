"""The exception tree: every failure a user can meet, with its HTTP status and a machine-readable code.

    PippyError                    500  internal
    ├── LoadError                 500  load_failed       the model cannot be served; raised before READY
    │   ├── ConfigError           500  bad_config        a key of model-config.yaml or a command-line option
    │   ├── CheckpointError       500  bad_checkpoint    a weight file is missing, damaged or does not fit
    │   └── UnsupportedModelError 500  unsupported_model the architecture cannot be split exactly
    ├── InvalidRequestError       400  invalid_request   what the client sent cannot be honoured
    ├── NotFoundError             404  not_found         a path or a model that is not here
    ├── OverloadedError           429  overloaded        more requests than the configured limits
    ├── ServerError               502  server_failed     a server refuses a command of ours or breaks off
    ├── DrainingError             503  draining          the model takes no new requests any more
    └── PipelineError             503  pipeline_failed   a rank died, stopped or raised while serving
        └── RankLostError         503  pipeline_failed   a rank is gone: its connection closed

Knows nothing of TorchServe: the handlers turn these into responses.
"""

from __future__ import annotations

_MOST_CHARS = 1_000
"""Of a message that is sent: what a client wrote may be megabytes, and must not come back to it as such."""


class PippyError(Exception):
    """Base of all errors of this package; its text is fit to be shown to a user."""

    status = 500
    """HTTP status of the response."""
    code = "internal"
    """Stable machine-readable name, sent as ``error.code``."""

    @property
    def message(self) -> str:
        """The text as clients get it: without what would make it very long."""
        text = str(self)
        return text if len(text) <= _MOST_CHARS else text[: _MOST_CHARS - 1] + "…"

    def as_dict(self) -> dict[str, dict[str, str]]:
        """Return the JSON body of an error response."""
        return {"error": {"code": self.code, "message": self.message}}


class LoadError(PippyError):
    """The model cannot be loaded."""

    code = "load_failed"


class ConfigError(LoadError):
    """A configuration value is missing, misspelt or out of range."""

    code = "bad_config"


class CheckpointError(LoadError):
    """A checkpoint file is missing, damaged, or does not hold what the model needs."""

    code = "bad_checkpoint"


class UnsupportedModelError(LoadError):
    """The architecture cannot be split into stages without changing its answers."""

    code = "unsupported_model"


class InvalidRequestError(PippyError):
    """The request cannot be honoured as sent."""

    status = 400
    code = "invalid_request"


class NotFoundError(PippyError):
    """The path or the model that was asked for is not here."""

    status = 404
    code = "not_found"


class OverloadedError(PippyError):
    """The request queue is full."""

    status = 429
    code = "overloaded"


class DrainingError(PippyError):
    """The model finishes what it has accepted, and takes nothing new."""

    status = 503
    code = "draining"


class ServerError(PippyError):
    """A server that a command of ours talks to cannot be reached, refuses, or breaks off."""

    status = 502
    code = "server_failed"


class PipelineError(PippyError):
    """A pipeline rank failed while requests were running."""

    status = 503
    code = "pipeline_failed"


class RankLostError(PipelineError):
    """The connection to a rank is closed: its process is gone."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return the text of another library's exception as one line of at most ``limit`` characters, to be quoted."""
    lines = (line.strip() for line in str(error).splitlines())
    text = "; ".join(line for line in lines if line).replace(":; ", ": ") or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
