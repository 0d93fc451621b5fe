"""A rank above 0: load a stage, then run every batch that rank 0 announces, until told to stop.

``python -m ts_pippy_handler.worker`` is what spawn mode starts, and ``ts-pippy rank`` on hosts that do not serve; under
TorchServe's torchrun the loop runs in a thread of TorchServe's worker process. Knows nothing of requests or text.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import msgspec

from ts_pippy_handler import loading, lost_ranks, meeting, process, ranks
from ts_pippy_handler.config import ServingConfig, load_config
from ts_pippy_handler.errors import PippyError
from ts_pippy_handler.loading import LoadedRank
from ts_pippy_handler.meter import METER
from ts_pippy_handler.sampling import logprobs_of, sample

logger = logging.getLogger(__name__)


def run_batches(loaded: LoadedRank) -> None:
    """Run batches until rank 0 says stop.

    Raises:
        PipelineError: If a neighbour is gone.
    """
    stage, transport = loaded.stage, loaded.transport
    assert transport is not None
    while (batch := transport.receive_batch()) is not None:
        METER.skip()
        received = transport.receive_values(stage.graph.receives, batch.num_tokens)
        METER.spent("wait")
        with loaded.pulse.step():
            outputs = stage.run(batch, received)
            METER.ran(batch.num_tokens)
            if stage.is_last:
                logits = outputs[stage.graph.outputs[0]]
                token_ids = sample(logits, batch.sampled)
                logprobs = logprobs_of(logits, batch.sampled, token_ids)
                METER.spent("compute")
                transport.send_result(batch, token_ids, logprobs, logits)
            else:
                METER.spent("compute")
                transport.send_values(stage.graph.sends, {**received, **outputs})
            METER.spent("send")


def start_thread(loaded: LoadedRank) -> threading.Thread:
    """Run batches in a daemon thread; end the process if the loop fails, so that the whole group restarts."""

    def run() -> None:
        try:
            run_batches(loaded)
        except BaseException as error:  # noqa: BLE001 - the process ends with it
            _give_up(loaded.group, error)

    thread = threading.Thread(target=run, name="stage", daemon=True)
    thread.start()
    return thread


def _give_up(group: ranks.Group, error: BaseException) -> None:
    stage = group.place.rank
    logger.error("rank %d, stage %d stops: %s: %s", stage, stage, type(error).__name__, error)
    try:
        if not isinstance(error, PippyError):  # a lost neighbour is a symptom; its own last words matter more
            group.fail(error)
    finally:
        process.end_process(1)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is started for."""

    config: dict[str, Any]
    show_progress: bool = False
    log_level: str = "INFO"
    rendezvous_host: str | None = None
    """Where a host without TorchServe reaches torchrun's rendezvous; None for a child of rank 0."""


def main() -> None:
    """Run a rank that :func:`ts_pippy_handler.ranks.spawn_peers` or torchrun started.

    The job comes on standard input, or in the file that the first argument names.
    """
    process.die_with_parent()
    process.leave_interrupts_to_parent()
    process.share_memory_arena()
    text = Path(sys.argv[1]).read_bytes() if len(sys.argv) > 1 else sys.stdin.buffer.read()
    job = msgspec.json.decode(text, type=Job)
    logging.basicConfig(stream=sys.stdout, level=job.log_level, format="%(message)s")
    warnings.simplefilter("ignore")
    is_guest = job.rendezvous_host is not None
    try:
        config: ServingConfig = load_config(job.config)
        group = _join(config, job)
        loaded = loading.load(group, config, show_progress=job.show_progress)
        lost_ranks.watch(loaded, config.pippy)
    except PippyError as error:
        if is_guest:  # of a child the reason is with rank 0 already, which reports it once for all
            rank = ranks.place_from_environment().rank
            logger.error("rank %d, stage %d: the model cannot be loaded: %s", rank, rank, error)
        process.end_process(1)
    try:
        run_batches(loaded)
    except BaseException as error:  # noqa: BLE001 - the process ends with it
        _give_up(group, error)
    group.leave()
    process.end_process(0)  # rank 0 waits for the exit; RPC threads have nothing left to say


def _join(config: ServingConfig, job: Job) -> ranks.Group:
    place = ranks.place_from_environment()
    if job.rendezvous_host is None:
        return ranks.join(place, config.pippy)
    loading.check_early(config, place.world_size)
    return meeting.join(place, config, meeting.Guest(rendezvous_host=job.rendezvous_host))


if __name__ == "__main__":
    main()
