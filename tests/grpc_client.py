"""TorchServe's gRPC inference API, its messages described here instead of generated.

Source: TorchServe 0.12 ``frontend/server/src/main/resources/proto/inference.proto``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "org.pytorch.serve.grpc.inference"
_STRING, _BYTES, _MESSAGE = 9, 12, 11


def _messages() -> tuple[Any, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="inference.proto", package=_PACKAGE, syntax="proto3")
    request = file.message_type.add(name="PredictionsRequest")
    request.field.add(name="model_name", number=1, type=_STRING, label=1)
    request.field.add(name="model_version", number=2, type=_STRING, label=1)
    entry = request.nested_type.add(name="InputEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=_STRING, label=1)
    entry.field.add(name="value", number=2, type=_BYTES, label=1)
    kind = f".{_PACKAGE}.PredictionsRequest.InputEntry"
    request.field.add(name="input", number=3, type=_MESSAGE, label=3, type_name=kind)
    response = file.message_type.add(name="PredictionResponse")
    response.field.add(name="prediction", number=1, type=_BYTES, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{_PACKAGE}.{each.name}") for each in (request, response))
    one, other = (message_factory.GetMessageClass(each) for each in found)
    return one, other


_Request, _Response = _messages()


class GrpcClient:
    """Sends requests to the inference port of a TorchServe on loopback."""

    def __init__(self, port: int, key: str) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._metadata = (("protocol", "gRPC"), ("session_id", "1"), ("authorization", f"Bearer {key}"))

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def predict(self, model: str, body: Mapping[str, Any] | bytes, *, timeout_s: float = 30.0) -> bytes:
        """Call ``Predictions``."""
        call = self._channel.unary_unary(self._path("Predictions"), _serialize, _Response.FromString)
        answer: bytes = call(_request(model, body), timeout=timeout_s, metadata=self._metadata).prediction
        return answer

    def stream(self, model: str, body: Mapping[str, Any] | bytes, *, timeout_s: float = 30.0) -> Iterator[bytes]:
        """Call ``StreamPredictions``; the iterator ends with the stream."""
        call = self._channel.unary_stream(self._path("StreamPredictions"), _serialize, _Response.FromString)
        for answer in call(_request(model, body), timeout=timeout_s, metadata=self._metadata):
            yield answer.prediction

    def _path(self, method: str) -> str:
        return f"/{_PACKAGE}.InferenceAPIsService/{method}"


def _request(model: str, body: Mapping[str, Any] | bytes) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(dict(body)).encode()
    return _Request(model_name=model, input={"data": data})


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
