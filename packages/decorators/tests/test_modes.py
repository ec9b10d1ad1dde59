"""Modes: what each does with its arguments, and modes of one's own."""

import pickle
import subprocess
import sys
import textwrap

import cloudpickle
import pytest
from list_batch import ids, run

from kapell.decorators import (
    Dispatch,
    Execute,
    GroupShape,
    MeshLayout,
    MethodSpec,
    PerWorker,
    Replicate,
    get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    make_plan,
    register,
    register_dispatch_mode,
    spec_of,
    update_dispatch_mode,
)

SHAPE = GroupShape(4, meshes={"tp": MeshLayout((0, 0, 1, 1), (True, False, True, False))})
ROW_MODES = [Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_METRIC, Dispatch.mesh("tp")]
PER_RANK_MODES = [Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE]


def plan(mode, *args, shape=SHAPE, execute=Execute.ALL, **kwargs):
    return make_plan("f", MethodSpec(dispatch_mode=mode, execute_mode=execute), shape, args, kwargs)


@pytest.mark.parametrize("length", [3, 4, 5])
def test_one_to_all_gives_every_rank_the_whole_list_whatever_its_length(length):
    value = list(range(length))
    assert run(plan(Dispatch.ONE_TO_ALL, value), lambda x: x) == [value] * 4


def test_one_to_all_ships_a_value_once():
    (argument,) = plan(Dispatch.ONE_TO_ALL, x={"lr": 1}).arguments
    assert (argument.values, argument.index) == (({"lr": 1},), (0, 0, 0, 0))


@pytest.mark.parametrize("mode", PER_RANK_MODES)
def test_per_rank_modes_give_each_rank_its_entry(mode):
    assert run(plan(mode, [1, 2, 3, 4], y=(5, 6, 7, 8)), lambda x, y: x + y) == [6, 8, 10, 12]


@pytest.mark.parametrize("mode", PER_RANK_MODES)
def test_per_rank_modes_refuse_another_length(mode):
    with pytest.raises(ValueError, match=r"'args\[0\]' has 3 entries, the group 4 ranks; wrap it in Replicate"):
        plan(mode, [1, 2, 3])


@pytest.mark.parametrize("mode", PER_RANK_MODES)
def test_per_rank_modes_refuse_what_is_no_list(mode):
    with pytest.raises(TypeError, match="'lr' a list with one entry for each of the 4 ranks, got float"):
        plan(mode, lr=0.1)


def test_an_entry_that_several_ranks_share_is_shipped_once():
    shared = object()
    (argument,) = plan(Dispatch.ALL_TO_ALL, [shared, shared, 3, shared]).arguments
    assert (argument.values, argument.index) == ((shared, 3), (0, 0, 1, 0))


@pytest.mark.parametrize("mode", ROW_MODES)
def test_row_modes_split_rows_and_replicate_configs(mode):
    config = {"temperature": 1.0}
    result = run(plan(mode, [1, 2, 3, 4], config, n=None, s="xy"), lambda x, c, n, s: [(row, c, n, s) for row in x])
    rows = result if mode is not Dispatch.DP_COMPUTE_METRIC else [row for part in result for row in part]
    assert rows == [(row, config, None, "xy") for row in [1, 2, 3, 4]]


def test_rank_zero_runs_alone_with_whole_arguments():
    planned = plan(Dispatch.RANK_ZERO, [1, 2, 3], scale=2)
    assert (planned.ranks, planned.collect_ranks) == ((0,), (0,))
    assert run(planned, lambda x, scale: (x, scale)) == ([1, 2, 3], 2)


@pytest.mark.parametrize("mode", [Dispatch.ALL_TO_ALL, Dispatch.ONE_TO_ALL, Dispatch.DP_COMPUTE_PROTO])
def test_execute_rank_zero_passes_arguments_as_they_are(mode):
    planned = plan(mode, 1, y=[1, 2], execute=Execute.RANK_ZERO)
    assert planned.ranks == (0,)
    assert run(planned, lambda x, y: (x, y)) == (1, [1, 2])


def test_a_function_goes_whole_before_the_batch():
    assert run(plan(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, sum, [1, 2, 3, 4]), lambda f, x: [f(x)]) == [1, 2, 3, 4]
    assert run(plan(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, Replicate(sum)), lambda f: [f([1])]) == [1, 1, 1, 1]
    by_keyword = plan(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, func=sum, batch=[1, 2, 3, 4])
    assert run(by_keyword, lambda func, batch: [func(batch)]) == [1, 2, 3, 4]


def test_a_function_mode_without_function_is_refused():
    with pytest.raises(TypeError, match="takes a function as first argument, got list"):
        plan(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, [1, 2])


def test_a_direct_rollout_method_is_not_called_through_the_group():
    with pytest.raises(NotImplementedError, match="call it on the worker itself"):
        plan(Dispatch.DIRECT_ROLLOUT_METHOD)


