"""The doctor finds each kind of trouble, names the way out, and finds nothing where nothing is wrong."""

import json
from typing import get_args, get_type_hints

import pytest
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification

from kapell.protocol import DataProto
from kapell.trainer.agreement import LARGEST_GAP, disagreements
from kapell.trainer.cli import main
from kapell.trainer.config import ModelConfig
from kapell.trainer.config_load import load_config
from kapell.trainer.doctor import examine_config
from kapell.trainer.doctor_run import examine_run
from kapell.trainer.failure import read_failure
from kapell.trainer.stages import Stages
from kapell.trainer.workers import ActorRolloutRefWorker, CriticWorker
from kapell.workergroup import WorkerFailedError

SMALL = [
    "backend=local",
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.default_local_dir=run",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.model.hidden_size=16",
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def examine(*overrides):
    return list(examine_config(load_config(overrides=[*SMALL, *overrides])))


def wrong(findings):
    return [(finding.check, finding.message, finding.way_out) for finding in findings if not finding.ok]


@pytest.mark.parametrize("overrides", [[], ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"]])
def test_a_sound_configuration_passes_every_check(overrides):
    findings = examine(*overrides)
    assert wrong(findings) == []
    checks = ["overrides", "mode", "data and model", "workers", "columns", "agreement", "errors"]
    assert [finding.check for finding in findings] == checks
    assert "8 rows = 4 prompts x 2 samples" in findings[5].message


def test_a_key_without_effect_is_a_finding_but_not_the_end():
    findings = examine("actor_rollout_ref.actor.kl_loss_coef=0.5")
    ((check, message, way_out),) = wrong(findings)
    assert check == "overrides"
    assert "kl_loss_coef=0.5 (command line) has no effect" in message
    assert "use_kl_loss=true" in way_out
    assert findings[-1].check == "errors"


@pytest.mark.parametrize(
    ("override", "check", "words"),
    [
        ("algorithm.adv_estimator=gea", "mode", "did you mean 'gae'"),
        ("data.train_files=nowhere.jsonl", "data and model", "no data file nowhere.jsonl"),
        ("reward.custom_reward_function.path=no.py", "data and model", "no reward file no.py"),
    ],
)
def test_what_cannot_be_loaded_is_named_and_nothing_after_it_is_tried(override, check, words):
    findings = examine(override)
    ((found, message, _),) = wrong(findings)
    assert found == check == findings[-1].check
    assert words in message


def test_a_backend_that_is_not_installed_is_a_finding():
    ((check, message, way_out),) = wrong(examine("backend=locl"))
    assert check == "backend"
    assert "did you mean 'local'" in message
    assert "backend.name" in way_out


def test_a_reward_model_with_machines_of_its_own_gets_one_worker_here(here, tokenizer):
    sizes = GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1, n_positions=64, pad_token_id=0)
    sizes.num_labels = 1
    GPT2ForSequenceClassification(sizes).save_pretrained("judge")
    keys = ["enable=true", "path=judge", "enable_resource_pool=true", "nnodes=2", "n_gpus_per_node=8"]
    findings = examine(*(f"reward.reward_model.{key}" for key in keys))
    assert wrong(findings) == []
    (workers,) = (finding.message for finding in findings if finding.check == "workers")
    assert "reward_model: 1)" in workers


def test_workers_that_cannot_be_created_are_named_each_with_its_own_error(monkeypatch):
    def fail(self, *arguments, **options):
        raise MemoryError("too big for this machine")

    monkeypatch.setattr(CriticWorker, "__init__", fail)
    found = wrong(examine("algorithm.adv_estimator=gae"))
    assert found[0][0] == "workers"
    errors = [message for check, message, _ in found if check == "worker error"]
    assert errors
    assert all("MemoryError: too big for this machine" in message and "rank " in message for message in errors)


def test_a_column_that_no_stage_made_is_named_with_the_stage_that_needs_it(monkeypatch):
    monkeypatch.setattr("kapell.trainer.build.group_step", _without_log_probs)
    found = wrong(examine())
    assert found[0][0] == "columns"
    assert "stage update_actor needs old_log_probs" in found[0][1]
    assert "kapell explain" in found[0][2]


def _without_log_probs(stages, prompts, step):
    batch = stages.score(stages.generate(prompts, step))
    return stages.update_actor(stages.advantages(stages.shape_rewards(batch)), step)


def test_a_method_that_raises_in_a_worker_is_shown_with_its_place_and_line(monkeypatch):
    def broken(self, batch, **options):
        raise ZeroDivisionError("temperature was 0")

    broken.__dict__.update(ActorRolloutRefWorker.compute_log_prob.__dict__)
    monkeypatch.setattr(ActorRolloutRefWorker, "compute_log_prob", broken)
    found = wrong(examine())
    assert found[0][:2] == ("columns", "stage old_log_prob did not end")
    check, message, way_out = found[1]
    assert check == "worker error"
    assert "ZeroDivisionError: temperature was 0" in message
    assert "compute_log_prob" in message
    assert "test_doctor.py" in way_out


def test_responses_that_disagree_with_their_mask_are_found(monkeypatch):
    original = Stages.old_log_probs

    def shifted(self, batch):
        result = original(self, batch)
        result.batch["old_log_probs"] = result.batch["old_log_probs"] - 0.5
        return result

    shifted.__dict__.update(original.__dict__)
    monkeypatch.setattr(Stages, "old_log_probs", shifted)
    ((check, message, _),) = wrong(examine())
    assert check == "agreement"
    assert "old_log_probs and rollout_log_probs differ by 0.5" in message


def sound_batch():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    prompts, prompt_mask = torch.tensor([[0, 7], [8, 9]]), torch.tensor([[0, 1], [1, 1]])
    responses = torch.tensor([[3, 1, 0], [4, 5, 6]])
    return {
        "prompts": prompts,
        "prompt_mask": prompt_mask,
        "responses": responses,
        "response_mask": mask,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": torch.cat([prompt_mask, mask], 1),
        "position_ids": torch.zeros(2, 5),
        "old_log_probs": -1.0 * mask,
        "rollout_log_probs": -1.0 * mask,
        "advantages": 0.5 * mask,
    }


def judge(columns, *, num_prompts=1, longest=3):
    batch = DataProto.from_dict(tensors=columns)
    return disagreements(batch, num_prompts=num_prompts, samples_per_prompt=2, max_response_length=longest)


def test_a_sound_batch_has_no_disagreement():
    assert judge(sound_batch()) == []


def changed(name, row, column, value):
    columns = sound_batch()
    columns[name] = columns[name].clone()
    columns[name][row, column] = value
    return columns


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        (sound_batch(), {"num_prompts": 3}, "the batch has 2 rows; 3 prompts with 2 samples each are 6"),
        (sound_batch(), {"longest": 2}, "responses are 3 tokens long, more than data.max_response_length=2"),
        ({**sound_batch(), "advantages": torch.zeros(2, 4)}, {}, "advantages has shape 2 x 4, responses have 2 x 3"),
        (
            {**sound_batch(), "input_ids": torch.zeros(2, 4)},
            {},
            "input_ids is 4 wide; prompts and responses together are 5",
        ),
        (changed("response_mask", 0, slice(0, 2), 0), {}, "row 0: response_mask is all 0"),
        (changed("attention_mask", 1, 4, 0), {}, "row 1: attention_mask hides tokens"),
        (changed("input_ids", 1, 3, 77), {}, "row 1: input_ids are not the prompt's tokens"),
        (changed("old_log_probs", 0, 1, float("nan")), {}, "row 0: old_log_probs is not finite"),
        (changed("advantages", 0, 2, 1.0), {}, "row 0: advantages are not 0 where response_mask is 0"),
        (changed("old_log_probs", 1, 0, -1.25), {}, "row 1: old_log_probs and rollout_log_probs differ by 0.25"),
    ],
)
def test_each_disagreement_is_said_with_its_column_and_row(columns, options, words):
    assert any(words in found for found in judge(columns, **options)), judge(columns, **options)


