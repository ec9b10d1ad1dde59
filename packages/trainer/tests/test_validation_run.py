"""Validation of a run: each prompt once, grouped by sample id, under verl's names; responses on disk and as a table."""

import json
import logging

import pytest
import torch
from rich.console import Console

from kapell.protocol import DataProto
from kapell.trainer.algorithms import metric_values
from kapell.trainer.build import prepare, train
from kapell.trainer.config_load import load_config
from kapell.trainer.data import PromptDataset, PromptLoader
from kapell.trainer.generations import GenerationFiles, read_samples, samples_table
from kapell.trainer.hooks import Hook, Hooks
from kapell.trainer.rows import PromptRow
from kapell.trainer.run_folder import RunFiles
from kapell.trainer.sampler import Sampling
from kapell.trainer.trainer import Trainer
from kapell.trainer.validation import check_metric, score_metrics, validate


def sample(uid, score, *, source="math", prompt="q", response="r", exact=None, **extra):
    return {
        "uid": uid,
        "data_source": source,
        "prompt": prompt,
        "response": response,
        "ground_truth": "t",
        "score": score,
        "exact_match": score if exact is None else exact,
        "reward_extra": extra,
    }


def values(samples):
    return metric_values(score_metrics(samples))


def test_two_samples_with_the_same_text_are_two_groups():
    numbers = values([sample("0", 1.0), sample("0", 0.0), sample("1", 0.0), sample("1", 0.0)])
    assert numbers["val-core/math/acc/pass@2"] == 0.5
    assert numbers["val-core/math/acc/best@2/mean"] == pytest.approx(0.375)  # (1 - 1/4) / 2: drawn with replacement
    assert numbers["val-core/math/acc/mean@2"] == 0.25


@pytest.mark.parametrize("name", ["pred", "judge/pred"])
def test_a_majority_is_of_what_a_reward_read_and_else_of_responses(name):
    read = [sample("0", 1.0, response="so 4", **{name: "4"}), sample("0", 1.0, response="it is 4", **{name: "4"})]
    read.append(sample("0", 0.0, response="it is 5", **{name: "5"}))
    unread = [sample("1", 0.0, source="code", response=text, **{name: None}) for text in ("a", "b", "b")]
    numbers = values([*read, *unread])
    one_vote = values([sample("0", score, response="same") for score in (1.0, 1.0, 0.0)])
    by_response = values([sample("1", 0.0, source="code", response=text) for text in ("a", "b", "b")])
    assert numbers["val-core/math/acc/maj@3/mean"] > one_vote["val-core/math/acc/mean@3"]
    assert {key: value for key, value in numbers.items() if "/code/" in key and "reward" not in key} == {
        key: value for key, value in by_response.items() if "/code/" in key and "reward" not in key
    }


def test_the_same_id_in_two_data_sources_is_two_groups():
    numbers = values([sample("0", 1.0), sample("0", 0.0, source="code")])
    assert numbers["val-core/math/acc/mean@1"] == 1.0
    assert numbers["val-core/code/acc/mean@1"] == 0.0
    assert numbers["val/score/mean"] == 0.5
    assert numbers["val/math/exact_match"] == 1.0
    assert not [name for name in numbers if "@2" in name]


def test_a_source_whose_name_begins_another_is_told_apart():
    numbers = values([sample("0", 1.0, source="math"), sample("1", 0.0, source="math/hard")])
    assert numbers["val-core/math/acc/mean@1"] == 1.0
    assert numbers["val-core/math/hard/acc/mean@1"] == 0.0


def test_core_is_the_accuracy_of_all_answers_and_the_rest_is_aux():
    numbers = values([sample("0", float(score), exact=1.0) for score in (1, 2, 3, 4)])
    core = {name for name in numbers if name.startswith("val-core/")}
    names = ("mean@4", "pass@4", "best@4/mean", "best@4/std", "maj@4/mean", "maj@4/std")
    assert core == {f"val-core/math/acc/{name}" for name in names}
    assert numbers["val-aux/math/reward/mean@4"] == 2.5
    assert numbers["val-aux/math/reward/pass@2"] == pytest.approx(20 / 6)  # of 12 13 14 23 24 34: 2+3+4+3+4+4


