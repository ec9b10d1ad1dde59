import importlib
import pickle
import subprocess
import sys

import pytest
import torch

from kapell.trainer.algorithms import (
    Advantages,
    MissingColumnError,
    Registry,
    advantage_estimators,
    call_with_columns,
    columns_of,
    compute_advantages,
    get_advantage_estimator,
    get_policy_loss,
    grpo,
    options_of,
    policy_losses,
    ppo_clip,
)

USER_MODULE = """
from kapell.trainer.algorithms import TokenLosses

def centered(token_level_rewards, response_mask, *, scale=1.0):
    advantages = (token_level_rewards - token_level_rewards.mean()) * response_mask * scale
    return advantages, token_level_rewards

def plain(log_probs, advantages):
    return TokenLosses(-log_probs * advantages)

class Box:
    @staticmethod
    def inner(log_probs):
        return TokenLosses(log_probs)

def everything(**columns):
    return columns

number = 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "users_algorithms.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "users_algorithms"
    sys.modules.pop("users_algorithms", None)


def rewards_and_mask():
    return {"token_level_rewards": torch.tensor([[1.0, 3.0]]), "response_mask": torch.ones(1, 2)}


def test_functions_are_found_by_name():
    assert get_advantage_estimator("grpo") is grpo
    assert get_policy_loss("vanilla") is ppo_clip


def test_functions_are_found_by_import_path(user_module):
    result = compute_advantages(f"{user_module}:centered", rewards_and_mask(), {"scale": 2.0})
    assert isinstance(result, Advantages)
    assert result.advantages.tolist() == [[-2, 2]]
    assert get_policy_loss(f"{user_module}:Box.inner").__name__ == "inner"


@pytest.mark.parametrize(
    ("registry", "name", "nearest"),
    [(advantage_estimators, "grp", "grpo"), (policy_losses, "gpso", "gspo"), (advantage_estimators, "GAE", None)],
)
def test_an_unknown_name_lists_the_known_and_suggests_the_nearest(registry, name, nearest):
    with pytest.raises(ValueError, match=f"unknown {registry.kind} '{name}'") as caught:
        registry.get(name)
    for known in registry:
        assert known in str(caught.value)
    if nearest:
        assert f"did you mean '{nearest}'?" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("no_such_module_x:f", ValueError, "cannot import advantage estimator 'no_such_module_x:f'"),
        ("users_algorithms:missing", ValueError, "missing"),
        ("users_algorithms:number", TypeError, "is a int, not a function"),
        ("users_algorithms:everything", TypeError, "name each column as a parameter"),
    ],
)
def test_a_bad_import_path_says_why(user_module, path, error, message):
    with pytest.raises(error, match=message):
        get_advantage_estimator(path)


def test_a_name_is_taken_once():
    registry = Registry("thing")

    @registry.register("a")
    def first(values):
        return values

    assert registry.get("a") is first
    assert "a" in registry
    with pytest.raises(ValueError, match="thing 'a' is already registered"):
        registry.register("a")(lambda values: values)


def test_a_reloaded_module_takes_its_own_place():
    module = importlib.import_module("kapell.trainer.algorithms.gae")
    before = get_advantage_estimator("gae")
    importlib.reload(module)
    assert get_advantage_estimator("gae") is not before


def test_columns_and_options_are_read_from_the_signature():
    assert columns_of(get_advantage_estimator("gae")) == {
        "token_level_rewards": True,
        "values": True,
        "response_mask": True,
    }
    assert columns_of(get_advantage_estimator("optimal_token_baseline"))["rollout_is_weights"] is False
    assert options_of(get_policy_loss("sapo")) == {"tau_pos": 1.0, "tau_neg": 1.05}


def test_a_function_gets_just_what_it_names():
    def function(a, b=5, *, c=6):
        return a, b, c

    assert call_with_columns(function, {"a": 1, "x": 2}, {"d": 3}) == (1, 5, 6)
    assert call_with_columns(function, {"a": 1, "b": 2}, {"c": 3}) == (1, 2, 3)


def test_a_missing_column_names_its_producer_and_survives_pickling():
    with pytest.raises(MissingColumnError, match="gae needs column 'values', which is written by critic") as caught:
        compute_advantages("gae", rewards_and_mask())
    assert isinstance(caught.value, KeyError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    with pytest.raises(MissingColumnError, match="'uid', which is written by data"):
        compute_advantages("grpo", rewards_and_mask())
    with pytest.raises(MissingColumnError, match="'response_mask', which is written by rollout"):
        compute_advantages("grpo", {})


def test_a_missing_option_is_named():
    with pytest.raises(ValueError, match="needs the option 'power'; given: scale"):
        call_with_columns(lambda values, *, power: values, {"values": 1}, {"scale": 2})


@pytest.mark.parametrize("registry", [advantage_estimators, policy_losses])
def test_every_registered_function_has_an_import_path_to_itself(registry):
    for name in registry:
        assert registry.get(registry.path(name)).__qualname__ == registry.get(name).__qualname__


def test_a_function_that_other_processes_cannot_import_has_no_path():
    registry = Registry("thing")
    registry.register("local")(lambda values: values)
    with pytest.raises(ValueError, match="other processes cannot import"):
        registry.path("local")


def test_an_import_path_works_in_another_process(user_module, tmp_path):
    """A fresh interpreter, as a remote worker is, where nothing was registered."""
    code = (
        "import torch; from kapell.trainer.algorithms import compute_advantages; "
        f"print(compute_advantages('{user_module}:centered', "
        "{'token_level_rewards': torch.tensor([[1.0, 3.0]]), 'response_mask': torch.ones(1, 2)}).advantages.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[-1.0, 1.0]]"
