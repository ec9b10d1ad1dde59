import pickle
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from kapell.ray_backend.rendezvous import PortUnavailableError, claim_port


def test_fifty_claims_from_eight_threads_are_fifty_ports():
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda _: claim_port(), range(50)))
    assert len({claim.port for claim in claims}) == 50
    for claim in claims:
        claim.close()


def test_two_claims_from_one_range_do_not_meet():
    with claim_port() as free:
        first = free.port
    candidates = range(first, first + 20)
    with claim_port(candidates) as one, claim_port(candidates) as other:
        assert one.port != other.port


def test_a_taken_first_candidate_is_passed_over():
    with claim_port() as taken, claim_port(range(taken.port, taken.port + 20)) as claim:
        assert claim.port > taken.port


def test_a_busy_explicit_port_is_an_error_that_names_it():
    with claim_port() as taken, pytest.raises(PortUnavailableError, match=f"port {taken.port}"):
        claim_port([taken.port])


def test_an_exhausted_range_is_an_error_that_names_it():
    with claim_port() as taken, pytest.raises(PortUnavailableError, match=str(taken.port)):
        claim_port(range(taken.port, taken.port + 1))


def test_a_server_can_listen_on_a_claimed_port_and_others_cannot_take_it():
    with claim_port() as claim:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", claim.port))
        claim.release_for_server()
        server = socket.create_server(("", claim.port), reuse_port=False)
        with server, socket.create_connection(("127.0.0.1", claim.port), timeout=5):
            pass


def test_closing_a_claim_twice_is_harmless():
    claim = claim_port()
    claim.close()
    claim.close()


def test_the_error_survives_pickling():
    error = PortUnavailableError("port 1", "host")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
