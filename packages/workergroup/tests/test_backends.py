import pytest

from kapell.workergroup import BackendNotFoundError, LocalBackend, load_backend


def test_local_backend_is_found_by_entry_point():
    assert load_backend("local") is LocalBackend


def test_unknown_backend_says_what_is_installed_and_near():
    with pytest.raises(BackendNotFoundError, match=r"no backend 'locla' is installed \(installed: .*local.*'local'\?"):
        load_backend("locla")


def test_known_backend_that_is_missing_says_what_to_install():
    assert "pip install kapell-ray-backend" in str(BackendNotFoundError("ray", ["local"]))


def test_any_missing_backend_says_how_one_is_offered():
    with pytest.raises(LookupError, match=r"entry point in the group 'kapell\.backends'"):
        load_backend("zzz")


def test_unknown_mode_is_refused():
    with LocalBackend("parallel") as backend, pytest.raises(ValueError, match="'serial' or 'threads'"):
        backend.worker_group(backend.resource_pool([1]), None)
