"""Dropout is off in all roles, whatever a model's configuration says."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kapell.trainer.models import build_policy, build_value_model, load_config_of, new_model_config, without_dropout

# Of GPT-2 and OPT dropout is modules, of Llama and BERT numbers that modules keep, of Falcon read from the
# configuration in each pass; OPT also drops whole layers.
ARCHITECTURES = ["gpt2", "llama", "qwen3", "falcon", "bert", "gpt_neox"]


def dropping(tokenizer, model_type):
    """The configuration of a model that drops nearly all."""
    config = new_model_config(tokenizer, model_type=model_type, hidden_size=16, num_attention_heads=2, max_length=16)
    known = {name for name in vars(CONFIG_MAPPING[model_type]()) if "drop" in name}
    rates = {name for name in known if isinstance(getattr(config, name), int | float)}
    assert rates - {"classifier_dropout"}
    for name in rates:
        setattr(config, name, 0.9)
    return config


def logits_of(model, *, training):
    ids = torch.arange(3, 13).reshape(2, 5)
    model.train(training)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


@pytest.mark.parametrize(
    ("build", "model_type"),
    [*((build, name) for name in ARCHITECTURES for build in (build_policy, build_value_model)), (build_policy, "opt")],
)
def test_no_model_drops_anything(tokenizer, tmp_path, build, model_type):
    config = dropping(tokenizer, model_type)
    saved = AutoModelForCausalLM.from_config(config)
    assert not torch.equal(logits_of(saved, training=True), logits_of(saved, training=False)), "it would otherwise"
    saved.save_pretrained(tmp_path)
    for folder in (None, tmp_path):
        model = build(config if folder is None else load_config_of(folder), folder=folder)
        assert torch.equal(logits_of(model, training=True), logits_of(model, training=False))


def test_the_configuration_that_is_given_keeps_its_dropout(tokenizer):
    config = dropping(tokenizer, "gpt2")
    build_policy(config)
    assert config.resid_pdrop == 0.9
    assert without_dropout(config).resid_pdrop == 0.0


def test_parts_of_a_configuration_drop_nothing_either(tokenizer):
    whole = CONFIG_MAPPING["gemma3"](text_config={"attention_dropout": 0.5})
    assert without_dropout(whole).text_config.attention_dropout == 0.0
    assert whole.text_config.attention_dropout == 0.5


def test_dropout_that_is_asked_for_is_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"dropout is off in all roles, so resid_pdrop=0.1"):
        new_model_config(tokenizer, max_length=8, override_config={"resid_pdrop": 0.1})
    build_policy(new_model_config(tokenizer, hidden_size=16, max_length=8)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"dropout is off in all roles, so attn_pdrop=0.1"):
        load_config_of(tmp_path, {"attn_pdrop": 0.1})
    assert load_config_of(tmp_path, {"attn_pdrop": 0.0}).attn_pdrop == 0.0
