"""Wrong calls are refused before anything is sent, with method, argument and lengths."""

import pytest
import torch
from list_batch import ListBatch, ids

from kapell.decorators import (
    Dispatch,
    GroupShape,
    MethodSpec,
    PerWorker,
    Replicate,
    make_plan,
    register,
    signature_of,
)

SHAPE = GroupShape(2, role="actor")


class Worker:
    @register(Dispatch.DP_COMPUTE_PROTO)
    def update(self, batch: ListBatch, scale: float = 1.0, *, table: list[int] | None = None, names: list = None):  # noqa: RUF013
        return batch

    @register(Dispatch.ONE_TO_ALL)
    def many(self, first, *rest, **options): ...

    @register(Dispatch.ONE_TO_ALL)
    @classmethod
    def of_class(cls, x): ...

    @register(Dispatch.ONE_TO_ALL)
    @staticmethod
    def of_nobody(x: "NotDefinedAnywhere"): ...  # noqa: F821


def plan(*args, method="update", mode=Dispatch.DP_COMPUTE_PROTO, **kwargs):
    spec = MethodSpec(dispatch_mode=mode)
    return make_plan(method, spec, SHAPE, args, kwargs, signature=signature_of(Worker, method))


@pytest.mark.parametrize("name", ["update", "many", "of_class", "of_nobody"])
def test_signatures_are_what_the_caller_sees(name):
    assert not {"self", "cls"} & set(signature_of(Worker, name).parameters)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, r"actor.update\(batch: .*\): missing a required argument: 'batch'"),
        ((), {"bach": ids(2)}, r"missing a required argument: 'batch'; did you mean 'batch'\?"),
        ((ids(2),), {"scales": 2}, r"unexpected keyword argument 'scales'; did you mean 'scale'\?"),
        ((ids(2),), {"batch": ids(2)}, "multiple values for argument 'batch'"),
        ((ids(2), 1.0, 3), {}, "too many positional arguments"),
    ],
)
@pytest.mark.parametrize("mode", [Dispatch.DP_COMPUTE_PROTO, Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO])
def test_wrong_arguments_are_type_errors_that_name_the_method(args, kwargs, message, mode):
    with pytest.raises(TypeError, match=message):
        plan(*args, mode=mode, **kwargs)


@pytest.mark.parametrize(("value", "name"), [({"id": [1]}, "dict"), ("abc", "str"), (None, "NoneType"), (3, "int")])
def test_a_value_without_rows_in_place_of_a_batch_is_refused(value, name):
    with pytest.raises(TypeError, match=f"actor.update: argument 'batch' must be ListBatch, got {name}"):
        plan(value)


def test_other_types_with_rows_pass_for_a_batch():
    assert plan(torch.ones(2)).rows == (1, 1)
    assert plan([1, 2]).rows == (1, 1)
    assert plan(Replicate("abc")).rows == (0, 0)
    assert plan(PerWorker("ab")).rows == (0, 0)
    assert plan(ids(2), names=None).rows == (1, 1)


def test_different_lengths_are_named():
    with pytest.raises(ValueError, match=r"actor.update: .*'batch' has 2 rows, 'table' has 3 rows; .*Replicate"):
        plan(ids(2), table=[1, 2, 3])


def test_star_arguments_are_named_by_position():
    with pytest.raises(ValueError, match="argument 'rest\\[1\\]' has 3 entries"):
        plan([1, 2], [1, 2], [1, 2, 3], method="many", mode=Dispatch.ALL_TO_ALL)
    assert plan(1, 2, 3, method="many", mode=Dispatch.ONE_TO_ALL, x=4).call_for(1) == ((1, 2, 3), {"x": 4})


def test_annotations_that_cannot_be_resolved_are_not_checked():
    assert plan(1, method="of_nobody", mode=Dispatch.ONE_TO_ALL).call_for(0) == ((1,), {})


def test_a_custom_mode_is_checked_with_what_it_lays_out():
    spec = MethodSpec(
        dispatch_mode={"dispatch_fn": lambda g, n: (([n] * 2, [n] * 2), {}), "collect_fn": lambda g, o: o}
    )
    assert make_plan("update", spec, SHAPE, (3,), signature=signature_of(Worker, "update")).call_for(0) == ((3, 3), {})
    bad = MethodSpec(dispatch_mode={"dispatch_fn": lambda g, n: ((), {"q": [n] * 2}), "collect_fn": lambda g, o: o})
    with pytest.raises(TypeError, match="missing a required argument: 'batch'"):
        make_plan("update", bad, SHAPE, (3,), signature=signature_of(Worker, "update"))


def test_a_padding_argument_that_the_method_does_not_take_is_refused():
    spec = MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, uneven="pad", padding_argument="num_padding")
    with pytest.raises(TypeError, match="padding_argument='num_padding' is not among its parameters"):
        make_plan("update", spec, SHAPE, (ids(3),), signature=signature_of(Worker, "update"))
    spec = MethodSpec(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, uneven="pad", padding_argument="scale")
    with pytest.raises(TypeError, match="'scale' is filled in by the group"):
        make_plan("update", spec, SHAPE, (ids(3),), {"scale": 1}, signature=signature_of(Worker, "update"))
