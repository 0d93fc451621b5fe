"""How much memory the stages may take: measured on their devices, or declared by ``pippy.device_memory``.

Knows nothing of what a stage needs; see :mod:`~ts_pippy_handler.fit`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from pydantic import ByteSize

from ts_pippy_handler.config import PippyConfig
from ts_pippy_handler.errors import ConfigError, LoadError, one_line
from ts_pippy_handler.fit import DeviceMemory
from ts_pippy_handler.ranks import Group, Place, device_of, num_sharing

logger = logging.getLogger(__name__)

_MEASURED_SHARE = 0.9
"""Part of the free memory that stages may take: kernels, allocators and other processes need some, too."""

_CGROUP = Path("/sys/fs/cgroup")
"""Where Linux tells a container's limit of memory, which the host's figure does not show."""


def agree(group: Group, pippy: PippyConfig) -> DeviceMemory | None:
    """Return the memory of all ranks, the same on every rank; None without ``pippy.device_memory``.

    Raises:
        LoadError: If a rank cannot measure its own.
    """
    if pippy.device_memory is None:
        return None
    own: int | str
    try:
        own = free_share(group.place)
    except RuntimeError as error:  # as CUDA's; the other ranks must not wait for a number
        own = one_line(error, 200)
    answers = group.wait_for_all("memory", own)
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            raise LoadError(f"rank {rank} cannot tell how much memory is free: {answer}")
    memory = _memory(pippy, answers)
    if group.place.rank == 0:
        _warn_of_promises(pippy, answers)
    return memory


def on_this_machine(pippy: PippyConfig, num_stages: int) -> DeviceMemory | None:
    """Return the memory as if all ranks ran here; None without ``pippy.device_memory``."""
    if pippy.device_memory is None:
        return None
    places = [
        Place(rank=rank, local_rank=rank, world_size=num_stages, local_world_size=num_stages)
        for rank in range(num_stages)
    ]
    return _memory(pippy, [free_share(place) for place in places])


def check_declared(pippy: PippyConfig, num_stages: int) -> None:
    """Check that declared sizes are for the ranks that there are.

    Raises:
        ConfigError: Naming the numbers.
    """
    declared = pippy.device_memory
    if isinstance(declared, list) and len(declared) != num_stages:
        raise ConfigError(f"pippy.device_memory: has {len(declared)} sizes, but there are {num_stages} ranks")
    if isinstance(declared, dict) and max(declared) >= num_stages:
        raise ConfigError(
            f"pippy.device_memory: names rank {max(declared)}, but there are only ranks 0 to {num_stages - 1}"
        )


def free_share(place: Place) -> int:
    """Return the bytes that are free on a rank's device, an equal part of them where ranks share it."""
    return free_bytes(device_of(place)) // num_sharing(place)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device; of a CPU what the host and the container have left."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - int(used.read_text()) + _reclaimable_bytes())
    return max(free, 0)


def _reclaimable_bytes() -> int:
    """Return how much of a container's used memory holds pages of files, such as the weights just read."""
    try:
        fields = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("active_file", 0)) + int(fields.get("inactive_file", 0))


def _memory(pippy: PippyConfig, free: Sequence[int]) -> DeviceMemory:
    check_declared(pippy, len(free))
    budgets = [pippy.declared_memory(rank) or int(share * _MEASURED_SHARE) for rank, share in enumerate(free)]
    return DeviceMemory(budgets=budgets, on_cpu=not torch.cuda.device_count())


def _warn_of_promises(pippy: PippyConfig, free: Sequence[int]) -> None:
    for rank, share in enumerate(free):
        declared = pippy.declared_memory(rank)
        if declared is not None and declared > share:
            logger.warning(
                "pippy.device_memory: %s declared for rank %d, where %s are free now",
                ByteSize(declared).human_readable(separator=" "),
                rank,
                ByteSize(share).human_readable(separator=" "),
            )
