"""The requests of a bench, from a file, and a progress bar over their tokens.

Plain data; knows neither how they are run nor what is measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ts_pippy_handler.config import Int
from ts_pippy_handler.errors import ConfigError
from ts_pippy_handler.validation import describe_errors, show

_REFRESH_PER_S = 2  # drawing takes time from rank 0

Advance = Callable[[int], None]
"""Called with a number of new tokens."""


class WorkloadRequest(BaseModel):
    """One request of a workload file; other keys are the business of who made the file."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    id: Int | str | None = Field(None, description="a whole number or a text")
    prompt_token_ids: Annotated[list[Int], Field(min_length=1)] | None = Field(
        None, description="a list of at least one token id"
    )
    prompt: Annotated[str, Field(min_length=1)] | None = Field(None, description="a text that is not empty")
    """The same prompt as text; only a server can be sent it."""
    max_tokens: Int = Field(ge=1)
    """New tokens; always all of them, since the end of a sequence is ignored."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests to run, in order."""

    file: Path
    requests: list[WorkloadRequest]

    def name(self, index: int) -> str:
        """Return how a message names a request."""
        return f"{self.file.name}: requests[{index}]"


def read_workload(file: Path, *, need: str = "prompt_token_ids") -> Workload:
    """Read ``{"requests": [{"prompt_token_ids": [...], "max_tokens": N}, ...]}``.

    Args:
        file: The file.
        need: The field that each request must have for its prompt.

    Raises:
        ConfigError: If the file is missing or wrong, naming the field, what it holds and what is allowed.
    """
    try:
        content = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--workload {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"--workload {file}: not JSON: {error}") from error
    items = content.get("requests") if isinstance(content, dict) else None
    if not isinstance(items, list) or not items:
        seen = items if isinstance(content, dict) else content
        raise ConfigError(f"--workload {file}: requests: must be a list of at least one request, got {show(seen)}")
    requests = [_request(file, index, item, need) for index, item in enumerate(items)]
    names = [str(request.id) for request in requests]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"--workload {file}: requests: the id {twice!r} occurs more than once")
    return Workload(file=file, requests=requests)


def _request(file: Path, index: int, item: object, need: str) -> WorkloadRequest:
    where = f"requests[{index}]"
    if not isinstance(item, dict):
        raise ConfigError(f"--workload {file}: {where}: must be an object, got {show(item)}")
    try:
        request = WorkloadRequest.model_validate(item)
    except ValidationError as error:
        raise ConfigError(f"--workload {file}: {describe_errors(error, WorkloadRequest, item, where)}") from error
    if getattr(request, need) is None:
        raise ConfigError(f"--workload {file}: {where}.{need}: missing, a value is required")
    return request if request.id is not None else request.model_copy(update={"id": index})


@contextmanager
def progress_of(workload: Workload) -> Iterator[Advance]:
    """Show a bar of new tokens on standard error, where that is a terminal."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    total = sum(request.max_tokens for request in workload.requests)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, refresh_per_second=_REFRESH_PER_S
    ) as bar:
        task = bar.add_task("new tokens", total=total)
        yield lambda num_tokens: bar.advance(task, num_tokens)