def test_junk_at_masked_positions_is_no_disagreement():
    assert judge(changed("old_log_probs", 0, 2, float("nan"))) == []


def test_the_gap_of_log_probs_may_be_wider_in_bfloat16(here):
    batch = DataProto.from_dict(tensors=changed("old_log_probs", 1, 0, -1.05))
    sizes = {"num_prompts": 1, "samples_per_prompt": 2, "max_response_length": 3}
    assert disagreements(batch, **sizes)
    assert disagreements(batch, **sizes, largest_gap=LARGEST_GAP["bfloat16"]) == []
    assert set(LARGEST_GAP) == set(get_args(get_type_hints(ModelConfig)["dtype"]))


def run_folder(here, *overrides):
    with pytest.raises((SystemExit, ExceptionGroup)):
        main(["train", *SMALL, *overrides])
    return here / "run"


def test_a_run_that_ended_well_has_nothing_wrong(here):
    main(["train", *SMALL])
    assert wrong(examine_run(here / "run")) == []
    assert read_failure(here / "run") is None


@pytest.mark.parametrize("loggers", ["[]", "[console]"])
def test_a_run_that_kept_no_numbers_is_not_called_failed(here, loggers):
    main(["train", *SMALL, f"trainer.logger={loggers}"])
    findings = list(examine_run(here / "run"))
    assert wrong(findings) == []
    (progress,) = (finding.message for finding in findings if finding.check == "progress")
    assert progress == f"no numbers were kept here: trainer.logger={loggers} is without file"


def test_a_failed_run_keeps_its_workers_own_errors_and_the_doctor_shows_them(here, monkeypatch):
    def broken(self):
        raise FloatingPointError("the gradient is NaN")

    broken.__dict__.update(ActorRolloutRefWorker.optimizer_step.__dict__)
    monkeypatch.setattr(ActorRolloutRefWorker, "optimizer_step", broken)
    folder = run_folder(here)
    found = wrong(examine_run(folder))
    errors = [(message, way_out) for check, message, way_out in found if check == "worker error"]
    assert len(errors) == 2  # one per rank
    assert "FloatingPointError: the gradient is NaN" in errors[0][0]
    assert "rank 0" in errors[0][0]
    assert "optimizer_step" in errors[0][0]
    assert "test_doctor.py" in errors[0][1]
    failure = read_failure(folder)
    assert failure is not None
    assert "Traceback" in failure.workers[0].traceback


