"""Which Ray is joined, and when one is started: told by what is asked of Ray, without starting any."""

import logging
import os
import socket

import pytest
import ray

from kapell.ray_backend import RayBackend, ensure_ray


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What `ray.init` is called with, in a process that is not connected, on a machine where no Ray was started."""
    calls = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(options))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    return calls


@pytest.fixture
def left_address(tmp_path):
    def leave(address):
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"{address}\n")

    return leave


@pytest.fixture
def answering_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def none_runs(**options):
    raise ConnectionError("Could not find any running Ray instance")


def test_the_ray_that_runs_here_is_joined(asked, left_address, answering_address):
    left_address(answering_address)
    assert ensure_ray()
    assert [call["address"] for call in asked] == ["auto"]


@pytest.fixture
def lonely(asked, monkeypatch):
    """`asked`, where Ray finds none to join."""
    start = ray.init

    def start_only(**options):
        if options["address"] == "auto":
            raise ConnectionError("Could not find any running Ray instance")
        start(**options)

    monkeypatch.setattr(ray, "init", start_only)
    return asked


def test_one_is_started_with_places_for_small_pools_where_none_runs(lonely):
    assert ensure_ray()
    assert [(call["address"], call["include_dashboard"]) for call in lonely] == [("local", False)]
    assert lonely[0]["num_cpus"] >= 16


def test_one_that_is_started_has_room_for_the_first_pool_and_others_beside_it(lonely):
    RayBackend().resource_pool([300, 300], cpus_per_process=0.5)
    assert lonely[0]["num_cpus"] == 316


@pytest.mark.parametrize("own", [None, "50"])
def test_one_that_is_started_frees_its_store_at_once_unless_told_otherwise(lonely, monkeypatch, own):
    variable = "RAY_free_objects_batch_size"
    monkeypatch.delenv(variable, raising=False)
    if own:
        monkeypatch.setenv(variable, own)
    start, told = ray.init, []
    monkeypatch.setattr(ray, "init", lambda **options: told.append(os.environ.get(variable)) or start(**options))
    assert ensure_ray()
    assert told == [own, own or "1"]  # for joining one, and for the one that is started
    assert os.environ.get(variable) == own


def test_one_is_started_with_a_dashboard_and_cpus_as_asked(lonely):
    RayBackend(dashboard=True, num_cpus=3).resource_pool([300])
    assert [(call["num_cpus"], call["include_dashboard"]) for call in lonely] == [(3, True)]


def test_the_address_that_a_killed_ray_left_is_not_waited_for(asked, left_address, deaf_address, caplog):
    left_address(deaf_address)
    assert ensure_ray(num_cpus=3)
    assert [(call["address"], call["num_cpus"]) for call in asked] == [("local", 3)]
    assert (logging.WARNING, True) in [
        (record.levelno, f"nothing answers at {deaf_address}" in record.getMessage()) for record in caplog.records
    ]


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_cluster_that_was_named_and_does_not_answer_is_an_error_and_none_is_started(
    asked, deaf_address, monkeypatch, by_variable
):
    if by_variable:
        monkeypatch.setenv("RAY_ADDRESS", deaf_address)
    with pytest.raises(ConnectionError, match=f"no Ray answers at {deaf_address}") as caught:
        ensure_ray(**({} if by_variable else {"address": deaf_address}))
    assert ("RAY_ADDRESS" in str(caught.value)) == by_variable
    assert not asked


def test_a_cluster_that_was_named_is_joined_by_its_name(asked, answering_address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", answering_address)
    assert ensure_ray()
    assert ensure_ray(address=answering_address)
    assert [call["address"] for call in asked] == ["auto", answering_address]  # Ray reads the variable itself


def test_a_cluster_that_answers_and_refuses_is_an_error_that_speaks_of_tokens(asked, answering_address, monkeypatch):
    monkeypatch.setattr(ray, "init", none_runs)
    with pytest.raises(ConnectionError) as caught:
        ensure_ray(address=answering_address)
    assert "RAY_AUTH_MODE=token" in "".join(caught.value.__notes__)


def test_a_process_that_is_connected_stays_where_it_is(asked, deaf_address, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert not ensure_ray(address=deaf_address)
    assert not asked
