"""A call with a batch is recorded without pickle, and rerun for one rank."""

import numpy as np
import torch

from kapell.decorators import Dispatch, Replicate, register
from kapell.protocol import DataProto
from kapell.workergroup import ClassWithInitArgs, LocalWorkerGroup, ResourcePool, Worker, replay


class Scaler(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO)
    def scale(self, batch, *, factors, offset):
        ids = batch.batch["ids"] * int(factors.sum()) + offset
        return DataProto.from_dict({"ids": ids}, {"text": batch.non_tensor_batch["text"]})


def test_a_call_with_a_batch_is_rerun_from_files_that_hold_no_pickle(tmp_path):
    batch = DataProto.from_dict({"ids": torch.arange(4)}, {"text": ["a", "b", "c", "d"]})
    with LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Scaler), role="scaler") as group:
        call = group.scale.options(record=tmp_path)
        expected = call(batch, factors=Replicate(np.array([1, 2])), offset=Replicate(torch.tensor(5)))
    [path] = tmp_path.glob("*rank1.json")
    again = replay(path, Scaler)
    assert torch.equal(again.batch["ids"], expected.batch["ids"][2:])
    assert again.non_tensor_batch["text"].tolist() == ["c", "d"]
