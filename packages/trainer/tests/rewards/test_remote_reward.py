"""Rewards over HTTP, against a real server on the loopback interface."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from kapell.trainer.remote_reward import RemoteReward, RemoteRewardError
from kapell.trainer.reward_functions import RewardRows, RowScore
from kapell.trainer.reward_sum import RewardSum, RewardTerm


@contextmanager
def service(respond):
    """A server whose ``respond(number, rows, headers)`` gives status, JSON or text, and headers."""
    requests = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                requests.append(body)
                number = len(requests)
            status, answer, headers = respond(number, body["rows"], self.headers)
            content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def good(number, rows, headers):
    return 200, {"scores": [float(len(row["solution_str"])) for row in rows]}, {}


def rows_of(count, *, source="judge", truth="t"):
    return RewardRows(
        data_sources=[source] * count,
        solutions=["x" * row for row in range(count)],
        ground_truths=[truth] * count,
        extra_infos=[{"index": np.int64(row)} for row in range(count)],
    )


def scores(url, rows, **options):
    return RewardSum([RewardTerm("judge", RemoteReward(url=url, backoff=0.01, **options))])(rows).scores


def test_rows_are_sent_in_batches_and_come_back_in_order():
    with service(good) as (url, requests):
        assert scores(url, rows_of(10), batch_size=4) == [float(n) for n in range(10)]
    assert sorted(len(request["rows"]) for request in requests) == [2, 4, 4]
    assert {"data_source", "solution_str", "ground_truth", "extra_info"} == set(requests[0]["rows"][0])


def test_no_rows_send_nothing():
    with service(good) as (url, requests):
        assert scores(url, rows_of(0)) == []
    assert requests == []


def test_requests_overlap_but_no_more_than_allowed():
    running, most, lock = 0, 0, threading.Lock()

    def respond(number, rows, headers):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return good(number, rows, headers)

    with service(respond) as (url, _):
        scores(url, rows_of(8), batch_size=1, concurrency=2)
    assert most == 2


def test_scores_may_be_objects_with_more():
    def respond(number, rows, headers):
        return 200, {"scores": [{"score": 0.0, "reason": "bad"}, 1]}, {}

    with service(respond) as (url, _):
        outcomes = list(RemoteReward(url=url)(rows_of(2)))
    assert outcomes == [RowScore(0.0, {"reason": "bad"}), RowScore(1.0)]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_status_that_may_pass_is_tried_again(status):
    def respond(number, rows, headers):
        return good(number, rows, headers) if number == 3 else (status, "later", {})

    with service(respond) as (url, requests):
        assert scores(url, rows_of(2), retries=2) == [0.0, 1.0]
    assert len(requests) == 3


def test_pauses_grow_and_the_service_may_ask_for_longer(monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)

    def respond(number, rows, headers):
        return (503, "", {"Retry-After": "7"} if number == 2 else {}) if number < 4 else good(number, rows, headers)

    with service(respond) as (url, _):
        reward = RemoteReward(url=url, backoff=0.5, retries=3)
        assert list(reward(rows_of(1))) == [RowScore(0.0)]
    assert [pause for pause in pauses if pause >= 0.5] == [0.5, 7.0, 2.0]


def test_a_pause_too_long_to_wait_for_is_an_error_at_once():
    with service(lambda *_: (429, "", {"Retry-After": "86400"})) as (url, requests):
        with pytest.raises(RemoteRewardError, match="429"):
            scores(url, rows_of(1))
        assert len(requests) == 1


def test_an_error_names_address_status_body_and_rows():
    with service(lambda *_: (503, "no GPU left", {})) as (url, requests):
        with pytest.raises(RemoteRewardError) as caught:
            scores(url, rows_of(5, source="math"), retries=2, batch_size=3, concurrency=1)
        assert len(requests) in (3, 6)  # the second batch may be under way
    message = str(caught.value)
    for part in (url, "503", "3 attempts", "no GPU left", "rows 0 to 2", "math"):
        assert part in message


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_status_that_will_not_pass_is_not_tried_again(status):
    with service(lambda *_: (status, "no", {})) as (url, requests):
        with pytest.raises(RemoteRewardError, match=str(status)):
            scores(url, rows_of(1))
        assert len(requests) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("<html>", "answered no JSON"),
        ([1.0], "without a list under 'scores'"),
        ({"score": [1.0]}, "without a list under 'scores'"),
        ({"scores": [1.0]}, "1 scores for 2 rows"),
        ({"scores": [1.0, 2.0, 3.0]}, "3 scores for 2 rows"),
        ({"scores": None}, "without a list under 'scores'"),
        ({"scores": [1.0, None]}, r"row 1 .*"),
        ({"scores": [1.0, "2"]}, r"'2' of type str for row 1"),
        ('{"scores": [1.0, NaN]}', r"returned nan for row 1"),
        ({"scores": [1.0, {"error": "too long"}]}, r"could not score row 1 .*too long"),
    ],
)
def test_a_wrong_answer_is_an_error_and_never_a_zero(answer, message):
    with service(lambda *_: (200, answer, {})) as (url, _), pytest.raises(RemoteRewardError, match=message) as caught:
        scores(url, rows_of(2))
    assert url in str(caught.value)


def test_nobody_listening_is_an_error_after_the_attempts():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(RemoteRewardError, match=r"no answer from .* in 2 attempts") as caught:
            scores(url, rows_of(1), retries=1)
    assert url in str(caught.value)


def test_a_service_that_hangs_is_an_error_after_the_timeout():
    release = threading.Event()

    def respond(number, rows, headers):
        release.wait(30)
        return good(number, rows, headers)

    with service(respond) as (url, _):
        with pytest.raises(RemoteRewardError, match="timed out"):
            scores(url, rows_of(1), timeout=0.2, retries=0)
        release.set()


def test_an_answer_that_breaks_off_is_asked_for_again():
    def respond(number, rows, headers):
        status, answer, _ = good(number, rows, headers)
        return status, answer, {"Content-Length": "1000"} if number == 1 else {}

    with service(respond) as (url, requests):
        assert scores(url, rows_of(2), retries=1) == [0.0, 1.0]
    assert len(requests) == 2


def test_one_failed_batch_leaves_the_others_their_scores_under_a_fallback():
    def respond(number, rows, headers):
        return (400, "no", {}) if rows[0]["solution_str"] == "xx" else good(number, rows, headers)

    with service(respond) as (url, _):
        reward = RewardSum([RewardTerm("judge", RemoteReward(url=url, batch_size=2))], fallback=-1.0)
        result = reward(rows_of(6))
    assert result.scores == [0.0, 1.0, -1.0, -1.0, 4.0, 5.0]
    assert result.errors == {"judge": 2}


def test_a_key_comes_from_the_environment(monkeypatch):
    seen = []

    def respond(number, rows, headers):
        seen.append(headers["Authorization"])
        return good(number, rows, headers)

    with service(respond) as (url, _):
        with pytest.raises(RemoteRewardError, match="JUDGE_KEY"):
            scores(url, rows_of(1), api_key_env="JUDGE_KEY")
        monkeypatch.setenv("JUDGE_KEY", "abc")
        scores(url, rows_of(1), api_key_env="JUDGE_KEY")
    assert seen == ["Bearer abc"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "ftp://x"}, "http"),
        ({"url": "http://x", "batch_size": 0}, "batch_size"),
        ({"url": "http://x", "retries": -1}, "retries"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        RemoteReward(**options)