def test_the_place_to_look_at_is_that_of_the_first_cause(here):
    (here / "mine.py").write_text("def score(*row):\n    raise KeyError('oops')\n")
    reward = ["reward.custom_reward_function.path=mine.py", "reward.custom_reward_function.name=score"]
    with pytest.raises(SystemExit):
        main(["train", *SMALL, *reward])
    ways = {check: way_out for check, _, way_out in wrong(examine_run(here / "run"))}
    assert "mine.py" in ways["error"]


def test_a_run_that_could_not_load_its_data_says_so(here):
    folder = run_folder(here, "data.train_files=nowhere.jsonl")
    checks = {check: message for check, message, _ in wrong(examine_run(folder))}
    assert "no data file nowhere.jsonl" in checks["error"]
    assert "before its first step" in checks["workers"]


def record(step, **changes):
    values = {
        "step": step,
        "response_length/mean": 3.0,
        "response_length/max": 4.0,
        "response_length/clip_ratio": 0.1,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "training/rollout_log_probs_diff_max": 1e-6,
    }
    return {**values, **{name.replace("__", "/"): value for name, value in changes.items()}}


@pytest.mark.parametrize(
    ("records", "check", "words"),
    [
        ([record(1), record(2, actor__grad_norm=None)], "agreement", "actor/grad_norm is NaN or infinite from step 2"),
        ([record(1), record(2, response_length__max=7)], "agreement", "responses longer than 6 tokens"),
        (
            [record(1), record(2, response_length__clip_ratio=1.0)],
            "agreement",
            "100% of the responses of the last",
        ),
        ([record(1), record(2, training__rollout_log_probs_diff_max=0.2)], "agreement", "differ from the trainer's"),
        (
            [record(1, critic__score__max=0.0), record(2, critic__score__max=0.0)],
            "rewards",
            "scored 0, so there is",
        ),
        ([record(1, reward__errors=3), record(2)], "rewards", "3 responses could not be scored"),
        ([record(1)], "progress", "1 of 2 steps, and no error was written"),
    ],
)
def test_numbers_of_a_run_that_show_trouble_are_found(here, records, check, words):
    (here / "run").mkdir()
    (here / "run" / "config.yaml").write_text(load_config(overrides=SMALL).to_yaml())
    (here / "run" / "metrics.jsonl").write_text("".join(json.dumps(values) + "\n" for values in records))
    found = wrong(examine_run(here / "run"))
    assert [(name, True) for name, message, _ in found] == [(check, True)], found
    assert words in found[0][1]


@pytest.mark.parametrize("values", [(0.0, 1.0), (None, None)])
def test_scores_that_differ_between_steps_or_are_not_known_are_not_called_one_score(here, values):
    (here / "run").mkdir()
    (here / "run" / "config.yaml").write_text(load_config(overrides=SMALL).to_yaml())
    records = [
        record(step, critic__score__max=value, critic__score__min=value) for step, value in enumerate(values, start=1)
    ]
    (here / "run" / "metrics.jsonl").write_text("".join(json.dumps(values) + "\n" for values in records))
    assert "rewards" not in [finding.check for finding in examine_run(here / "run")]


def test_a_folder_that_is_no_run_is_a_finding_and_no_folder_an_error(here):
    ((check, message, _),) = wrong(examine_run(here))
    assert (check, "has no config.yaml" in message) == ("overrides", True)
    with pytest.raises(FileNotFoundError, match="no run folder"):
        list(examine_run(here / "nowhere"))


def test_the_commands_exit_status_says_whether_something_is_wrong(here, capsys):
    main(["doctor", *SMALL])
    assert "nothing is wrong" in capsys.readouterr().out
    for arguments in (["doctor", *SMALL, "critic.grad_clip=2"], ["doctor", str(here)]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 1
        assert "1 wrong" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "trainer.sed=1"])
    assert caught.value.code == 2
    assert "did you mean trainer.seed" in capsys.readouterr().err


def test_a_run_that_fails_says_how_to_read_why(tmp_path):
    (tmp_path / "mine.py").write_text("def compute_score(*_):\n    return 1.0\n")
    failing = ["backend=local", f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.total_training_steps=1"]
    failing += ["actor_rollout_ref.rollout.name=openai", "actor_rollout_ref.rollout.server.url=http://127.0.0.1:9"]
    with pytest.raises(WorkerFailedError) as caught:
        main(["train", *failing, "actor_rollout_ref.rollout.server.retries=0"])
    assert f"`kapell doctor {tmp_path / 'run'}`" in caught.value.__notes__[0]
    (failure,) = caught.value.exceptions
    assert "no answer from http://127.0.0.1:9" in str(failure)
    assert failure.__cause__ is None, "the message has the reason; the libraries' own tracebacks say no more"
