"""Models of the trainer against the same ones built by transformers alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, GenerationConfig

from kapell.trainer.models import build_policy, build_value_model, end_token_ids, load_config_of, new_model_config


@pytest.mark.parametrize(
    ("own", "ends"), [({}, (1,)), ({"eos_token_id": 3}, (1, 3)), ({"eos_token_id": [3, 4]}, (1, 3, 4))]
)
def test_a_response_ends_with_the_tokenizers_token_and_those_of_the_model(tokenizer, policy, tmp_path, own, ends):
    policy.generation_config = GenerationConfig(**own)
    policy.save_pretrained(tmp_path)
    assert end_token_ids(tokenizer, tmp_path) == ends
    (tmp_path / "generation_config.json").unlink()
    assert end_token_ids(tokenizer, tmp_path) == end_token_ids(tokenizer, None) == (1,)


def loss_and_gradients(model, vocabulary):
    ids = torch.arange(24).reshape(3, 8) % vocabulary
    logits = model(ids, attention_mask=torch.ones_like(ids)).logits
    (logits.square() * torch.linspace(-1, 1, logits.shape[-1] or 1)).sum().backward()
    return logits.detach(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("model_type", "override"),
    [
        ("gpt2", {}),
        ("gpt2", {"activation_function": "gelu_fast"}),
        ("gpt_neo", {"attention_types": [[["global"], 2]], "num_layers": 2}),
        ("llama", {"hidden_act": "gelu_new"}),
        ("qwen3", {}),
    ],
)
def test_a_policy_is_the_model_of_transformers(tokenizer, model_type, override):
    config = new_model_config(tokenizer, model_type=model_type, hidden_size=32, max_length=16, override_config=override)
    model = build_policy(config, seed=3)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain.load_state_dict(model.state_dict())
    logits, gradients = loss_and_gradients(model, len(tokenizer))
    plain_logits, plain_gradients = loss_and_gradients(plain, len(tokenizer))
    torch.testing.assert_close(logits, plain_logits, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == plain_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain_gradients[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "auto_class"),
    [(build_policy, AutoModelForCausalLM), (build_value_model, AutoModelForTokenClassification)],
)
def test_gelu_is_one_operation_and_saved_as_it_was(tokenizer, tmp_path, build, auto_class):
    model = build(new_model_config(tokenizer, hidden_size=32, max_length=16), seed=3)
    assert not any("NewGELU" in type(module).__name__ for module in model.modules())
    model.save_pretrained(tmp_path)
    assert load_config_of(tmp_path).activation_function == "gelu_new"
    loaded = auto_class.from_pretrained(tmp_path)
    assert any("NewGELU" in type(module).__name__ for module in loaded.modules())
    assert loaded.state_dict().keys() == model.state_dict().keys()
