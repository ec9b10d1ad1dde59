"""`register` labels, and changes nothing else."""

import asyncio
import dataclasses
import functools
import inspect
from dataclasses import FrozenInstanceError

import pytest
import torch

from kapell.decorators import (
    Dispatch,
    Execute,
    GroupShape,
    MethodSpec,
    Reduction,
    Uneven,
    make_plan,
    register,
    spec_of,
)


class Worker:
    @register(Dispatch.DP_COMPUTE_PROTO, reads=["a"], writes=["b"], uneven="pad", collect="mean")
    def update(self, batch: list[int], scale: int = 2) -> list[int]:
        """Scales."""
        return [scale * row for row in batch]

    @register(blocking=False)
    async def fetch(self, row):
        await asyncio.sleep(0)
        return row

    @register()
    def stream(self, rows):
        yield from rows

    @register()
    async def stream_slowly(self, rows):
        for row in rows:
            yield row

    @register(Dispatch.ONE_TO_ALL)
    @classmethod
    def of_class(cls, x):
        return cls, x

    @classmethod
    @register(Dispatch.ONE_TO_ALL)
    def of_class_inside(cls, x):
        return cls, x

    @register(Dispatch.ONE_TO_ALL)
    @staticmethod
    def of_nobody(x):
        return x

    @register(Dispatch.ONE_TO_ALL)
    @torch.no_grad()
    def over_no_grad(self, x):
        return torch.is_grad_enabled(), x

    @torch.no_grad()
    @register(Dispatch.ONE_TO_ALL)
    def under_no_grad(self, x):
        return torch.is_grad_enabled(), x


def test_the_label_holds_what_was_declared():
    spec = spec_of(Worker.update)
    assert spec == MethodSpec(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        execute_mode=Execute.ALL,
        reads=("a",),
        writes=("b",),
        uneven=Uneven.PAD,
        collect=Reduction.MEAN,
    )
    assert spec.blocking
    assert spec.materialize_futures
    assert spec_of(Worker().update) is spec


def test_a_label_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        spec_of(Worker.update).blocking = False


def test_a_labelled_method_is_the_function_itself():
    def plain(self):
        return 1

    assert register()(plain) is plain


def test_a_labelled_method_runs_without_a_group():
    assert Worker().update([1, 2]) == [2, 4]
    assert Worker().update(batch=[1], scale=3) == [3]


def test_signature_name_and_doc_stay():
    assert str(inspect.signature(Worker.update)) == "(self, batch: list[int], scale: int = 2) -> list[int]"
    assert (Worker.update.__name__, Worker.update.__doc__) == ("update", "Scales.")


def test_a_coroutine_stays_a_coroutine():
    assert inspect.iscoroutinefunction(Worker.fetch)
    assert asyncio.run(Worker().fetch(3)) == 3
    assert not spec_of(Worker.fetch).blocking


def test_generators_stay_generators():
    assert inspect.isgeneratorfunction(Worker.stream)
    assert list(Worker().stream([1, 2])) == [1, 2]
    assert inspect.isasyncgenfunction(Worker.stream_slowly)
    assert spec_of(Worker.stream_slowly) is not None


@pytest.mark.parametrize("name", ["of_class", "of_class_inside"])
def test_class_methods_are_labelled(name):
    assert spec_of(getattr(Worker, name)).dispatch_mode is Dispatch.ONE_TO_ALL
    assert getattr(Worker(), name)(1) == (Worker, 1)
    assert spec_of(inspect.getattr_static(Worker, name)) is not None


def test_static_methods_are_labelled():
    assert spec_of(Worker.of_nobody) is not None
    assert Worker.of_nobody(1) == Worker().of_nobody(1) == 1


@pytest.mark.parametrize("name", ["over_no_grad", "under_no_grad"])
def test_the_label_is_seen_through_other_decorators(name):
    assert spec_of(getattr(Worker, name)).dispatch_mode is Dispatch.ONE_TO_ALL
    assert getattr(Worker(), name)(1) == (False, 1)


def test_a_wrapper_made_with_wraps_keeps_the_label():
    @functools.wraps(Worker.update)
    def wrapped(self, *args):
        return Worker.update(self, *args)

    assert spec_of(wrapped) is spec_of(Worker.update)


def test_an_override_without_register_has_no_label():
    class Sub(Worker):
        def update(self, batch, scale=2):
            return super().update(batch, scale)

    assert spec_of(Sub.update) is None
    assert spec_of(Sub.fetch) is not None


def test_a_subclass_may_relabel_and_the_parent_keeps_its_label():
    class Base:
        def __init__(self):
            self.greeting = "base"

        @register(Dispatch.ONE_TO_ALL)
        async def hello(self, *, name="x"):
            return self.greeting + __class__.__name__ + name

    class Sub(Base):
        hello = register(Dispatch.RANK_ZERO, blocking=False)(Base.hello)

    assert spec_of(Base.hello).dispatch_mode is Dispatch.ONE_TO_ALL
    assert spec_of(Sub.hello).dispatch_mode is Dispatch.RANK_ZERO
    assert inspect.iscoroutinefunction(Sub.hello)
    assert asyncio.run(Sub().hello()) == "baseBasex"


def test_a_subclass_may_relabel_with_a_body_of_its_own():
    class Sub(Worker):
        @register(Dispatch.ONE_TO_ALL)
        def update(self, batch, scale=2):
            return 0

    assert spec_of(Sub.update).dispatch_mode is Dispatch.ONE_TO_ALL
    assert spec_of(Worker.update).dispatch_mode is Dispatch.DP_COMPUTE_PROTO


def test_other_callables_are_wrapped_to_carry_the_label():
    class Named:
        size = register(Dispatch.ONE_TO_ALL)(len)

    assert spec_of(Named.size) is not None
    assert spec_of(len) is None


@pytest.mark.parametrize("value", [3, None, property(lambda self: 1)])
def test_only_functions_are_labelled(value):
    with pytest.raises(TypeError, match="labels functions"):
        register()(value)


def test_register_without_parentheses_says_so():
    with pytest.raises(TypeError, match=r"write @register\(\.\.\.\) with parentheses"):
        register(lambda self: 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dispatch_mode": 3}, TypeError, "got int"),
        ({"execute_mode": "all"}, TypeError, "Execute.ALL or Execute.RANK_ZERO"),
        ({"uneven": "drop"}, ValueError, "unknown uneven='drop'; known: 'shards', 'pad', 'refuse'"),
        ({"collect": "average"}, ValueError, "unknown collect='average'; known: 'concat'"),
        ({"reads": "a"}, TypeError, r"write \('a',\)"),
        ({"writes": [1]}, TypeError, "column names, got 1"),
        ({"balance_by": "cost"}, ValueError, "ALL_TO_ALL does not"),
        ({"collect": "mean", "dispatch_mode": {"dispatch_fn": len, "collect_fn": len}}, ValueError, "of its own"),
        ({"uneven": "pad", "dispatch_mode": Dispatch.ONE_TO_ALL}, ValueError, "ONE_TO_ALL does not"),
    ],
)
def test_wrong_options_are_refused_where_they_are_written(options, error, message):
    with pytest.raises(error, match=message):
        register(**options)


def test_one_call_may_choose_another_mode():
    spec = dataclasses.replace(spec_of(Worker.update), dispatch_mode="ONE_TO_ALL")
    assert spec.dispatch_mode is Dispatch.ONE_TO_ALL
    planned = make_plan("update", spec, GroupShape(2), ([1, 2, 3],))
    assert planned.call_for(1) == (([1, 2, 3],), {})
