"""verl's functions behind the modes: `dispatch_*(group, *args, **kwargs)` and `collect_*(group, outputs)`.

For code that calls them, or builds a pair of its own from them. Each is the planning of its mode, written out as
one list a rank and argument; `collect_*` take outputs in rank order.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict

from kapell.decorators.collect import join_outputs
from kapell.decorators.mesh import GroupShape, MeshLayout
from kapell.decorators.modes import Arguments, Dispatch, Execute, ModeFunctions, as_mode, resolve
from kapell.decorators.planning import make_plan
from kapell.decorators.spec import MethodSpec

__all__ = [
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "collect_lazy_compute_data_proto",
    "collect_nd_compute",
    "collect_nd_compute_dataproto",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_lazy_compute_data_proto",
    "dispatch_nd_compute",
    "dispatch_nd_compute_dataproto",
    "dispatch_one_to_all",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "make_nd_compute_dataproto_dispatch_fn",
]

Laid = tuple[tuple[list[Any], ...], dict[str, list[Any]]]
"""Positional and keyword arguments, each a list of one value a rank."""


class ExecuteFn(TypedDict):
    """Which of a group's methods runs a call."""

    execute_fn_name: str
    """`execute_all` or `execute_rank_zero`."""


def _lay(mode: Dispatch, shape: GroupShape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Laid:
    plan = make_plan("dispatch", MethodSpec(dispatch_mode=mode), shape, args, kwargs)
    laid_args: list[list[Any]] = []
    laid_kwargs: dict[str, list[Any]] = {}
    for argument in plan.arguments:
        values = list(argument.values)
        lists = [values[which] for which in argument.index]
        if argument.name is None:
            laid_args.append(lists)
        else:
            laid_kwargs[argument.name] = lists
    return tuple(laid_args), laid_kwargs


def dispatch_one_to_all(group: Any, *args: Any, **kwargs: Any) -> Laid:
    """Each value for every rank.

    >>> dispatch_one_to_all(GroupShape(2), 7, scale=[1])
    (([7, 7],), {'scale': [[1], [1]]})
    """
    return _lay(Dispatch.ONE_TO_ALL, GroupShape.of(group), args, kwargs)


def dispatch_all_to_all(group: Any, *args: Any, **kwargs: Any) -> Any:
    """The arguments as they are: they are lists of one value a rank already."""
    return args, kwargs


def collect_all_to_all(group: Any, outputs: Any) -> Any:
    """The outputs as they are."""
    return outputs


def dispatch_dp_compute(group: Any, *args: Any, **kwargs: Any) -> Laid:
    """Checks that each argument is a list of one value a rank."""
    return _lay(Dispatch.DP_COMPUTE, GroupShape.of(group), args, kwargs)


def collect_dp_compute(group: Any, outputs: Sequence[Any]) -> list[Any]:
    """One output a rank, checked."""
    if len(outputs) != group.world_size:
        raise ValueError(f"collected {len(outputs)} outputs of a group of {group.world_size} ranks")
    return list(outputs)


def dispatch_dp_compute_data_proto(group: Any, *args: Any, **kwargs: Any) -> Laid:
    """Rows split over all ranks; a batch whose padding is enabled is padded and marked.

    >>> dispatch_dp_compute_data_proto(GroupShape(2), [1, 2, 3], scale=2)
    (([[1, 2], [3]],), {'scale': [2, 2]})
    """
    return _lay(Dispatch.DP_COMPUTE_PROTO, GroupShape.of(group), args, kwargs)


def dispatch_dp_compute_data_proto_with_func(group: Any, *args: Any, **kwargs: Any) -> Laid:
    """As `dispatch_dp_compute_data_proto`, with a function in front that every rank receives."""
    return _lay(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, GroupShape.of(group), args, kwargs)


def collect_dp_compute_data_proto(group: Any, outputs: Sequence[Any]) -> Any:
    """The rows of all ranks joined.

    >>> collect_dp_compute_data_proto(GroupShape(2), [[1, 2], [3]])
    [1, 2, 3]
    """
    return join_outputs("collect", range(len(outputs)), collect_dp_compute(group, outputs))


def dispatch_nd_compute(dp_rank_mapping: list[int], dp_size: int, group: Any, *args: Any, **kwargs: Any) -> Laid:
    """Lists of one value a data-parallel rank, spread over the ranks that work for it.

    >>> dispatch_nd_compute([0, 0, 1, 1], 2, GroupShape(4), ["a", "b"])
    ((['a', 'a', 'b', 'b'],), {})
    """

    def spread(label: str, values: Any) -> list[Any]:
        if not isinstance(values, list | tuple) or len(values) != dp_size:
            raise ValueError(f"argument {label} must be a list of {dp_size} entries, one a data-parallel rank")
        return [values[dp_rank] for dp_rank in dp_rank_mapping]

    laid = tuple(spread(str(index), values) for index, values in enumerate(args))
    return laid, {name: spread(name, values) for name, values in kwargs.items()}


def collect_nd_compute(collect_mask: list[bool], group: Any, outputs: Sequence[Any]) -> list[Any]:
    """The outputs of the collected ranks, in rank order."""
    outputs = collect_dp_compute(group, outputs)
    return [output for output, collected in zip(outputs, collect_mask, strict=True) if collected]


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: list[int], dp_size: int, group: Any, *args: Any, **kwargs: Any
) -> Laid:
    """Rows split over `dp_size` shards, each sent to the ranks that work for it."""
    first = {dp_rank: rank for rank, dp_rank in reversed(list(enumerate(dp_rank_mapping)))}
    collect = tuple(first[dp_rank] == rank for rank, dp_rank in enumerate(dp_rank_mapping))
    layout = MeshLayout(tuple(dp_rank_mapping), collect)
    if layout.dp_size != dp_size:
        raise ValueError(f"the mapping {dp_rank_mapping} has {layout.dp_size} data-parallel ranks, not {dp_size}")
    return _lay(Dispatch.mesh("mesh"), GroupShape(group.world_size, meshes={"mesh": layout}), args, kwargs)


