"""What crosses between ranks while serving: batches, activations and results, over torch.distributed.

Three kinds of messages, none of them pickled::

    rank 0 ──batch (msgpack)──▶ every other rank          gloo, waits for ever when idle
    rank i ──activations──────▶ rank i + 1                nccl where every rank has a GPU, else gloo
    last   ──token ids [R + 1]▶ rank 0                    as activations; element 0 repeats the batch number

Where rows ask for logprobs, or a batch for logits, those follow the token ids; both sides know the sizes from the
batch.

Gloo messages of both kinds share the ranks' one gloo group, told apart by tags: each group's thread wakes a hundred
times a second, and three groups on an idle rank were measured to use 1 % of a core. A receive that finds its peer gone
raises at once. A peer that is silent is the watchdog's business (:mod:`~ts_pippy_handler.watchdog`), which knows whose
fault it is; the limit of a receive here is far longer.
Knows tensors and their order; knows nothing of scheduling or of who started the ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from time import monotonic

import msgspec
import torch
import torch.distributed as dist

from ts_pippy_handler.errors import PipelineError, RankLostError, one_line
from ts_pippy_handler.meter import METER
from ts_pippy_handler.request import Batch, TokenLogprobs
from ts_pippy_handler.splitting import WireValue

_CONTROL, _DATA = 1, 2  # tags
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)


class Transport:
    """One rank's end of the data plane. Used by one thread.

    Args:
        device: Of the stage.
        step_timeout_s: Seconds that a step may take on a rank.
        num_in_flight: Batches that are under way at the same time, at most.
    """

    def __init__(self, device: torch.device, step_timeout_s: float, num_in_flight: int) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._device = device
        # A batch may have to wait for a step on each rank, and one more for the step that was running.
        self._timeout = timedelta(seconds=step_timeout_s * (self.world_size + 1))
        # nccl refuses two ranks on one GPU.
        on_gpu = device.type == "cuda" and torch.cuda.device_count() >= self.world_size
        self._nccl = dist.new_group(backend="nccl", timeout=self._timeout) if on_gpu else None
        self._wire_device = device if on_gpu else torch.device("cpu")
        self._num_in_flight = num_in_flight
        self._sent: deque[list[tuple[dist.Work, torch.Tensor]]] = deque([[]])
        """What was sent for each of the last batches: a tensor must live until its peer has taken it."""

    def send_batch(self, batch: Batch | None) -> None:
        """Tell every other rank of the next batch; None ends their loops."""
        if batch is not None:
            self._begin_batch()
        payload = b"" if batch is None else _encoder.encode(batch)
        size = torch.tensor([len(payload)])
        body = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else None
        for peer in range(1, self.world_size):
            self._send(size, peer, _CONTROL)
            if body is not None:
                self._send(body, peer, _CONTROL)

    def receive_batch(self) -> Batch | None:
        """Wait for the next batch; None means the ranks shall stop."""
        size = torch.zeros(1, dtype=torch.long)
        self._receive(size, 0, _CONTROL)
        if not int(size):
            return None
        body = torch.empty(int(size), dtype=torch.uint8)
        self._receive(body, 0, _CONTROL)
        self._begin_batch()
        return _decoder.decode(body.numpy().tobytes())

    def send_values(self, specs: Sequence[WireValue], values: Mapping[str, torch.Tensor]) -> None:
        """Send activations to the next rank, without waiting for it to take them."""
        for spec in specs:
            self._send(values[spec.name].to(self._wire_device).contiguous(), self.rank + 1, _DATA)

    def receive_values(self, specs: Sequence[WireValue], num_tokens: int) -> dict[str, torch.Tensor]:
        """Receive the activations of one batch from the previous rank."""
        values = {}
        for spec in specs:
            shape = [num_tokens if dim is None else dim for dim in spec.shape]
            tensor = torch.empty(shape, dtype=spec.dtype, device=self._wire_device)
            self._receive(tensor, self.rank - 1, _DATA)
            values[spec.name] = tensor.to(self._device)
        METER.received()
        return values

    def send_result(
        self,
        batch: Batch,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        logits: torch.Tensor | None,
    ) -> None:
        """Send the sampled tokens to rank 0, with the logprobs and the logits [R, V] that the batch asks for."""
        self._send(torch.tensor([batch.number, *token_ids]).to(self._wire_device), 0, _DATA)
        if logprobs:
            self._send(_flatten(logprobs).to(self._wire_device), 0, _DATA)
        if logits is not None and batch.return_logits:
            self._send(logits.to(self._wire_device, torch.float32).contiguous(), 0, _DATA)

    def receive_result(
        self, batch: Batch, vocab_size: int
    ) -> tuple[list[int], list[TokenLogprobs | None], torch.Tensor | None]:
        """Wait for the last rank's answer to ``batch``.

        Returns:
            The sampled tokens; their logprobs, an empty list when no row asks for them; the logits, when asked for.

        Raises:
            PipelineError: If a rank is gone, silent for too long, or answers another batch.
        """
        last = self.world_size - 1
        answer = torch.empty(1 + len(batch.sampled), dtype=torch.long, device=self._wire_device)
        self._receive(answer, last, _DATA)
        number, *token_ids = answer.tolist()
        if number != batch.number:
            raise PipelineError(f"the last stage answered batch {number}, but batch {batch.number} is next")
        logprobs: list[TokenLogprobs | None] = []
        widths = [None if row.num_logprobs is None else min(row.num_logprobs, vocab_size) for row in batch.sampled]
        size = sum(1 + 2 * width for width in widths if width is not None)
        if size:
            flat = torch.empty(size, dtype=torch.double, device=self._wire_device)
            self._receive(flat, last, _DATA)
            logprobs = _unflatten(flat.tolist(), widths)
        METER.received()
        if not batch.return_logits:
            return token_ids, logprobs, None
        logits = torch.empty(len(batch.sampled), vocab_size, device=self._wire_device)
        self._receive(logits, last, _DATA)
        return token_ids, logprobs, logits.cpu()

    def _begin_batch(self) -> None:
        """Let go of what was sent for the batch that must have been answered before this one could begin.

        Its messages have all been taken, so this does not wait. (A gloo send never says that it is completed:
        ``is_completed`` stays false until somebody waits.)
        """
        self._sent.append([])
        while len(self._sent) > self._num_in_flight:
            for work, _ in self._sent.popleft():
                try:
                    work.wait()
                except RuntimeError as error:
                    raise RankLostError(f"a rank stopped answering: {one_line(error, 200)}") from error

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        try:
            work = dist.isend(tensor, peer, group=self._group(tag), tag=tag)
        except RuntimeError as error:
            raise RankLostError(f"rank {peer} cannot be reached: {one_line(error, 200)}") from error
        if work is not None:
            self._sent[-1].append((work, tensor))

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        started = monotonic()
        try:
            work = dist.irecv(tensor, peer, group=self._group(tag), tag=tag)
            assert work is not None
            if tag == _DATA and self._nccl is None:
                work.wait(self._timeout)
            else:
                work.wait()  # the next batch may take for ever; nccl's group has the timeout
        except RuntimeError as error:
            if tag == _DATA and monotonic() - started >= self._timeout.total_seconds():
                raise PipelineError(f"rank {peer} was silent for {self._timeout.total_seconds():g} s") from error
            raise RankLostError(f"rank {peer} stopped answering: {one_line(error, 200)}") from error
        if tag == _DATA:
            METER.count_bytes(tensor.nbytes)

    def _group(self, tag: int) -> dist.ProcessGroup | None:
        """Return the group of a kind of message; None stands for the one of all ranks, which is gloo."""
        return self._nccl if tag == _DATA else None


def _flatten(logprobs: Sequence[TokenLogprobs | None]) -> torch.Tensor:
    """Return one row after the other: the chosen token's logprob, then an id and a logprob for each likely token."""
    values: list[float] = []
    for row in logprobs:
        if row is not None:
            values.append(row.logprob)
            values.extend(value for pair in row.top for value in pair)  # a double holds every id exactly
    return torch.tensor(values, dtype=torch.double)


def _unflatten(values: list[float], widths: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """Undo :func:`_flatten` for rows with so many likely tokens each, None for rows that asked for nothing."""
    rows: list[TokenLogprobs | None] = []
    rest = iter(values)
    for width in widths:
        if width is None:
            rows.append(None)
        else:
            rows.append(TokenLogprobs(next(rest), [(int(next(rest)), next(rest)) for _ in range(width)]))
    return rows
