"""A checkpoint's models in Hugging Face format."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer, GenerationConfig

from kapell.trainer.cli import main
from kapell.trainer.config import OptimConfig
from kapell.trainer.engine import TrainEngine
from kapell.trainer.models import build_policy, build_value_model, end_token_ids, load_config_of, new_model_config
from kapell.trainer.role_checkpoint import HUGGINGFACE, save_role
from kapell.trainer.tokenizer import build_character_tokenizer

resume_runs = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("resume_runs.py"))))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a critic that has checkpoints after 2, 4 and 6."""
    here = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        resume_runs.write_files(here)
        resume_runs.run(here / "run", ["algorithm.adv_estimator=gae", "trainer.keep_best=val/score/mean"])
    return here / "run"


def export(*arguments):
    main(["export", *map(str, arguments)])


def test_the_newest_policy_is_what_the_run_ended_with_and_transformers_reads_it(run, tmp_path, capsys):
    export(run, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    final = AutoModelForCausalLM.from_pretrained(run / "model")
    assert all(
        torch.equal(*pair) for pair in zip(model.state_dict().values(), final.state_dict().values(), strict=True)
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([5]) in "+0123456789"
    assert "wrote actor of" in capsys.readouterr().out
    main(["generate", str(tmp_path / "out"), "1+2"])


def test_an_earlier_step_has_the_weights_of_that_step(run, tmp_path):
    export(run, tmp_path / "by-step", "--step", 2)
    export(run / "global_step_2", tmp_path / "by-folder")
    export(run, tmp_path / "newest")
    names = ("by-step", "by-folder", "newest")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in names]
    assert weights[0] == weights[1] != weights[2]


def test_the_best_is_the_one_by_the_validation_metric(run, tmp_path):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = max((line["val/score/mean"], line["step"]) for line in lines if "val/score/mean" in line and line["step"])[1]
    export(run, tmp_path / "best", "--step", "best")
    export(run, tmp_path / "by-step", "--step", best)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("best", "by-step")]
    assert weights[0] == weights[1]


def test_the_critic_can_be_read_as_a_critic_again(run, tmp_path):
    export(run, tmp_path / "critic", "--role", "critic")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    critic = build_value_model(load_config_of(tmp_path / "critic"), folder=tmp_path / "critic")
    assert model.config.num_labels == 1
    assert torch.equal(critic(torch.tensor([[3, 4]])).logits, model.eval()(torch.tensor([[3, 4]])).logits)


def test_an_export_ends_its_responses_with_the_tokens_of_the_model_that_was_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resume_runs.write_files(tmp_path)
    tokenizer = build_character_tokenizer("+0123456789")
    model = build_policy(new_model_config(tokenizer, hidden_size=16, num_hidden_layers=1, max_length=32))
    model.save_pretrained("base")
    tokenizer.save_pretrained("base")
    Path("base/generation_config.json").write_text(
        json.dumps({"eos_token_id": [3, 4], "top_p": 0.9, "do_sample": True})
    )
    resume_runs.run(tmp_path / "run", ["actor_rollout_ref.model.path=base", "trainer.total_training_steps=2"])
    export("run", "out")
    ends = [end_token_ids(tokenizer, folder) for folder in ("base", "run/model", "out")]
    assert ends == [(1, 3, 4)] * 3
    first, second = (GenerationConfig.from_pretrained(folder) for folder in ("run/model", "out"))
    assert first == second
    assert second.top_p == 0.9
    without_generation_config(Path("run/global_step_2"))
    export("run", "older")
    assert end_token_ids(tokenizer, "older") == (1,)


def test_a_checkpoint_keeps_settings_of_generation_that_go_badly_together(tmp_path, policy):
    policy.generation_config = GenerationConfig(do_sample=False, temperature=0.6, eos_token_id=[3, 4])
    records = save_role(tmp_path, TrainEngine(policy, OptimConfig()), {}, rank=0)
    assert f"{HUGGINGFACE}/generation_config.json" in records
    assert GenerationConfig.from_pretrained(tmp_path / HUGGINGFACE).eos_token_id == [3, 4]


def without_generation_config(checkpoint):
    """Make it one of the time when checkpoints had none."""
    name = "actor/huggingface/generation_config.json"
    (checkpoint / name).unlink()
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    del manifest["files"][name]
    (checkpoint / "checkpoint.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "out", "--step", "3"], "it has no checkpoint 3; it has 2, 4, 6, best"),
        (["RUN", "full"], "full exists and is not empty; name a new folder"),
        (["nowhere", "out"], "nowhere: there is no such folder"),
        (["RUN/model", "out"], "this is no checkpoint of Kapell's: it has no checkpoint.json"),
        (["bare", "out"], "the run has no checkpoint (trainer.save_freq was -1); bare/model is in Hugging Face format"),
    ],
)
def test_what_cannot_be_exported_is_said_in_a_line(run, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name in ("full/x", "bare/model/x"):
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text("")
    Path("bare/metrics.jsonl").write_text(json.dumps({"step": 1}))
    with pytest.raises(SystemExit) as caught:
        export(*(argument.replace("RUN", str(run)) for argument in arguments))
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
