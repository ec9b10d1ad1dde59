"""Which device a worker's local rank stands for, by what Ray set and what it was told to leave alone."""

import pytest

from kapell.ray_backend.devices import device_of_all, visible_devices

NOSET = "RAY_EXPERIMENTAL_NOSET_"


@pytest.mark.parametrize(
    ("assigned", "environ", "expected"),
    [
        ({"GPU": ["2"]}, {"CUDA_VISIBLE_DEVICES": "2"}, ""),
        ({"GPU": ["2"]}, {NOSET + "CUDA_VISIBLE_DEVICES": "1"}, "2"),
        ({"GPU": ["2"]}, {NOSET + "CUDA_VISIBLE_DEVICES": "True"}, "2"),
        ({"GPU": ["2"]}, {NOSET + "CUDA_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "2"}, ""),
        ({"GPU": ["2", "3"]}, {NOSET + "CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "2"),
        # An AMD node: Ray sets AMD's variable, whatever it is told about the other maker's.
        ({"GPU": ["2"]}, {NOSET + "HIP_VISIBLE_DEVICES": "1"}, "2"),
        ({"GPU": ["2"]}, {NOSET + "ROCR_VISIBLE_DEVICES": "1"}, "2"),
        ({"GPU": ["2"]}, {NOSET + "CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2"}, ""),
        ({"GPU": ["2"]}, {NOSET + "CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "2"}, ""),
        ({"NPU": ["2"]}, {NOSET + "ASCEND_RT_VISIBLE_DEVICES": "1"}, "2"),
        ({"NPU": ["2"], "GPU": []}, {NOSET + "CUDA_VISIBLE_DEVICES": "1", "ASCEND_RT_VISIBLE_DEVICES": "2"}, ""),
        ({"GPU": [], "NPU": []}, {NOSET + "CUDA_VISIBLE_DEVICES": "1"}, ""),
        ({"FPGA": ["2"]}, {NOSET + "CUDA_VISIBLE_DEVICES": "1"}, ""),
    ],
)
def test_the_local_rank_stands_for_the_device_only_where_ray_left_its_kind_alone(assigned, environ, expected):
    assert device_of_all(assigned, environ) == expected


def test_the_variables_of_every_maker_are_passed_on_and_no_others():
    own = {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1", "ASCEND_RT_VISIBLE_DEVICES": "2"}
    assert visible_devices({**own, "PATH": "/bin", NOSET + "CUDA_VISIBLE_DEVICES": "1"}) == own
