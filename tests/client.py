"""HTTP to one TorchServe on loopback, with its tokens. Knows nothing of how it was started."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Api = Literal["inference", "management"]
NO_ANSWER = (OSError, http.client.HTTPException)
"""What a request raises when the connection is refused or cut."""


@dataclass(frozen=True)
class Response:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body, which must be UTF-8."""
        return self.body.decode()

    def json(self) -> Any:
        """Return the parsed body."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise AssertionError(f"status {self.status}, not JSON: {self.body[:500]!r}") from None


class Client:
    """Sends requests to ``ports``, with the keys of ``key_file`` when there is one."""

    def __init__(self, key_file: Path | None) -> None:
        self.ports: dict[str, int] = {"inference": 0, "management": 0}
        self.key_file = key_file

    def post(
        self,
        name: str,
        body: bytes | str | dict[str, Any] | list[Any],
        content_type: str | None = None,
        *,
        timeout_s: float = 120.0,
    ) -> Response:
        """Send a request to a model: a dictionary or list as JSON, a string as plain text, bytes as they are."""
        if isinstance(body, dict | list):
            body, content_type = json.dumps(body).encode(), content_type or "application/json"
        elif isinstance(body, str):
            body, content_type = body.encode(), content_type or "text/plain"
        headers = {"Content-Type": content_type} if content_type else {}
        return self.request("inference", "POST", f"/predictions/{name}", body, headers, timeout_s=timeout_s)

    def post_all(self, name: str, bodies: Sequence[Any], *, timeout_s: float = 300.0) -> list[Response]:
        """Send all requests at once, each on its own connection; a body may be a pair with its content type."""
        pairs = [body if isinstance(body, tuple) else (body, None) for body in bodies]
        with ThreadPoolExecutor(len(pairs)) as pool:
            return list(pool.map(lambda pair: self.post(name, *pair, timeout_s=timeout_s), pairs))

    def health(self, name: str, *, method: str = "POST", timeout_s: float = 30.0) -> Response:
        """Ask a model how it is."""
        path, body = f"/predictions/{name}/1.0/v1/health", b"{}" if method == "POST" else None
        return self.request("inference", method, path, body, timeout_s=timeout_s)

    def manage(self, method: str, path: str, *, timeout_s: float = 120.0) -> Response:
        """Send a request to the management address."""
        return self.request("management", method, path, timeout_s=timeout_s)

    def request(
        self,
        api: Api,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 30.0,
    ) -> Response:
        """Send any request on a connection of its own.

        Raises:
            OSError, http.client.HTTPException: See ``NO_ANSWER``.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[api], timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request(method, path, body, {**(headers or {}), **self.authorization(api)})
            answer = connection.getresponse()
            return Response(answer.status, dict(answer.getheaders()), answer.read())

    def authorization(self, api: Api = "inference") -> dict[str, str]:
        """Return the header with the token that TorchServe wants to see."""
        return {} if self.key_file is None else {"Authorization": f"Bearer {self.key(api)}"}

    def key(self, api: Api = "inference") -> str:
        """Return the token that TorchServe wants to see; any will do when there is no key file."""
        return "none" if self.key_file is None else str(json.loads(self.key_file.read_text())[api]["key"])
