"""Processes that act as ranks under gloo, started once: a collective test costs no interpreter start."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class RanksPool:
    """`run(world, function, *args)` calls function(ranks, *args) on `world` processes in one process group."""

    def __init__(self, most: int = 4):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torchvision", "moco_ray.train"])
        self._pipes, self._processes = [], []
        for rank in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, world: int, function: Callable, *args: Any) -> list[Any]:
        """The results in rank order. Raises what the lowest failing rank raised."""
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self._pipes[:world]:
                pipe.send((world, os.path.join(folder, "store"), function, args))
            answers = []
            for pipe in self._pipes[:world]:
                if not pipe.poll(240):
                    raise TimeoutError("a rank did not answer within 240 s")
                answers.append(pipe.recv())
        for error, _ in answers:
            if error is not None:
                raise error
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            process.kill()


def _serve(rank: int, pipe) -> None:
    from moco_ray.ranks import Ranks

    torch.set_num_threads(1)
    while True:
        try:
            world, store, function, args = pipe.recv()
        except EOFError:
            return
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        try:
            answer = (None, function(Ranks.current(), *args))
        except Exception as error:  # noqa: BLE001 - handed to the test, which raises it
            error.add_note(traceback.format_exc())
            answer = (error, None)
        dist.destroy_process_group()
        pipe.send(answer)
