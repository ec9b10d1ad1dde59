"""Which devices a worker sees. Ray sets the variable of its node's kind of device, unless it is told not to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["device_of_all", "visible_devices"]

_VARIABLES = {
    "GPU": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "NPU": ("ASCEND_RT_VISIBLE_DEVICES",),
    "HPU": ("HABANA_VISIBLE_MODULES",),
    "TPU": ("TPU_VISIBLE_CHIPS",),
    "neuron_cores": ("NEURON_RT_VISIBLE_CORES",),
}
"""By Ray's name of the resource. What "GPU" stands for, Ray finds out on each node; of AMD's two variables it sets
``ROCR_VISIBLE_DEVICES`` in its older versions and ``HIP_VISIBLE_DEVICES`` in its newer ones."""

_LEAVE_ALONE = "RAY_EXPERIMENTAL_NOSET_"


def visible_devices(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that say which devices the process sees."""
    return {name: environ[name] for names in _VARIABLES.values() for name in names if name in environ}


def device_of_all(assigned: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> str:
    """The id of the process's first device where it sees all devices of its node; empty where it sees its own only.

    ``assigned`` are the ids that Ray gives the process, by resource.

    >>> environ = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    >>> device_of_all({"GPU": ["3"], "NPU": []}, environ), device_of_all({"NPU": ["3"]}, environ)
    ('3', '')
    """
    for resource, ids in assigned.items():
        variables = _VARIABLES.get(resource, ())
        alone = [name for name in variables if environ.get(_LEAVE_ALONE + name, "").lower() in ("1", "true")]
        set_by_ray = any(environ.get(name) == ",".join(ids) for name in variables if name not in alone)
        if ids and alone and not set_by_ray:
            return ids[0]
    return ""
