"""A checkpoint's models in Hugging Face format."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from kapell.trainer.cli import main
from kapell.trainer.models import build_value_model, load_config_of

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
