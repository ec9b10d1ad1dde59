"""Write your own worker: its labelled methods become methods of the whole group."""

import sys

import torch

from kapell.decorators import Dispatch, register
from kapell.protocol import DataProto
from kapell.workergroup import ClassWithInitArgs, Worker, load_backend


class Scorer(Worker):
    """Scores rows of tokens; each rank sees its share of the rows."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("tokens",), writes=("scores",))
    def score(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"scores": self.scale * batch.batch["tokens"].float().mean(-1)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_scale(self, scale: float) -> str:
        self.scale = scale
        return f"rank {self.rank} of {self.world_size} now scales by {scale}"


def main(backend_name: str) -> DataProto:
    """Score five rows on two workers, on the backend of that name: "ray" or "local"."""
    with load_backend(backend_name)() as backend:
        group = backend.worker_group(backend.resource_pool([2]), ClassWithInitArgs(Scorer, scale=0.5), role="scorer")
        batch = DataProto.from_dict({"tokens": torch.arange(20).reshape(5, 4)})
        print(group.score.plan(batch))  # who gets what; runs nothing
        print(group.set_scale(2.0))  # one call, every rank
        return batch | group.score(batch)  # split over the ranks, run, joined in order


if __name__ == "__main__":
    print(main(*sys.argv[1:] or ["local"]).batch["scores"])