def collect_nd_compute_dataproto(collect_mask: list[bool], group: Any, outputs: Sequence[Any]) -> Any:
    """The rows of the collected ranks joined, in rank order."""
    ranks = [rank for rank, collected in enumerate(collect_mask) if collected]
    return join_outputs("collect", ranks, collect_nd_compute(collect_mask, group, outputs))


def dispatch_lazy_compute_data_proto(mesh_name: str, group: Any, *args: Any, **kwargs: Any) -> Laid:
    """Rows split over the data-parallel ranks of a mesh, about which the group asks its workers once."""
    layout = group.mesh(mesh_name)
    return dispatch_nd_compute_dataproto(list(layout.dp_ranks), layout.dp_size, group, *args, **kwargs)


def collect_lazy_compute_data_proto(mesh_name: str, group: Any, outputs: Sequence[Any]) -> Any:
    """The rows of a mesh's collected ranks joined, in data-parallel order."""
    ranks = group.mesh(mesh_name).collect_ranks
    outputs = collect_dp_compute(group, outputs)
    return join_outputs("collect", ranks, [outputs[rank] for rank in ranks])


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> ModeFunctions:
    """`Dispatch.mesh(mesh_name)` by verl's name, as a dict of its two functions.

    >>> from kapell.decorators import register, spec_of
    >>> @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    ... def update(self, batch): return batch
    >>> spec_of(update).dispatch_mode == Dispatch.mesh("actor")
    True
    """
    return ModeFunctions(
        Dispatch.mesh(mesh_name),
        partial(dispatch_lazy_compute_data_proto, mesh_name),
        partial(collect_lazy_compute_data_proto, mesh_name),
    )


def _forbidden(group: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("a DIRECT_ROLLOUT_METHOD is called on the worker itself, not through its group")


def _rank_zero(group: Any, *args: Any, **kwargs: Any) -> Any:
    return args, kwargs


_PREDEFINED: dict[Dispatch, tuple[Callable[..., Any], Callable[..., Any]]] = {
    Dispatch.RANK_ZERO: (_rank_zero, collect_all_to_all),
    Dispatch.ONE_TO_ALL: (dispatch_one_to_all, collect_all_to_all),
    Dispatch.ALL_TO_ALL: (dispatch_all_to_all, collect_all_to_all),
    Dispatch.DP_COMPUTE: (dispatch_dp_compute, collect_dp_compute),
    Dispatch.DP_COMPUTE_PROTO: (dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: (dispatch_dp_compute_data_proto_with_func, collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_METRIC: (dispatch_dp_compute_data_proto, collect_dp_compute),
    Dispatch.DIRECT_ROLLOUT_METHOD: (_forbidden, _forbidden),
}


def get_predefined_dispatch_fn(dispatch_mode: Dispatch | str) -> ModeFunctions:
    """The pair of functions of a mode, by value or registered name.

    >>> get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)["collect_fn"].__name__
    'collect_all_to_all'
    """
    mode = resolve(as_mode(dispatch_mode))
    if mode.arguments is Arguments.CUSTOM:
        assert mode.dispatch_fn is not None
        assert mode.collect_fn is not None
        return ModeFunctions(mode, mode.dispatch_fn, mode.collect_fn)
    if mode.mesh_name is not None:
        return make_nd_compute_dataproto_dispatch_fn(mode.mesh_name)
    return ModeFunctions(mode, *_PREDEFINED[mode])


def get_predefined_execute_fn(execute_mode: Execute) -> ExecuteFn:
    """The name of the group's method that runs a call.

    >>> get_predefined_execute_fn(Execute.RANK_ZERO)
    {'execute_fn_name': 'execute_rank_zero'}
    """
    return {"execute_fn_name": f"execute_{execute_mode.value}"}
