"""Runs a function on several gloo ranks, with a time limit and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_PRELOAD = ["torch", "torch.distributed", "torch.distributed.tensor",
            "planner.runtime", "tests.distributed.parity"]  # fmt: skip


def _child(
    function: Callable[..., Any], rank: int, world: int, store: str, timeout_s: float,
    args: tuple[Any, ...], queue: Any,
) -> None:  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        queue.put((rank, True, function(*args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
        queue.close()
        queue.join_thread()  # os._exit does not wait for what is being sent
        os._exit(1)


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float = 60,
    wait_for: tuple[int, ...] = (),
    limit_s: float = 0,
) -> list[Any]:
    """What ``function(*args)`` returned on each rank (of ``wait_for``).

    ``timeout_s``: how long a rank waits for another; ``limit_s``: for all (default: as
    long). Raises AssertionError with the first rank's traceback where one failed,
    TimeoutError
    where the ranks did not finish; in both cases every process is ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        children = [
            context.Process(
                target=_child,
                args=(function, rank, world, store, timeout_s, args, queue),
                daemon=True,
            )
            for rank in range(world)
        ]
        for child in children:
            child.start()
        try:
            return _results(
                queue, children, wait_for or tuple(range(world)), limit_s or timeout_s
            )
        finally:
            for child in children:
                child.join(0 if wait_for else 5)
                if child.is_alive():
                    child.kill()
                    child.join()


def _results(
    queue: Any, children: Any, ranks: tuple[int, ...], timeout_s: float
) -> list[Any]:
    found: dict[int, Any] = {}
    end = time.monotonic() + timeout_s
    while len(found) < len(ranks):
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{len(ranks) - len(found)} ranks did not finish")
        try:
            rank, ok, value = queue.get(timeout=min(left, 1.0))
        except Exception:
            if all(not c.is_alive() for c in children) and queue.empty():
                raise AssertionError("ranks ended without a result") from None
            continue
        assert ok, f"rank {rank}:\n{value}"
        found[rank] = value
    return [found[r] for r in ranks]