@pytest.mark.parametrize("mode", [*ROW_MODES, *PER_RANK_MODES, Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO])
def test_a_call_with_nothing_to_split_works_in_every_mode(mode):
    assert run(plan(mode), lambda: 7) in ([7] * 4, [7] * 2, 7)
    config = Replicate({"lr": 1})
    assert run(plan(mode, config=config), lambda config: config["lr"]) in ([1] * 4, [1] * 2, 1)


@pytest.mark.parametrize("mode", [*ROW_MODES, Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO])
def test_equivalent_calls_give_equal_results(mode):
    def work(batch, scale=1, *more):
        return [scale * row for row in batch.column("id")]

    batch = ids(4)
    assert run(plan(mode, batch), work) == run(plan(mode, batch=batch), work)
    assert run(plan(mode, batch, 2), work) == run(plan(mode, scale=2, batch=batch), work)
    assert run(plan(mode, batch, 2, batch), work) == run(plan(mode, batch, scale=2), work)


@pytest.mark.parametrize("mode", PER_RANK_MODES)
def test_equivalent_calls_of_per_rank_modes_give_equal_results(mode):
    def work(batch, scale=1, *more):
        return scale * batch

    batch, scale = [1, 2, 3, 4], [2, 2, 2, 2]
    assert run(plan(mode, batch), work) == run(plan(mode, batch=batch), work) == batch
    assert run(plan(mode, batch, scale), work) == run(plan(mode, scale=scale, batch=batch), work)
    assert run(plan(mode, batch, Replicate(2)), work) == run(plan(mode, batch, scale, batch), work)


def test_markers_decide_for_one_argument():
    planned = plan(Dispatch.DP_COMPUTE_PROTO, [1, 2, 3, 4], Replicate([9, 9]), seed=PerWorker("abcd"))
    work = lambda x, table, seed: [(x[0], table, seed)]  # noqa: E731
    assert run(planned, work) == [(row, [9, 9], seed) for row, seed in zip([1, 2, 3, 4], "abcd", strict=True)]


@pytest.mark.parametrize("mode", [*ROW_MODES, *PER_RANK_MODES, Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO])
def test_per_worker_needs_one_entry_a_rank_in_every_mode(mode):
    with pytest.raises(ValueError, match="'x' is PerWorker with 3 entries; the group has 4 ranks"):
        plan(mode, x=PerWorker([1, 2, 3]))


def test_per_worker_for_rank_zero_ships_its_entry_only():
    (argument,) = plan(Dispatch.RANK_ZERO, PerWorker([1, 2, 3, 4])).arguments
    assert argument.values == (1,)


def two_to_all(group, *args, **kwargs):
    def spread(values):
        return [values[rank % 2] for rank in range(group.world_size)]

    return tuple(map(spread, args)), {name: spread(values) for name, values in kwargs.items()}


def take_all(group, outputs):
    return {"world": group.world_size, "outputs": outputs}


PAIR = {"dispatch_fn": two_to_all, "collect_fn": take_all}


def test_a_pair_of_functions_is_a_mode():
    planned = plan(PAIR, [1, 2], y=[5, 6])
    assert run(planned, lambda x, y: x + y) == {"world": 4, "outputs": [6, 8, 6, 8]}


def test_custom_functions_get_the_group():
    class Group:
        world_size = 4
        secret = 3

    spec = MethodSpec(
        dispatch_mode={"dispatch_fn": lambda g, x: (([x + g.secret] * 4,), {}), "collect_fn": lambda g, o: o}
    )
    planned = make_plan("f", spec, SHAPE, (1,), group=Group())
    assert run(planned, lambda x: x) == [4, 4, 4, 4]


def test_a_custom_mode_on_rank_zero_gets_and_gives_single_values():
    pair = {"dispatch_fn": lambda group, x: ((x,), {}), "collect_fn": lambda group, out: ("got", out)}
    assert run(plan(pair, 5, execute=Execute.RANK_ZERO), lambda x: x) == ("got", 5)


@pytest.mark.parametrize("laid", [None, [1, 2], ([[1]], {"x": [1]}), (([1, 2],), {})])
def test_a_custom_mode_that_lays_out_nonsense_is_refused(laid):
    pair = {"dispatch_fn": lambda group: laid, "collect_fn": take_all}
    with pytest.raises((TypeError, ValueError), match=r"f: .*(must return|entries)"):
        plan(pair)


@pytest.mark.parametrize("key", ["dispatch_fn", "collect_fn"])
def test_half_a_pair_is_refused(key):
    with pytest.raises(ValueError, match="is missing"):
        register({key: take_all})
    with pytest.raises(TypeError, match="must be callable"):
        register(PAIR | {key: 3})


def test_a_registered_mode_is_found_by_name_and_attribute():
    mode = register_dispatch_mode("TWO_TO_ALL", two_to_all, take_all)
    assert Dispatch.TWO_TO_ALL is mode
    assert MethodSpec(dispatch_mode="TWO_TO_ALL").dispatch_mode is mode
    assert run(plan("TWO_TO_ALL", [1, 2]), lambda x: x)["outputs"] == [1, 2, 1, 2]
    assert get_predefined_dispatch_fn("TWO_TO_ALL") == PAIR


