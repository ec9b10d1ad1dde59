"""Averages between processes, as a backend with one process per worker runs them."""

import multiprocessing
import socket

import torch

from kapell.trainer.collective import ProcessGroupCollective, join_collective


def average_twice(rank, port, answers):
    collective = join_collective(
        "actor", rank=rank, world_size=2, address=("127.0.0.1", str(port)), device=torch.device("cpu")
    )
    first = collective.start_average(torch.tensor([1.0 + 2 * rank]))
    second = collective.start_average(torch.tensor([10.0 * rank]))
    answers.put((rank, isinstance(collective, ProcessGroupCollective), first().item(), second().item()))


def test_two_processes_get_the_same_averages_in_order():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=average_twice, args=(rank, port, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    results = sorted(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(timeout=30)
    assert results == [(0, True, 2.0, 5.0), (1, True, 2.0, 5.0)]
    assert [process.exitcode for process in processes] == [0, 0]
