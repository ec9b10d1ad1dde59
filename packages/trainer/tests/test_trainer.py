import copy
import json
import math

import numpy as np
import pytest
import torch

from kapell.protocol import DataProto
from kapell.trainer.data import PromptDataset, PromptLoader
from kapell.trainer.hooks import Hook
from kapell.trainer.rows import PromptRow
from kapell.trainer.run_folder import RunFiles, json_value, plot_curves
from kapell.trainer.trainer import Trainer


class Recorder(Hook):
    def __init__(self):
        self.records = []
        self.summary = None
        self.calls = []

    def on_rewind(self, step):
        self.calls.append(("on_rewind", step))

    def on_start(self, total_steps):
        self.calls.append(("on_start", total_steps))

    def on_samples(self, step, samples):
        self.calls.append(("on_samples", step))

    def on_metrics(self, step, metrics):
        self.records.append((step, dict(metrics)))

    def on_end(self, summary):
        self.summary = summary


class FakeStages:
    """Answers every prompt with its ground truth where the prompt's number is even."""

    def __init__(self):
        self.sampled = []

    def state_dict(self):
        return {"sampled": list(self.sampled)}

    def load_state_dict(self, state):
        self.sampled = list(state["sampled"])

    def sample(self, prompts, sampling, num_samples, step):
        self.sampled += prompts.column("index").tolist()
        mask = torch.ones((len(prompts), 1), dtype=torch.long)
        return prompts.union(DataProto.from_dict(tensors={"response_mask": mask}))

    def scorer(self, batch):
        right = (batch.column("index") == 0).float()
        made = {"rm_scores": right[:, None], "exact_match": right}
        return batch.union(DataProto.from_dict(tensors=made, non_tensors={"solution_str": ["?"] * len(batch)}))


def fake_step(stages, prompts, step):
    ones = torch.ones((len(prompts), 2))
    return prompts.union(
        DataProto.from_dict(
            tensors={
                "response_mask": ones.long(),
                "token_level_scores": ones,
                "token_level_rewards": ones,
                "advantages": ones,
                "returns": ones,
            }
        )
    )


@pytest.fixture
def dataset(tokenizer):
    return PromptDataset([PromptRow(str(i), "1", "mine") for i in range(5)], tokenizer, max_prompt_length=4)


def run(dataset, *, total_steps=3, hooks=(), step=fake_step, val=True, **options):
    recorder, stages, saved = Recorder(), FakeStages(), []
    trainer = Trainer(
        step,
        stages,
        dataset,
        PromptLoader(len(dataset), batch_size=2, shuffle=False, seed=1),
        total_steps=total_steps,
        val=dataset if val else None,
        save=lambda step, state: saved.append(step),
        hooks=[recorder, *hooks],
        **options,
    )
    trainer.fit()
    validated = [number for number, metrics in recorder.records if "val/exact_match" in metrics]
    trained = [number for number, metrics in recorder.records if "training/global_step" in metrics]
    return recorder, stages, trained, validated, saved


@pytest.mark.parametrize(
    ("total_steps", "test_freq", "before", "validations"),
    [
        (3, 1, True, [0, 1, 2, 3]),
        (3, 1, False, [1, 2, 3]),
        (3, 2, True, [0, 2, 3]),
        (4, 2, False, [2, 4]),
        (3, 10, True, [0, 3]),
        (3, -1, True, []),
        (3, 0, True, []),
        (0, 1, True, [0]),
        (0, 1, False, []),
    ],
)
def test_every_step_is_trained_once_and_validated_when_due(dataset, total_steps, test_freq, before, validations):
    recorder, _, trained, validated, _ = run(
        dataset, total_steps=total_steps, test_freq=test_freq, val_before_train=before
    )
    assert trained == list(range(1, total_steps + 1))
    assert validated == validations
    assert [metrics["training/global_step"] for number, metrics in recorder.records if number] == trained
    assert recorder.summary.steps == total_steps


def test_throughput_is_of_one_worker(dataset):
    recorder, *_ = run(dataset, num_workers=4)
    for _, metrics in recorder.records[1:]:
        tokens, seconds = metrics["perf/total_num_tokens"], metrics["perf/time_per_step"]
        assert metrics["perf/throughput"] == pytest.approx(tokens / seconds / 4)


@pytest.mark.parametrize(("save_freq", "saves"), [(2, [2, 3]), (1, [1, 2, 3]), (3, [3]), (-1, []), (0, [])])
def test_the_model_is_saved_when_due_and_after_the_last_step(dataset, save_freq, saves):
    assert run(dataset, save_freq=save_freq)[4] == saves


