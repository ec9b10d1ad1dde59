"""Trackers as hooks: what they are given, and that one that fails neither stops the training nor the others."""

import json
import logging
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kapell.trainer.config_load import ConfigError, load_config
from kapell.trainer.hooks import Hook, Hooks, RunSummary
from kapell.trainer.loggers import LOGGERS, MissingLoggerError, build_loggers, flat_numbers
from kapell.trainer.run_folder import RunFiles

ODD_VALUES = {
    "tensor": torch.tensor(1.0),
    "numpy": np.float32(2.0),
    "nan": math.nan,
    "inf": math.inf,
    "none": None,
    "text": "s",
    "list": [1, 2],
    "nested": {"a": {"b": 3}},
    "val/pass@4": 0.5,
    "zero": 0.0,
}
SAMPLES = [{"prompt": "a|b\nc", "response": "r", "score": 0.0}, {"prompt": "x", "note": None}]
SUMMARY = RunSummary(steps=2, total_steps=2, seconds=1.0)


class Recorder:
    """Stands for a tracker's package: whatever is called on it is written down."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call

    def of(self, name):
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def logger_with(monkeypatch, tmp_path, name):
    recorder = Recorder()
    recorder.__spec__ = SimpleNamespace(name=name)
    monkeypatch.setitem(sys.modules, name, recorder)
    config = {"trainer.seed": 1}
    (logger,) = build_loggers(["console", name, "file"], tmp_path, project="p", experiment="e", config=config)
    return logger, recorder


def run(*loggers, strict=False):
    hooks = Hooks(loggers, strict=strict)
    hooks.call("on_start", 2)
    for step in (1, 2):
        hooks.call("on_metrics", step, ODD_VALUES)
    hooks.call("on_samples", 2, SAMPLES)
    hooks.call("on_end", SUMMARY)


def test_every_value_becomes_numbers_or_is_left_out():
    numbers = dict(flat_numbers(ODD_VALUES))
    assert math.isnan(numbers.pop("nan"))
    assert numbers == {
        "tensor": 1.0,
        "numpy": 2.0,
        "inf": math.inf,
        "list/0": 1.0,
        "list/1": 2.0,
        "nested/a/b": 3.0,
        "val/pass@4": 0.5,
        "zero": 0.0,
    }
    assert {type(number) for number in numbers.values()} == {float}


def test_tensorboard_writes_what_tensorboard_reads(tmp_path):
    run(*build_loggers(["tensorboard"], tmp_path, project="p", experiment="e", config={"trainer.seed": 7}))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("tensor")] == [(1, 1.0), (2, 1.0)]
    assert "list/1" in events.Tags()["scalars"]
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert "| `trainer.seed` | 7 |" in texts["config/text_summary"]
    assert r"a\|b c" in texts["val/samples/text_summary"]


def test_wandb_gets_a_run_with_its_configuration(monkeypatch, tmp_path):
    logger, wandb = logger_with(monkeypatch, tmp_path, "wandb")
    run(logger)
    (init,) = wandb.of("init")
    assert init[1] == {"project": "p", "name": "e", "config": {"trainer.seed": 1}, "dir": str(tmp_path)}
    assert [kwargs["step"] for _, kwargs in wandb.of("log")] == [1, 2, 2]
    assert wandb.of("Table")[0][1]["columns"] == ["prompt", "response", "score", "note"]
    assert wandb.of("finish") == [((), {"exit_code": 0})]


def test_tensorboard_shows_each_number_once_after_a_run_has_gone_on_from_a_checkpoint(tmp_path):
    (first,) = build_loggers(["tensorboard"], tmp_path, project="p", experiment="e", config={})
    first.on_start(4)
    for step in (1, 2, 3):
        first.on_metrics(step, {"a": step / 2})
    first.on_end(SUMMARY)  # a killed run may have written as much
    (again,) = build_loggers(["tensorboard"], tmp_path, project="p", experiment="e", config={})
    again.on_rewind(2)
    again.on_start(4)
    for step in (2, 3, 4):
        again.on_metrics(step, {"a": step / 2})
    again.on_end(SUMMARY)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]


@pytest.mark.parametrize(
    ("name", "begin", "key"),
    [("wandb", "init", "id"), ("mlflow", "start_run", "run_id"), ("trackio", "init", "resume")],
)
def test_a_resumed_run_goes_on_in_the_tracker(monkeypatch, tmp_path, name, begin, key):
    logger, tracker = logger_with(monkeypatch, tmp_path, name)
    tracker.id = tracker.run_id = "allow"  # what trackio is told
    tracker.info = tracker
    run(logger)
    assert key not in tracker.of(begin)[0][1]
    again, _ = logger_with(monkeypatch, tmp_path, name)
    tracker = sys.modules[name]
    again.on_rewind(1)
    run(again)
    assert tracker.of(begin)[0][1][key] == "allow"
    assert not tracker.of("log_params")


def test_mlflow_gets_names_and_values_that_it_takes(monkeypatch, tmp_path):
    logger, mlflow = logger_with(monkeypatch, tmp_path, "mlflow")
    run(logger)
    (values,), kwargs = mlflow.of("log_metrics")[0]
    assert kwargs == {"step": 1}
    assert values["val/pass_at_4"] == 0.5
    assert not {"nan", "inf"} & values.keys()
    assert mlflow.of("end_run") == [(("FINISHED",), {})]
    logger.on_end(RunSummary(steps=1, total_steps=2, seconds=1.0, error="ValueError"))
    assert mlflow.of("end_run")[-1] == (("FAILED",), {})


def test_trackio_gets_numbers_by_step(monkeypatch, tmp_path):
    logger, trackio = logger_with(monkeypatch, tmp_path, "trackio")
    run(logger)
    assert [name for name, _, _ in trackio.calls] == ["init", "log", "log", "finish"]


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, tmp_path, name):
    monkeypatch.setitem(sys.modules, LOGGERS[name].module, None)
    with pytest.raises(MissingLoggerError, match=rf"pip install kapell-trainer\[{name}\]"):
        build_loggers([name], tmp_path, project="p", experiment="e", config={})


def test_trackers_that_are_not_named_are_not_imported(monkeypatch, tmp_path):
    for logger in LOGGERS.values():
        monkeypatch.setitem(sys.modules, logger.module, None)
    assert build_loggers(["console", "file"], tmp_path, project="p", experiment="e", config={}) == []


class Breaks(Hook):
    """A logger that fails from its second call on."""

    def __init__(self):
        self.calls = 0

    def on_metrics(self, step, metrics):
        self.calls += 1
        if self.calls > 1:
            raise ConnectionError("no route to host")

    def on_end(self, summary):
        raise ConnectionError("still none")


def test_a_logger_that_fails_is_reported_once_and_the_others_get_everything(tmp_path, caplog):
    broken = Breaks()
    with caplog.at_level(logging.WARNING):
        run(broken, RunFiles(tmp_path))
    assert broken.calls == 2
    assert [record.getMessage() for record in caplog.records] == ["Breaks failed; the training goes on without it"]

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["nan"] is None
    assert records[0]["nested"] == {"a": {"b": 3}}
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2


def test_strict_hooks_let_the_failure_through():
    with pytest.raises(ConnectionError, match="no route"):
        run(Breaks(), strict=True)


def test_the_names_are_checked_with_the_configuration():
    assert load_config(overrides=["trainer.logger=[console,wandb]"]).config.trainer.logger == ["console", "wandb"]
    with pytest.raises((ConfigError, ValueError), match="wand"):
        load_config(overrides=["trainer.logger=[wand]"])
