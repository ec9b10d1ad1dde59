import pytest
from hypothesis import given
from hypothesis import strategies as st

from kapell.ray_backend.resources import ProcessResources, share_of


@pytest.mark.parametrize("count", range(1, 17))
def test_count_shares_always_fit_one_device(count):
    # Ray compares whole ten-thousandths, so the sum is taken there.
    assert count * round(share_of(count) * 10_000) <= 10_000


@given(st.integers(1, 10_000))
def test_a_share_is_a_positive_number_of_ten_thousandths(count):
    grains = share_of(count) * 10_000
    assert abs(grains - round(grains)) < 1e-6
    assert grains >= 1


@given(st.integers(1, 64), st.sampled_from([0.5, 1, 2, 4, 7.25]))
def test_groups_shares_of_a_bundle_never_exceed_it(count, cpus):
    options = ProcessResources(cpus=cpus, colocate_count=count).actor_options(use_accelerator=False)
    assert count * round(options["num_cpus"] * 10_000) <= cpus * 10_000


def test_shares_above_one_are_whole_because_ray_refuses_fractions_there():
    assert ProcessResources(accelerator="GPU", accelerators=5, colocate_count=2).actor_options(
        use_accelerator=True
    ) == {
        "num_cpus": 0.5,
        "num_gpus": 2.0,
    }


def test_cpus_do_not_grow_with_the_colocate_count():
    assert ProcessResources(colocate_count=1).bundle == ProcessResources(colocate_count=10).bundle == {"CPU": 1.0}


def test_a_named_accelerator_is_asked_for_by_its_resource_name():
    npu = ProcessResources(accelerator="NPU", colocate_count=4)
    assert npu.bundle == {"CPU": 1.0, "NPU": 1.0}
    assert npu.actor_options(use_accelerator=True) == {"num_cpus": 0.25, "resources": {"NPU": 0.25}}


@pytest.mark.parametrize("name", ["H100", "accelerator_type:H100"])
def test_an_accelerator_type_pins_the_bundle_with_a_mark(name):
    bundle = ProcessResources(accelerator="GPU", accelerator_type=name).bundle
    assert bundle == {"CPU": 1.0, "GPU": 1.0, "accelerator_type:H100": 0.0001}


def test_a_group_may_leave_the_accelerator_alone():
    assert ProcessResources(accelerator="GPU", colocate_count=1).actor_options(use_accelerator=False) == {
        "num_cpus": 1.0
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpus": -1}, "-1 CPUs"),
        ({"accelerator": "GPU", "accelerators": 0}, "0 devices"),
        ({"colocate_count": 0}, "among 0 worker groups"),
    ],
)
def test_odd_amounts_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        _ = ProcessResources(**settings)


def test_a_process_that_asks_for_nothing_is_refused():
    with pytest.raises(ValueError, match="must ask for something"):
        _ = ProcessResources(cpus=0).bundle
