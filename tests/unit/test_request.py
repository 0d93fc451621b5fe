"""A batch crosses between ranks as msgpack and arrives as it was."""

from __future__ import annotations

import msgspec
import pytest

from ts_pippy_handler.request import Batch, FinishReason, Processing, SampledRow, SamplingParams, Segment

BATCH = Batch(
    7,
    [5, 6, 7, 8],
    [Segment(3, 0, [(0, 16)]), Segment(1, 20, [(32, 16), (64, 16)])],
    [SampledRow(2, 3, 0.7, 40, 0.9, 2**63 - 1), SampledRow(3, 21, 0.0, 0, 1.0, 0)],
    return_logits=True,
)


def round_trip(batch: Batch) -> Batch:
    return msgspec.msgpack.Decoder(Batch).decode(msgspec.msgpack.Encoder().encode(batch))


def test_a_batch_survives_the_wire() -> None:
    arrived = round_trip(BATCH)
    assert arrived == BATCH
    assert isinstance(arrived.segments[1], Segment)
    assert isinstance(arrived.sampled[0], SampledRow)
    assert arrived.segments[1].runs == [(32, 16), (64, 16)]
    assert arrived.sampled[0].seed == 2**63 - 1
    assert arrived.return_logits is True


def test_what_few_rows_ask_for_survives_the_wire_and_costs_the_others_a_byte() -> None:
    processing = Processing([1, 2], [3], 0.1, 1.5, -2.0, 2.0, ((5, -100.0), (2**18, 7.0)), [0, 9], 20)
    plain = SampledRow(0, 1, 0.0, 0, 1.0, 0)
    asking = SampledRow(1, 2, 0.0, 0, 1.0, 0, processing)
    arrived = round_trip(Batch(0, [4, 5], [Segment(2, 0, [(0, 2)])], [plain, asking]))
    assert arrived.sampled == [plain, asking]
    assert arrived.sampled[1].processing == processing
    assert [each.num_logprobs for each in arrived.sampled] == [None, 20]
    assert len(msgspec.msgpack.encode(plain)) == len(msgspec.msgpack.encode((0, 1, 0.0, 0, 1.0, 0))) + 1


def test_logits_are_not_wanted_unless_asked_for() -> None:
    assert round_trip(Batch(0, [1], [Segment(1, 0, [(0, 1)])], [])).return_logits is False


@pytest.mark.parametrize("payload", [b"\xc0", b"\x93\x00\x90\x90", b'[0, ["x"], [], []]', b"junk"])
def test_anything_else_is_refused(payload: bytes) -> None:
    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
        msgspec.msgpack.Decoder(Batch).decode(payload)


def test_counts() -> None:
    assert BATCH.num_tokens == 4
    assert [segment.context_len for segment in BATCH.segments] == [3, 21]


def test_defaults_are_greedy() -> None:
    params = SamplingParams(max_new_tokens=3)
    assert (params.temperature, params.top_k, params.top_p, params.stop) == (0.0, 0, 1.0, ())
    assert (params.ignore_eos, params.only_logits) == (False, False)
    assert (params.min_p, params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (0, 1, 0, 0)
    assert (params.logit_bias, params.stop_token_ids, params.min_tokens, params.logprobs) == ((), (), 0, None)


def test_finish_reasons_are_the_words_a_client_sees() -> None:
    assert [reason.value for reason in FinishReason] == ["stop", "length", "abort", "error"]
