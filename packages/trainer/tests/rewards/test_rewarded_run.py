"""A whole run whose reward is code in the sandbox, a service over HTTP and an async function together."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kapell.trainer.build import prepare, train
from kapell.trainer.config_load import load_config
from kapell.trainer.generations import GenerationFiles
from kapell.trainer.reward import RewardError
from kapell.trainer.run_folder import RunFiles


class Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["rows"]
        scores = [{"score": 1.0, "seen": len(row["solution_str"])} for row in rows]
        content = json.dumps({"scores": scores}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def judge():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def config_for(tmp_path, *overrides):
    rows = tmp_path / "rows.jsonl"
    tests = ["assert 1 + 1 == 2", "assert 1 + 1 == 3"]
    row = {"data_source": "code", "prompt": "12+", "reward_model": {"ground_truth": json.dumps(tests)}}
    rows.write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    (tmp_path / "mine.py").write_text(
        "import asyncio\n"
        "async def brief(data_source, solution_str, ground_truth, extra_info):\n"
        "    await asyncio.sleep(0)\n"
        "    if extra_info.get('fail'): raise ValueError('asked to')\n"
        "    return -len(solution_str)\n"
        "def fails(*row): raise ZeroDivisionError('no')\n"
    )
    return load_config(
        overrides=[
            "backend=local",
            f"data.train_files={rows}",
            f"data.val_files={rows}",
            "data.train_batch_size=4",
            "data.max_response_length=3",
            "trainer.total_training_steps=1",
            "trainer.val_before_train=false",
            "trainer.test_freq=1",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.model.hidden_size=16",
            "actor_rollout_ref.rollout.n=2",
            *overrides,
        ]
    ).config


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can confine a process without privileges")
def test_a_run_adds_up_code_tests_a_service_and_an_async_function(tmp_path, judge):
    config = config_for(
        tmp_path,
        "reward.terms.tests.type=sandbox",
        "reward.terms.tests.seconds=60",
        "reward.terms.judge.type=remote",
        f"reward.terms.judge.url={judge}",
        "reward.terms.judge.weight=10",
        "reward.terms.brief.type=function",
        f"reward.terms.brief.path={tmp_path / 'mine.py'}",
        "reward.terms.brief.name=brief",
        "reward.terms.brief.weight=0.1",
        "algorithm.adv_estimator=gdpo",
    )
    files = [RunFiles(tmp_path), GenerationFiles(rollouts=tmp_path / "rollouts")]
    train(prepare(config, tmp_path), tmp_path, hooks=files)
    (record,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    expected = record["reward/tests"] + 10.0 + 0.1 * record["reward/brief"]
    assert record["critic/score/mean"] == pytest.approx(expected, abs=1e-5)
    assert record["reward/judge/seen"] == pytest.approx(-record["reward/brief"])
    assert record["reward/errors"] == 0
    assert "val-aux/code/judge/seen/mean@1" in record
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    for row in rows:  # a response is no Python or a number; then one of two tests is passed
        assert row["tests"] in (0.0, 0.5)
        assert row["score"] == pytest.approx(row["tests"] + 10.0 - 0.1 * len(row["output"]), abs=1e-5)


def test_a_reward_that_fails_ends_the_run_with_the_rows_place(tmp_path):
    path = f"reward.custom_reward_function.path={tmp_path / 'mine.py'}"
    config = config_for(tmp_path, path, "reward.custom_reward_function.name=fails")
    with pytest.raises(RewardError, match=r"row 0 \(data_source 'code'.*ZeroDivisionError: no"):
        train(prepare(config, tmp_path), tmp_path)


def test_a_fallback_keeps_the_run_going_and_is_counted(tmp_path):
    path = f"reward.custom_reward_function.path={tmp_path / 'mine.py'}"
    policy = ["reward.on_error=fallback", "reward.fallback_score=-1"]
    config = config_for(tmp_path, path, "reward.custom_reward_function.name=fails", *policy)
    train(prepare(config, tmp_path), tmp_path, hooks=[RunFiles(tmp_path)])
    (record,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert record["reward/errors"] == 8
    assert record["val/reward_errors"] == 4
    assert record["critic/score/mean"] == -1.0
