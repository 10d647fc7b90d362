"""Lent memory: every rank reserves what it lends, and maps what others lend to it.

CPU: one file per lender under /dev/shm, allocated in full at once (a tmpfs that is too small would otherwise kill the process in the
middle of a copy), unlinked as soon as everybody has mapped it, so a crash leaves nothing behind.
CUDA: the lender exports one allocation by CUDA IPC; the owner maps it on its *own* device index, so copies are ordinary same-device
copies on a side stream and the owner needs no context on the lender.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpress.runtime.schedule_file import HOST, RunError, ScheduleFile

SHARED_MEMORY = Path("/dev/shm")


def used_pools(schedule: ScheduleFile, rank: int) -> tuple[int, ...]:
    """Pools that stage `rank` copies to, HOST included, sorted."""
    return tuple(sorted({stripe.pool for swap in schedule.stages[rank].swapped.values() for stripe in swap.stripes}))


def local_pools(schedule: ScheduleFile, devices: list[torch.device]) -> list[dict[int, Tensor]]:
    """All ranks in one process: pools are ordinary tensors shared by reference."""
    lent = [torch.empty(size, dtype=torch.uint8, device=device) for size, device in zip(schedule.pools, devices, strict=True)]
    result = []
    for rank, device in enumerate(devices):
        used = used_pools(schedule, rank)
        result.append({pool: host_pool(schedule, rank, device) if pool == HOST else lent[pool] for pool in used})
    return result


def host_pool(schedule: ScheduleFile, rank: int, device: torch.device) -> Tensor:
    """Host memory of one rank, page-locked when a GPU copies from it."""
    return torch.empty(schedule.host[rank], dtype=torch.uint8, pin_memory=device.type == "cuda")


def shared_pools(schedule: ScheduleFile, rank: int, device: torch.device) -> tuple[dict[int, Tensor], object]:
    """Pools of one rank of a process group, and what the lender must keep alive until everyone is done.  Collective."""
    mine, keep = (_lend_cuda if device.type == "cuda" else _lend_file)(schedule.pools[rank], device)
    offers: list[Any] = [None] * len(schedule.stages)
    dist.all_gather_object(offers, mine)
    refused = sorted({offer["error"] for offer in offers if "error" in offer})
    pools: dict[int, Tensor] = {}
    if not refused:
        for pool in used_pools(schedule, rank):
            if pool == HOST:
                pools[pool] = host_pool(schedule, rank, device)
            elif device.type == "cuda":
                pools[pool] = _map_cuda(offers[pool], device)
            else:
                pools[pool] = torch.from_file(offers[pool]["file"], shared=True, size=schedule.pools[pool], dtype=torch.uint8)
    dist.barrier()
    if "file" in mine:
        Path(mine["file"]).unlink()
    if refused:
        raise RunError(refused[0])
    return pools, keep


def _lend_file(size: int, device: torch.device) -> tuple[dict[str, Any], object]:
    del device
    if size == 0:
        return {}, None
    path = SHARED_MEMORY / f"mpress-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        path.unlink()
        return {"error": f"cannot reserve {size} bytes in {SHARED_MEMORY}: {error.strerror}; make it larger (docker run --shm-size)"}, None
    finally:
        os.close(descriptor)
    return {"file": str(path)}, torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _lend_cuda(size: int, device: torch.device) -> tuple[dict[str, Any], object]:
    if size == 0:
        return {}, None
    pool = torch.empty(size, dtype=torch.uint8, device=device)
    handle = pool.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return {"handle": handle[1:], "size": size}, pool


def _map_cuda(offer: dict[str, Any], device: torch.device) -> Tensor:
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *offer["handle"])
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (offer["size"],), (1,))