def test_extras_are_variables_and_text_is_not():
    rows = [sample("0", 1.0, length=3, note="x", flag=True), sample("0", 0.0, length=None, note=None, flag=False)]
    numbers = values(rows)
    assert numbers["val-aux/math/length/mean@1"] == 3.0
    assert numbers["val-aux/math/flag/mean@2"] == 0.5
    assert not [name for name in numbers if "note" in name]


def test_a_majority_is_of_pred_where_there_is_one_else_of_responses():
    by_text = [sample("0", s, response=r) for s, r in ((1.0, "a"), (1.0, "a"), (1.0, "a "), (0.0, "b"))]
    assert values(by_text)["val-core/math/acc/maj@4/mean"] > 0.8
    answers = enumerate(((1.0, 7), (0.0, 8), (0.0, 8), (0.0, 8)))
    by_pred = [sample("0", s, response=str(n), pred=p) for n, (s, p) in answers]
    assert values(by_pred)["val-core/math/acc/maj@4/mean"] < 0.2


class FakeStages:
    """Answers with the sample's number; prompt 0 is right."""

    def __init__(self):
        self.sampled, self.calls = [], []

    def sample(self, prompts, sampling, num_samples, step):
        self.calls.append((sampling, num_samples, step))
        batch = prompts.repeat(num_samples, interleave=True)
        self.sampled += batch.column("index").tolist()
        return batch

    def scorer(self, batch):
        right = (batch.column("index") == 0).float()
        return batch.union(
            DataProto.from_dict(
                tensors={"rm_scores": right[:, None], "exact_match": right},
                non_tensors={"solution_str": ["?"] * len(batch), "reward_extra": [{}] * len(batch)},
            )
        )


@pytest.fixture
def dataset(tokenizer):
    return PromptDataset([PromptRow(str(i), "1", "mine") for i in range(5)], tokenizer, max_prompt_length=4)


@pytest.mark.parametrize("batch_size", [None, 1, 2, 5, 9])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_each_prompt_counts_once_whatever_the_batch_size(dataset, batch_size, num_samples):
    stages = FakeStages()
    found = validate(stages, dataset, step=7, sampling=Sampling(), num_samples=num_samples, batch_size=batch_size)
    assert stages.sampled == [index for index in range(5) for _ in range(num_samples)]
    assert len(found.samples) == 5 * num_samples
    assert found.metrics[f"val-core/mine/acc/mean@{num_samples}"] == pytest.approx(0.2)
    assert found.metrics["val/score/mean"] == pytest.approx(0.2)


def test_random_numbers_of_validation_are_not_those_of_a_training_step(dataset):
    stages = FakeStages()
    validate(stages, dataset, step=7, sampling=Sampling())
    assert stages.calls[0][2] > 2**31


def test_no_prompts_are_noticed_and_skipped(dataset, caplog):
    trainer = Trainer(
        lambda stages, prompts, step: prompts,
        FakeStages(),
        dataset,
        PromptLoader(5, batch_size=2, shuffle=False, seed=1),
        total_steps=0,
        test_freq=1,
    )
    with caplog.at_level(logging.WARNING):
        trainer.fit()
    assert [record.getMessage() for record in caplog.records] == [
        "test_freq=1, but there are no validation prompts: none is validated"
    ]


