"""Run a workload against any server that speaks OpenAI's completions, streaming.

Every wait has a limit, and the first request that fails ends the run. Knows no torch and nothing of our own server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import httpx2

from ts_pippy_handler.bench import Report, Served, summarise
from ts_pippy_handler.errors import ConfigError, ServerError, one_line
from ts_pippy_handler.validation import show
from ts_pippy_handler.workload import Advance, Workload, WorkloadRequest, progress_of

_CONNECT_TIMEOUT_S = 10.0
_END = "[DONE]"


@dataclass(frozen=True, kw_only=True)
class Server:
    """Which server, and how to ask it."""

    url: str
    """Base of the API, for instance ``http://127.0.0.1:8000/v1``; ``/completions`` is added."""
    model: str
    """The name sent with each request."""
    timeout_s: float = 600.0
    """Longest a request may take."""
    api_key: str | None = None
    prompts: Literal["ids", "text"] = "ids"

    @property
    def endpoint(self) -> str:
        """Where requests go."""
        return self.url.rstrip("/").removesuffix("/completions") + "/completions"

    @property
    def prompt_field(self) -> str:
        """The field of a workload's requests that is sent."""
        return "prompt_token_ids" if self.prompts == "ids" else "prompt"


def run(server: Server, workload: Workload, *, concurrency: int | None = None) -> Report:
    """Run every request, at most ``concurrency`` at a time; None sends all at once.

    Raises:
        ServerError: If the server cannot be reached, refuses a request, or ends a stream early.
    """
    with progress_of(workload) as advance:
        started = time.monotonic()
        served = asyncio.run(_serve_all(server, workload, concurrency or len(workload.requests), advance))
        wall_s = time.monotonic() - started
    return summarise(workload, served, wall_s=wall_s, concurrency=concurrency)


async def _serve_all(server: Server, workload: Workload, concurrency: int, advance: Advance) -> list[Served]:
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    # A proxy of the environment would be measured too. A connection waits for nobody but the server.
    limits = httpx2.Limits(max_connections=None)
    timeout = httpx2.Timeout(server.timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None)
    slots = asyncio.Semaphore(concurrency)
    async with httpx2.AsyncClient(headers=headers, limits=limits, timeout=timeout, trust_env=False) as client:

        async def one(index: int, request: WorkloadRequest) -> Served:
            async with slots:
                try:
                    async with asyncio.timeout(server.timeout_s):
                        return await _serve(client, server, request, advance)
                except ServerError as error:
                    raise ServerError(f"{workload.name(index)}: {error}") from error
                except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
                    raise ConfigError(f"--url {server.url}: {one_line(error)}") from error
                except httpx2.ConnectError as error:
                    raise ServerError(f"{server.endpoint}: cannot connect: {one_line(error)}") from error
                except (TimeoutError, httpx2.TimeoutException) as error:
                    limit = f"no answer within {server.timeout_s:g} s (--timeout)"
                    if isinstance(error, httpx2.ConnectTimeout):
                        limit = f"no connection within {_CONNECT_TIMEOUT_S:g} s"
                    raise ServerError(f"{workload.name(index)}: {server.endpoint}: {limit}") from error
                except httpx2.SSEError as error:
                    raise ServerError(
                        f"{workload.name(index)}: {server.endpoint}: no stream: {one_line(error)}"
                    ) from error
                except httpx2.HTTPError as error:
                    raise ServerError(f"{workload.name(index)}: the connection was cut: {one_line(error)}") from error

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(index, each)) for index, each in enumerate(workload.requests)]
        except* (ServerError, ConfigError) as failed:
            error: BaseException = failed
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None
    return [task.result() for task in tasks]


async def _serve(client: httpx2.AsyncClient, server: Server, request: WorkloadRequest, advance: Advance) -> Served:
    body = {
        "model": server.model,
        "prompt": getattr(request, server.prompt_field),
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    served = Served(started_s=time.monotonic())
    usage: dict[str, Any] = {}
    async with client.stream("POST", server.endpoint, json=body) as response:
        if response.status_code != httpx2.codes.OK:
            raise ServerError(f"{server.endpoint}: status {response.status_code}: {_message(await response.aread())}")
        is_whole = False
        async for event in httpx2.EventSource(response):
            if event.data == _END:
                is_whole = True
                continue  # to the end of the body, so that the connection can be used again
            chunk = _parsed(event.data)
            usage = chunk["usage"] if isinstance(chunk.get("usage"), dict) else usage
            if any(choice.get("text") or choice.get("token_ids") for choice in _choices(chunk)):
                served.arrivals_s.append(time.monotonic())
                advance(1)
    if not is_whole:
        raise ServerError(f"the stream was cut after {len(served.arrivals_s)} chunks: no 'data: {_END}' came")
    num_prompt = len(request.prompt_token_ids) if server.prompts == "ids" and request.prompt_token_ids else None
    served.num_prompt = usage.get("prompt_tokens", num_prompt)
    served.num_output = usage.get("completion_tokens", len(served.arrivals_s))
    return served


def _parsed(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise ServerError(f"the stream holds something else than a JSON object: {show(data)}")
    if "error" in chunk:
        raise ServerError(f"the stream ended with an error: {_message(data.encode())}")
    return chunk


def _choices(chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
    choices = chunk.get("choices")
    yield from (each for each in choices if isinstance(each, dict)) if isinstance(choices, list) else ()


def _message(body: bytes) -> str:
    """Return what an error body says: OpenAI's, vLLM's or TorchServe's shape, else its beginning."""
    text = body.decode("utf-8", "replace").strip()
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    for _ in range(2):
        if isinstance(found, dict):
            found = found.get("error") or found.get("message") or found.get("detail")
    return " ".join(found.split()) if isinstance(found, str) else show(text)