@pytest.mark.parametrize("name", ["ONE_TO_ALL", "mesh", "custom", "not a name"])
def test_a_name_is_registered_once(name):
    with pytest.raises(ValueError, match=r"already registered|cannot name"):
        register_dispatch_mode(name, two_to_all, take_all)


def test_unknown_modes_list_the_known():
    with pytest.raises(ValueError, match=r"unknown .* 'one_to_al'; did you mean 'ONE_TO_ALL'\? known: RANK_ZERO, "):
        MethodSpec(dispatch_mode="one_to_al")
    with pytest.raises(AttributeError, match="known: RANK_ZERO, ONE_TO_ALL"):
        _ = Dispatch.NO_SUCH_MODE


def test_an_updated_mode_changes_methods_labelled_before():
    register_dispatch_mode("CHANGING", two_to_all, take_all)
    spec = MethodSpec(dispatch_mode="CHANGING")
    update_dispatch_mode(Dispatch.CHANGING, two_to_all, lambda group, outputs: sum(outputs))
    assert run(make_plan("f", spec, SHAPE, ([1, 2],)), lambda x: x) == 6
    travelled = pickle.loads(cloudpickle.dumps(spec))
    assert travelled.dispatch_mode.collect_fn(None, [1, 2]) == 3


def test_a_mode_that_was_never_registered_cannot_be_updated():
    with pytest.raises(ValueError, match="unknown dispatch mode"):
        update_dispatch_mode(Dispatch.mesh("x"), two_to_all, take_all)


def test_a_custom_mode_travels_by_value_with_its_class():
    script = """
        import sys, cloudpickle
        from kapell.decorators import Dispatch, register, register_dispatch_mode
        register_dispatch_mode("FAR_AWAY", lambda group, x: (([x] * group.world_size,), {}), lambda group, o: sum(o))
        class Worker:
            @register(Dispatch.FAR_AWAY)
            def f(self, x): return x
        sys.stdout.buffer.write(cloudpickle.dumps(Worker))
    """
    sent = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=True)
    spec = spec_of(pickle.loads(sent.stdout).f)
    assert spec.dispatch_mode.name == "FAR_AWAY"
    assert not hasattr(Dispatch, "FAR_AWAY")
    assert run(make_plan("f", spec, SHAPE, (2,)), lambda x: x) == 8


def test_a_custom_mode_travels_by_import_path_too(tmp_path):
    (tmp_path / "far_modes.py").write_text("def lay(group, x): return ([x],), {}\ndef take(group, o): return o\n")
    script = """
        import pickle, sys, far_modes
        from kapell.decorators import Dispatch, MethodSpec, register_dispatch_mode
        register_dispatch_mode("BY_PATH", far_modes.lay, far_modes.take)
        sys.stdout.buffer.write(pickle.dumps(MethodSpec(dispatch_mode=Dispatch.BY_PATH)))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    sent = subprocess.run(command, capture_output=True, check=True, cwd=tmp_path, env={"PYTHONPATH": _path(tmp_path)})
    receive = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).dispatch_mode.dispatch_fn.__module__)"
    command = [sys.executable, "-c", receive]
    got = subprocess.run(
        command, input=sent.stdout, capture_output=True, check=True, cwd=tmp_path, env={"PYTHONPATH": _path(tmp_path)}
    )
    assert got.stdout.strip() == b"far_modes"


def _path(folder):
    return ":".join([str(folder), *filter(None, sys.path)])


@pytest.mark.parametrize("mode", [*list(Dispatch), Dispatch.mesh("actor")], ids=str)
def test_modes_survive_pickling(mode):
    assert pickle.loads(pickle.dumps(Dispatch.mesh("actor"))) == Dispatch.mesh("actor")
    assert pickle.loads(cloudpickle.dumps(mode)) == mode


@pytest.mark.parametrize("mode", [*ROW_MODES, *PER_RANK_MODES, Dispatch.ONE_TO_ALL])
def test_the_pair_of_a_predefined_mode_is_that_mode(mode):
    pair = get_predefined_dispatch_fn(mode)
    assert set(pair) == {"dispatch_fn", "collect_fn"}
    assert MethodSpec(dispatch_mode=pair).dispatch_mode == mode


def test_a_pair_built_from_predefined_functions_works():
    pair = dict(make_nd_compute_dataproto_dispatch_fn("tp"))
    spec = MethodSpec(dispatch_mode={**pair, "collect_fn": lambda group, outputs: pair["collect_fn"](group, outputs)})
    assert spec.dispatch_mode.dispatch_fn is not None
    planned = make_plan("f", spec, SHAPE, ([1, 2, 3],), {"scale": 2})
    assert run(planned, lambda x, scale: [scale * row for row in x]) == [2, 4, 6]
