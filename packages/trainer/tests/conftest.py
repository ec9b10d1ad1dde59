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


@pytest.fixture(scope="session")
def one_small_step():
    """Overrides for one step of a small run in this process."""
    return [
        "backend=local",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.model.hidden_size=16",
    ]