def test_generations_are_written_per_step_by_verls_keys(tmp_path):
    files = GenerationFiles(rollouts=tmp_path / "rollouts", validation=tmp_path / "val")
    files.on_rollouts(3, [sample("4", 0.0, response="a\nb", length=3)])
    files.on_samples(3, [sample("5", 1.0), sample("5", torch.tensor(0.5))])
    (line,) = (tmp_path / "rollouts" / "3.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "input": "q",
        "output": "a\nb",
        "gts": "t",
        "score": 0.0,
        "step": 3,
        "uid": "4",
        "data_source": "math",
        "exact_match": 0.0,
        "length": 3,
    }
    assert len((tmp_path / "val" / "3.jsonl").read_text().splitlines()) == 2


def test_the_responses_of_another_run_are_not_written_over(tmp_path):
    files = GenerationFiles(rollouts=tmp_path / "rollouts")
    own = tmp_path / "run"
    files.require_unused(own)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "rows.jsonl").touch()
    files.require_unused(own)
    files.on_rollouts(3, [sample("4", 0.0)])
    with pytest.raises(FileExistsError, match=r"rollouts holds the responses of another run.*rollout_data_dir"):
        files.require_unused(own)
    files.require_unused(tmp_path)


def test_rows_of_training_are_made_only_for_those_who_want_them():
    assert not Hooks([Hook()]).wants("on_rollouts")
    assert Hooks([Hook(), GenerationFiles()]).wants("on_rollouts")


def rendered(table):
    console = Console(width=120, record=True, force_terminal=False)
    console.print(table)
    return console.export_text()


def test_samples_are_shown_as_a_table(tmp_path):
    files = RunFiles(tmp_path)
    files.on_samples(0, [sample("0", 0.0)])
    files.on_samples(10, [sample("0", 1.0, prompt="[bold]1+1", response="2"), sample("1", 0.25), sample("2", 0.0)])
    text = rendered(samples_table(read_samples(tmp_path), step=10, num_rows=2))
    for part in ("validation after step 10: 1 of 3 right", "[bold]1+1", "0.25", "1 more"):
        assert part in text
    assert len(read_samples(tmp_path, step=0)) == 1
    with pytest.raises(ValueError, match="no samples of step 5; it has those of 0, 10"):
        read_samples(tmp_path, step=5)
    with pytest.raises(FileNotFoundError, match="written at each validation"):
        read_samples(tmp_path / "nowhere")


def test_a_run_validates_with_samples_and_numbers_do_not_depend_on_workers(tmp_path):
    means = []
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        overrides = [
            "backend=local",
            f"trainer.n_gpus_per_node={workers}",
            "trainer.total_training_steps=0",
            "trainer.test_freq=1",
            "data.val_batch_size=150",
            "data.max_response_length=2",
            "actor_rollout_ref.model.hidden_size=16",
            "actor_rollout_ref.rollout.val_kwargs.n=2",
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        ]
        train(prepare(load_config(overrides=overrides).config, folder), folder, hooks=[RunFiles(folder)])
        (record,) = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
        samples = read_samples(folder)
        assert len(samples) == 400
        assert len({row["uid"] for row in samples}) == 200
        means.append(sum(row["score"] for row in samples) / 400)
        assert record["val-aux/reverse_digits/reward/mean@2"] == pytest.approx(means[-1])
        assert record["val/score/mean"] == pytest.approx(means[-1])
    assert means[0] == pytest.approx(means[1])


@pytest.mark.parametrize("samples", [1, 3])
def test_each_metric_of_a_validation_is_known_before_it_and_no_other(samples):
    rows = [
        {
            "data_source": source,
            "uid": "0",
            "response": "",
            "score": 0.0,
            "exact_match": 0.0,
            "reward_extra": {"hint": 1},
        }
        for source in ("sums", "a/b")
        for _ in range(samples)
    ]
    for name in score_metrics(rows):
        check_metric(name, ["sums", "a/b"], samples)
    for name in ("val/exact", f"val-core/sums/acc/mean@{samples + 1}", "val-aux/other/x/mean@1", "critic/score/mean"):
        with pytest.raises(ValueError, match=f"no metric {name}"):
            check_metric(name, ["sums", "a/b"], samples)
