"""What the tests' second device is worth: it computes as the CPU does, and finds a tensor on the wrong device."""

import pytest
import torch
from second_device import There, second_device

from kapell.trainer.models import build_policy, new_model_config

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])


@pytest.fixture(autouse=True)
def device():
    with second_device() as device:
        yield device


def test_values_arrive_are_computed_with_and_come_back(device):
    made = torch.arange(4, device=device) + torch.tensor([1, 2, 3, 4]).to(device)
    assert isinstance(made, There)
    assert made.device == device
    assert made[made > 3].tolist() == [5, 7]
    assert made.sum().item() == 16
    made[1] = 0
    made.mul_(2)
    assert made.cpu().tolist() == [2, 0, 10, 14]
    assert torch.tensor([1, 2], device=device).tolist() == [1, 2]


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: here + there,
        lambda here, there: torch.cat([there, here]),
        lambda here, there: here[there.long()],
        lambda here, there: there.index_put_((torch.tensor([0, 1]),), here),
        lambda here, there: torch.nn.functional.linear(here, there[None]),
    ],
)
def test_tensors_of_two_devices_do_not_mix(device, mix):
    with pytest.raises(RuntimeError, match="tensors of two devices"):
        mix(torch.ones(2), torch.ones(2, device=device))


def test_a_model_there_takes_no_input_from_here(device, tokenizer):
    model = build_policy(new_model_config(tokenizer, hidden_size=8, max_length=8)).to(device)
    assert model.device == device
    with pytest.raises(RuntimeError, match="tensors of two devices"):
        model(IDS)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_logits_and_gradients_are_those_of_the_cpu(device, tokenizer, model_type):
    config = new_model_config(tokenizer, model_type=model_type, hidden_size=8, max_length=8)
    config._attn_implementation = "eager"  # torch's own attention has one kernel per device
    here, there = build_policy(config), build_policy(config).to(device)
    outputs = here(IDS).logits, there(IDS.to(device)).logits
    assert torch.equal(outputs[0], outputs[1].cpu())
    for output in outputs:
        output.square().mean().backward()
    for ours, others in zip(here.parameters(), there.parameters(), strict=True):
        assert isinstance(others.grad, There)
        assert torch.equal(ours.grad, others.grad.cpu())
