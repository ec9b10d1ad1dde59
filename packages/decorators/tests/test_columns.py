"""`reads` and `writes`: checked before anything is sent, only what is read travels, results hold what was declared."""

import pytest
import torch
from list_batch import ListBatch, run
from tensordict import TensorDict

from kapell.decorators import (
    Dispatch,
    GroupShape,
    MethodSpec,
    PerWorker,
    Replicate,
    known_writers,
    make_plan,
    register,
)


class Critic:
    @register(Dispatch.DP_COMPUTE_PROTO, writes=["values"])
    def compute_values(self, batch): ...

    @register(Dispatch.DP_COMPUTE_PROTO, writes=["values", "returns"])
    def compute_all(self, batch): ...

    def unlabelled(self): ...


def batch(**more):
    return ListBatch({"a": [1, 2], "b": [3, 4], "c": [5, 6]} | more)


def plan(*args, mode=Dispatch.DP_COMPUTE_PROTO, writers=None, **options):
    shape = GroupShape(2, role="actor", writers=writers or {})
    return make_plan("update", MethodSpec(dispatch_mode=mode, **options), shape, args)


def test_a_missing_column_names_those_who_could_have_written_it():
    writers = known_writers({"critic": Critic})
    message = (
        r"actor.update reads column 'values', which the batch does not have; it could have been written by "
        r"critic.compute_all or critic.compute_values. The batch has: a, b, c"
    )
    with pytest.raises(ValueError, match=message):
        plan(batch(), reads=["a", "values"], writers=writers)


def test_a_missing_column_that_nobody_writes_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"\(did you mean 'values'\?\); no known method writes it"):
        plan(batch(values=[1, 2]), reads=["valeus"])


@pytest.mark.parametrize(
    "mode", [Dispatch.DP_COMPUTE_PROTO, Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO, Dispatch.DP_COMPUTE_METRIC]
)
def test_only_read_columns_are_sent(mode):
    planned = plan(batch(), mode=mode, reads=["c", "a"])
    assert planned.call_for(0)[0][0].columns == ("a", "c")
    assert planned.columns == ("a", "c")


def test_only_read_columns_are_sent_of_marked_and_per_rank_arguments():
    shared = batch()
    for value, mode in [
        (Replicate(shared), Dispatch.DP_COMPUTE_PROTO),
        (PerWorker([shared, batch()]), Dispatch.DP_COMPUTE_PROTO),
        ([shared, batch()], Dispatch.DP_COMPUTE),
    ]:
        assert plan(value, mode=mode, reads=["a"]).call_for(1)[0][0].columns == ("a",)
    assert shared.columns == ("a", "b", "c")


def test_per_rank_batches_must_all_have_what_is_read():
    with pytest.raises(ValueError, match="reads column 'd'"):
        plan([batch(d=[1, 2]), batch()], mode=Dispatch.DP_COMPUTE, reads=["d"])


def test_columns_may_come_from_several_batches():
    planned = plan(ListBatch({"a": [1, 2]}), ListBatch({"b": [3, 4], "x": [0, 0]}), reads=["a", "b"])
    args, _ = planned.call_for(0)
    assert [part.columns for part in args] == [("a",), ("b",)]


def test_a_tensordict_is_reduced_to_what_is_read():
    value = TensorDict({"a": torch.ones(2), "b": torch.ones(2, 1000)}, [2])
    planned = plan(value, reads=["a"])
    assert list(planned.call_for(0)[0][0].keys()) == ["a"]
    assert "1000" not in str(planned)


def test_without_a_declaration_all_columns_are_sent():
    assert plan(batch()).call_for(0)[0][0].columns == ("a", "b", "c")


def test_arguments_without_columns_are_not_checked():
    assert plan([1, 2], {"lr": 1}, reads=["a"]).rows == (1, 1)


def test_a_future_may_bring_the_missing_column():
    class Pending:
        __kapell_future__ = True

        def get(self, timeout=None):
            return batch(values=[0, 0])

    assert plan(batch(), Pending(), reads=["values"]).rows == (1, 1)


def test_strict_refuses_undeclared_columns():
    planned = plan(batch(), writes=["values"], strict=True)
    message = r"actor.update: rank 0 returned columns that it does not declare: debug; declared: writes=\('values',\)"
    with pytest.raises(ValueError, match=message):
        run(planned, lambda part: ListBatch({"values": [0], "debug": [0], "a": [1]}))
    with pytest.raises(ValueError, match="does not declare: b"):
        run(plan(batch(), reads=["a"], writes=["values"], strict=True), lambda part: ListBatch({"b": [0]}))


def test_reads_and_writes_hold_for_custom_modes():
    pair = {
        "dispatch_fn": lambda group, value: (([value] * group.world_size,), {}),
        "collect_fn": lambda group, outputs: outputs[0],
    }
    planned = plan(batch(), mode=pair, reads=["a"], writes=["values"], strict=True)
    assert planned.call_for(1)[0][0].columns == ("a",)
    assert run(planned, lambda part: ListBatch({"values": [0, 0]})).columns == ("values",)
    with pytest.raises(ValueError, match="does not declare: debug"):
        run(planned, lambda part: ListBatch({"debug": [0, 0]}))
    with pytest.raises(ValueError, match="reads column 'd'"):
        plan(batch(), mode=pair, reads=["d"])


def test_strict_lets_declared_and_sent_columns_pass():
    planned = plan(batch(), reads=["a"], writes=["values"], strict=True)
    result = run(planned, lambda part: ListBatch(part.data | {"values": [0]}))
    assert result.columns == ("a", "values")


def test_without_strict_anything_may_be_returned():
    assert run(plan(batch(), writes=["values"]), lambda part: ListBatch({"x": [0]})).columns == ("x",)


def test_known_writers_lists_labelled_methods_only():
    assert known_writers({"critic": Critic}) == {
        "values": ("critic.compute_all", "critic.compute_values"),
        "returns": ("critic.compute_all",),
    }