@pytest.mark.parametrize("val_batch_size", [None, 1, 2, 5, 9])
def test_validation_counts_each_prompt_once_whatever_the_batch_size(dataset, val_batch_size):
    recorder, stages, *_ = run(
        dataset, total_steps=1, test_freq=1, val_before_train=False, val_batch_size=val_batch_size
    )
    assert stages.sampled == [0, 1, 2, 3, 4]
    assert recorder.records[-1][1]["val/exact_match"] == pytest.approx(0.2)
    assert recorder.records[-1][1]["val/mine/score/mean"] == pytest.approx(0.2)


def test_without_validation_prompts_there_is_no_validation(dataset):
    assert run(dataset, test_freq=1, val=False)[3] == []


def test_hooks_learn_of_a_failure_and_the_error_goes_on(dataset):
    def failing(stages, prompts, step):
        if step == 2:
            raise KeyError("lost")
        return fake_step(stages, prompts, step)

    recorder = Recorder()
    with pytest.raises(KeyError, match="lost"):
        run(dataset, step=failing, hooks=[recorder])
    assert (recorder.summary.steps, recorder.summary.error) == (1, "KeyError: 'lost'")


def test_a_hook_that_fails_stops_neither_the_training_nor_the_others(dataset, caplog):
    class Broken(Hook):
        def on_metrics(self, step, metrics):
            if step >= 2:
                raise OSError("disk full")

    after = Recorder()
    _, _, trained, _, _ = run(dataset, hooks=[Broken(), after])
    assert trained == [1, 2, 3]
    assert [number for number, _ in after.records] == [1, 2, 3]
    assert [record.message for record in caplog.records] == ["Broken failed; the training goes on without it"]


def test_the_metrics_file_is_strict_json_with_one_object_a_step(tmp_path):
    files = RunFiles(tmp_path)
    files.on_metrics(1, {"a": torch.tensor(1.5), "b": np.float32(2), "c": math.nan, "d": math.inf, "e": None})
    files.on_metrics(2, {"a": 1, "s": "text", "l": [1, np.int64(2)], "n": {"x": torch.tensor([1.0, math.nan])}})

    def refuse(name):
        raise AssertionError(name)

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert records[0] == {"step": 1, "a": 1.5, "b": 2.0, "c": None, "d": None, "e": None}
    assert records[1] == {"step": 2, "a": 1, "s": "text", "l": [1, 2], "n": {"x": [1.0, None]}}


def test_a_rewound_file_ends_before_the_step_and_loses_a_line_that_was_cut_off(tmp_path):
    files = RunFiles(tmp_path)
    for step in range(4):
        files.on_metrics(step, {"a": step / 3})
        files.on_samples(step, [{"prompt": "ü"}, {"prompt": "y"}])
    before = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "a"')
    files.on_rewind(2)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(before[:2])
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 4
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "samples.jsonl"}
    files.on_rewind(0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_number_of_any_kind_stays_a_number():
    assert [json_value(value) for value in (True, 0, np.bool_(True), np.float64(0.0))] == [True, 0, True, 0.0]


def test_curves_are_a_picture_even_of_few_and_missing_values(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 0, "val/exact_match": 0.0}\n{"step": 1, "critic/score/mean": null}\n')
    plot_curves(metrics, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    metrics.write_text("")
    plot_curves(metrics, tmp_path / "empty.png")


def test_a_run_goes_on_from_a_saved_step_and_tells_that_step_again(dataset):
    def trained(total_steps, state=None):
        recorder, kept = Recorder(), {}
        trainer = Trainer(
            fake_step,
            FakeStages(),
            dataset,
            PromptLoader(len(dataset), batch_size=2, shuffle=True, seed=1),
            total_steps=total_steps,
            val=dataset,
            test_freq=2,
            save=lambda step, state: kept.update({step: state()}),
            save_freq=2,
            hooks=[recorder],
        )
        if state:
            trainer.continue_from(copy.deepcopy(state))
        trainer.fit()
        return recorder, kept

    def numbers(recorder):
        return [
            (step, {k: v for k, v in m.items() if not k.startswith(("timing_s/", "perf/"))}) for step, m in recorder
        ]

    whole, kept = trained(5)
    rest, again = trained(5, kept[2])
    assert numbers(rest.records) == numbers(whole.records[2:])
    assert rest.calls[:3] == [("on_rewind", 2), ("on_start", 5), ("on_samples", 2)]
    assert again[4]["data"] == kept[4]["data"]
    assert rest.summary.steps == 5
    assert rest.summary.first.keys() == whole.summary.first.keys()
    assert rest.summary.totals["perf/total_num_tokens"] == whole.summary.totals["perf/total_num_tokens"]


def test_another_number_of_prompts_is_no_place_to_go_on_from(dataset):
    loader = PromptLoader(9, batch_size=2, shuffle=False, seed=1)
    with pytest.raises(ValueError, match="one in 5 training prompts, here are 9; give the data files"):
        loader.load_state_dict({"epoch": 0, "offset": 2, "num_prompts": 5})
