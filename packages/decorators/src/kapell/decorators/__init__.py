"""Declare once how a worker's method is dispatched over a group: `register`, dispatch modes, and plans of calls.

Standard library only. `register` labels a method, `make_plan` turns a label, the shape of a group and the arguments
into a `DispatchPlan` that any backend can run.
"""

from kapell.decorators.arguments import PlannedArgument
from kapell.decorators.balance import karmarkar_karp
from kapell.decorators.calls import signature_of
from kapell.decorators.columns import known_writers
from kapell.decorators.functions import (
    collect_all_to_all,
    collect_dp_compute,
    collect_dp_compute_data_proto,
    collect_lazy_compute_data_proto,
    collect_nd_compute,
    collect_nd_compute_dataproto,
    dispatch_all_to_all,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_lazy_compute_data_proto,
    dispatch_nd_compute,
    dispatch_nd_compute_dataproto,
    dispatch_one_to_all,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    make_nd_compute_dataproto_dispatch_fn,
)
from kapell.decorators.futures import Future, is_future, materialize
from kapell.decorators.markers import PerWorker, Replicate
from kapell.decorators.mesh import Group, GroupShape, MeshLayout
from kapell.decorators.modes import Dispatch, Execute, Reduction, register_dispatch_mode, update_dispatch_mode
from kapell.decorators.plan import DispatchPlan
from kapell.decorators.planning import CallPlanner, make_plan
from kapell.decorators.reduce import Metric
from kapell.decorators.spec import MethodSpec, Uneven, register, spec_of
from kapell.decorators.splitter import Splitter
from kapell.decorators.splitting import register_splitter, splitter_of
from kapell.decorators.table import format_bytes, nbytes_of

__all__ = [
    "CallPlanner",
    "Dispatch",
    "DispatchPlan",
    "Execute",
    "Future",
    "Group",
    "GroupShape",
    "MeshLayout",
    "MethodSpec",
    "Metric",
    "PerWorker",
    "PlannedArgument",
    "Reduction",
    "Replicate",
    "Splitter",
    "Uneven",
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
    "format_bytes",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "is_future",
    "karmarkar_karp",
    "known_writers",
    "make_nd_compute_dataproto_dispatch_fn",
    "make_plan",
    "materialize",
    "nbytes_of",
    "register",
    "register_dispatch_mode",
    "register_splitter",
    "signature_of",
    "spec_of",
    "splitter_of",
    "update_dispatch_mode",
]
