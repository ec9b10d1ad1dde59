import pytest
import torch

from kapell.trainer.models import build_policy, new_model_config
from kapell.trainer.tokenizer import build_character_tokenizer


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    return build_character_tokenizer("0123456789")


@pytest.fixture
def policy(tokenizer):
    return build_policy(new_model_config(tokenizer, hidden_size=32, max_length=24), seed=3)
