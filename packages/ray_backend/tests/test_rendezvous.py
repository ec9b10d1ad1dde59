import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from kapell.decorators import Dispatch, register
from kapell.ray_backend import RayWorkerGroup
from kapell.ray_backend.rendezvous import PortUnavailableError, claim_port
from kapell.workergroup import ClassWithInitArgs, Worker


def family_of(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class Meeter(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def meet(self):
        """What rank 0's server heard, where the backend said that the ranks meet."""
        address, port = self.get_master_addr_port()
        if self.rank == 0:
            with socket.create_server((address, int(port)), family=family_of(address)) as server:
                return server.accept()[0].makefile().readline().strip()
        while True:  # rank 0 may not listen yet
            try:
                with socket.create_connection((address, int(port))) as connection:
                    connection.sendall(f"rank {self.rank} at {address}\n".encode())
                    return ""
            except ConnectionRefusedError:
                time.sleep(0.01)


@pytest.fixture
def needs_address():
    def need(address):
        try:
            socket.create_server((address, 0), family=family_of(address)).close()
        except OSError as error:
            pytest.skip(f"this machine has no {address}: {error}")

    return need


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


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_torchs_store_meets_on_a_port_of_the_range_that_others_could_not_take(address, needs_address):
    needs_address(address)
    with claim_port() as free:
        ports = range(free.port, free.port + 20)
    with claim_port(ports) as claim:
        assert claim.port in ports
        with socket.socket(family_of(address)) as other, pytest.raises(OSError, match="in use"):
            other.bind((address, claim.port))
        claim.release_for_server()
        server = TCPStore(address, claim.port, is_master=True, wait_for_workers=False)
        TCPStore(address, claim.port, is_master=False).set("who", "rank 1")
        assert server.get("who") == b"rank 1"


def test_closing_a_claim_twice_is_harmless():
    claim = claim_port()
    claim.close()
    claim.close()


def test_the_error_survives_pickling():
    error = PortUnavailableError("port 1", "host")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_rank_zero_holds_its_port_until_the_ranks_meet_there(pool):
    with claim_port() as free:
        ports = range(free.port, free.port + 20)
    limits = [ports.start, ports.stop]
    with RayWorkerGroup(pool, ClassWithInitArgs(Meeter), master_port_range=limits, timeout=240) as group:
        address, port = group.master_address, int(group.master_port)
        assert port in ports
        with socket.socket(family_of(address)) as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port))
        assert group.meet() == [f"rank 1 at {address}", ""]


def test_ranks_meet_at_an_address_of_version_6(pool, needs_address):
    needs_address("::1")
    with (
        claim_port() as claim,
        RayWorkerGroup(
            pool, ClassWithInitArgs(Meeter), master_addr="::1", master_port=claim.port, timeout=240
        ) as group,
    ):
        claim.release_for_server()
        assert group.meet() == ["rank 1 at ::1", ""]
