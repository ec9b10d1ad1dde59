"""Averages between processes, as a backend with one process per worker runs them."""

import multiprocessing
import socket

import torch

from kapell.trainer import collective
from kapell.trainer.collective import ProcessGroupCollective, join_collective

MANY = collective._DIRECT_BYTES // 4


def averages(rank, port, answers):
    group = join_collective(
        "actor", rank=rank, world_size=2, address=("127.0.0.1", str(port)), device=torch.device("cpu")
    )
    first = group.start_average(torch.tensor([1.0 + 2 * rank]))
    second = group.start_average(torch.full((MANY,), 10.0 * rank))  # takes another way
    third = group.start_average(torch.tensor([7.0 * rank]))
    results = first().item(), second().unique().tolist(), third().item()
    answers.put((rank, isinstance(group, ProcessGroupCollective), *results))


def test_two_processes_get_the_same_averages_in_order():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=averages, args=(rank, port, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    results = sorted(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(timeout=30)
    assert results == [(rank, True, 2.0, [5.0], 3.5) for rank in range(2)]
    assert [process.exitcode for process in processes] == [0, 0]
