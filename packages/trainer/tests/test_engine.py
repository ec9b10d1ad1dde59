import copy

import pytest
import torch

from kapell.trainer.algorithms import BatchTotals, metric_values, position_ids
from kapell.trainer.collective import SharedProcessCollective, _Exchange
from kapell.trainer.config import OptimConfig
from kapell.trainer.engine import TrainEngine
from kapell.trainer.forward import policy_forward
from kapell.trainer.micro_batches import MicroBatches
from kapell.trainer.models import build_policy, build_value_model, load_config_of, new_model_config
from kapell.trainer.objectives import PolicyObjective, ValueObjective
from kapell.trainer.optimizers import learning_rate_factor

ROWS, PROMPT, LENGTH = 7, 3, 4


def make_columns():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([4, 1, 3, 2, 4, 4, 1])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    responses = torch.randint(3, 13, (ROWS, LENGTH), generator=generator) * mask
    prompts = torch.randint(3, 13, (ROWS, PROMPT), generator=generator)
    attention = torch.cat([torch.ones_like(prompts), mask], dim=1)
    floats = {
        name: torch.randn((ROWS, LENGTH), generator=generator)
        for name in ("advantages", "returns", "values", "ref_log_prob")
    }
    return {
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": position_ids(attention),
        "responses": responses,
        "response_mask": mask,
        "old_log_probs": -2.5 + 0.3 * torch.randn((ROWS, LENGTH), generator=generator),
        **floats,
    }


def objective_of(kind, mode="token-mean"):
    if kind == "value":
        return ValueObjective(loss_agg_mode=mode, max_response_length=LENGTH)
    return PolicyObjective(
        options={"clip_ratio": 0.2},
        loss_agg_mode=mode,
        entropy_coeff=0.01,
        kl_coef=0.1,
        temperature=0.8,
        max_response_length=LENGTH,
    )


def update(tokenizer, kind, *, num_ranks=1, micro_batches=None, mode="token-mean", steps=2):
    """Two updates on ranks that take turns; the metrics of the first, and each rank's weights afterwards."""
    config = new_model_config(tokenizer, hidden_size=32, max_length=24)
    build = build_value_model if kind == "value" else build_policy
    exchange = _Exchange()
    engines = [
        TrainEngine(
            build(config, seed=3),
            OptimConfig(lr=1e-2, eps=1e-3),  # of Adam: what divides small gradients, and with them their rounding
            collective=SharedProcessCollective(exchange, rank, num_ranks) if num_ranks > 1 else None,
        )
        for rank in range(num_ranks)
    ]
    columns, objective = make_columns(), objective_of(kind, mode)
    totals = BatchTotals.combined([BatchTotals.of(columns["response_mask"])], dp_size=num_ranks)
    bounds = torch.linspace(0, ROWS, num_ranks + 1).long().tolist()
    reports = []
    for _ in range(steps):
        parts = []
        for rank, engine in enumerate(engines):
            shard = {name: column[bounds[rank] : bounds[rank + 1]] for name, column in columns.items()}
            parts.append(
                engine.forward_backward(
                    shard,
                    lambda rows, model=engine.model: objective(model, rows, totals),
                    micro_batches=micro_batches,
                )
            )
        merged = {}
        for part in parts:
            for name, metric in part.items():
                merged[name] = merged[name] + metric if name in merged else metric
        moved = [engine.step() for engine in engines]
        reports.append({**metric_values(merged), **moved[0]})
    return reports, [torch.nn.utils.parameters_to_vector(engine.model.parameters()).detach() for engine in engines]


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize(("num_ranks", "sizes"), [(2, {}), (3, {}), (1, {"max_rows": 2}), (2, {"max_tokens": 9})])
def test_neither_ranks_nor_micro_batches_change_an_update(tokenizer, kind, mode, num_ranks, sizes):
    expected, (weights,) = update(tokenizer, kind, mode=mode)
    reports, rank_weights = update(tokenizer, kind, mode=mode, num_ranks=num_ranks, micro_batches=MicroBatches(**sizes))
    for report, wanted in zip(reports, expected, strict=True):
        assert report == pytest.approx(wanted, abs=1e-5)
    for other in rank_weights:
        assert torch.equal(other, rank_weights[0])
        assert torch.allclose(other, weights, atol=1e-5)


def test_more_ranks_than_rows_work(tokenizer):
    expected, (weights,) = update(tokenizer, "policy")
    reports, rank_weights = update(tokenizer, "policy", num_ranks=9)
    assert reports[0] == pytest.approx(expected[0], abs=1e-5)
    assert torch.allclose(rank_weights[8], weights, atol=1e-5)


def test_the_reported_gradient_norm_is_the_one_before_clipping(tokenizer):
    config = new_model_config(tokenizer, hidden_size=32, max_length=24)
    columns = make_columns()
    totals = BatchTotals.of(columns["response_mask"])
    norms = []
    for grad_clip in (1e-3, 1e3):
        engine = TrainEngine(build_policy(config, seed=3), OptimConfig(lr=1e-2), grad_clip=grad_clip)
        engine.forward_backward(columns, lambda rows, m=engine.model: objective_of("policy")(m, rows, totals))
        norms.append(engine.step()["grad_norm"])
    assert norms[0] == norms[1] > 1e-3


def test_a_gradient_that_is_not_finite_makes_no_step(tokenizer):
    config = new_model_config(tokenizer, hidden_size=32, max_length=24)
    engine = TrainEngine(build_policy(config, seed=3), OptimConfig())
    before = torch.nn.utils.parameters_to_vector(engine.model.parameters()).detach().clone()
    columns = make_columns()
    columns["advantages"] = columns["advantages"] * float("inf")
    totals = BatchTotals.of(columns["response_mask"])
    engine.forward_backward(columns, lambda rows: objective_of("policy")(engine.model, rows, totals))
    with pytest.raises(FloatingPointError, match="no step was made"):
        engine.step()
    assert torch.equal(before, torch.nn.utils.parameters_to_vector(engine.model.parameters()).detach())


def test_calls_out_of_order_say_what_is_missing(tokenizer):
    config = new_model_config(tokenizer, hidden_size=32, max_length=24)
    engine = TrainEngine(build_policy(config, seed=3), OptimConfig())
    with pytest.raises(RuntimeError, match=r"call forward_backward\(\) first"):
        engine.step()
    columns = make_columns()
    totals = BatchTotals.of(columns["response_mask"])
    engine.forward_backward(columns, lambda rows: objective_of("policy")(engine.model, rows, totals))
    with pytest.raises(RuntimeError, match=r"call step\(\) before the next one"):
        engine.forward_backward(columns, lambda rows: objective_of("policy")(engine.model, rows, totals))


def test_an_average_collected_before_all_ranks_gave_theirs_names_the_missing():
    exchange = _Exchange()
    ranks = [SharedProcessCollective(exchange, rank, 3) for rank in range(3)]
    finish = ranks[1].start_average(torch.tensor([3.0]))
    with pytest.raises(RuntimeError, match=r"ranks \[0, 2\] have not given their part"):
        finish()
    rest = [ranks[rank].start_average(torch.tensor([0.0])) for rank in (0, 2)]
    assert [collect().item() for collect in (finish, *rest)] == [1.0, 1.0, 1.0]
    assert not exchange.parts
    assert not exchange.averages


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.8682, 0.55, 0.2318]),
    ],
)
def test_the_learning_rate_follows_its_schedule(shape, expected):
    factors = [
        learning_rate_factor(step, shape=shape, warmup_steps=2, total_steps=6, min_ratio=0.1) for step in range(6)
    ]
    assert factors == pytest.approx(expected, abs=1e-4)


def test_the_same_seed_gives_the_same_new_weights_and_leaves_the_global_generator_alone(tokenizer):
    config = new_model_config(tokenizer, max_length=24)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second, other = (build_policy(config, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    vectors = [torch.nn.utils.parameters_to_vector(model.parameters()) for model in (first, second, other)]
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen3"])
def test_a_saved_policy_loads_with_its_weights_and_as_a_critics_body(tokenizer, tmp_path, model_type):
    config = new_model_config(tokenizer, model_type=model_type, hidden_size=32, max_length=24)
    saved = build_policy(config, seed=3)
    saved.save_pretrained(tmp_path)
    loaded = build_policy(load_config_of(tmp_path), folder=tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(saved(ids).logits, loaded(ids).logits)
    critic = build_value_model(load_config_of(tmp_path), folder=tmp_path, seed=1)
    assert critic(ids).logits.shape == (1, 3, 1)
    body = critic.base_model.get_input_embeddings().weight
    assert torch.equal(body, saved.get_input_embeddings().weight)


def test_a_model_that_cannot_be_found_or_built_says_so(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match="no model folder nowhere"):
        load_config_of("nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_config_of(tmp_path)
    with pytest.raises(ValueError, match="knows no model_type 'gtp2'"):
        new_model_config(tokenizer, model_type="gtp2", max_length=8)
    with pytest.raises(ValueError, match="has no field 'n_layers'"):
        new_model_config(tokenizer, max_length=8, override_config={"n_layers": 3})


def test_a_value_that_a_models_configuration_cannot_have_is_named(tokenizer, policy, tmp_path):
    wrong = {"n_layer": "many"}
    with pytest.raises(ValueError, match="'n_layer': 'many'"):
        new_model_config(tokenizer, max_length=8, override_config=wrong)
    policy.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'n_layer': 'many'"):
        load_config_of(tmp_path, wrong)


@pytest.mark.parametrize("model_type", ["bert", "gpt2", "qwen3"])
def test_a_new_policy_of_any_kind_sees_no_token_that_follows(tokenizer, model_type):
    model = build_policy(new_model_config(tokenizer, model_type=model_type, hidden_size=16, max_length=8))
    before, after = torch.tensor([[3, 4, 5, 6]]), torch.tensor([[3, 4, 5, 9]])
    with torch.no_grad():
        assert torch.equal(model(before).logits[:, :3], model(after).logits[:, :3])


def test_an_engine_continues_from_its_saved_state_bit_for_bit(tokenizer):
    config = new_model_config(tokenizer, hidden_size=32, max_length=24)
    columns = make_columns()
    totals = BatchTotals.of(columns["response_mask"])
    optim = OptimConfig(lr=1e-2, lr_scheduler_type="cosine", lr_warmup_steps=2)

    def learn(engine, steps):
        for _ in range(steps):
            engine.forward_backward(columns, lambda rows: objective_of("policy")(engine.model, rows, totals))
            engine.step()

    straight = TrainEngine(build_policy(config, seed=3), optim, total_steps=6)
    learn(straight, 2)
    resumed = TrainEngine(build_policy(config, seed=4), optim, total_steps=6)
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    learn(straight, 3)
    learn(resumed, 3)
    vectors = [torch.nn.utils.parameters_to_vector(engine.model.parameters()) for engine in (straight, resumed)]
    assert torch.equal(*vectors)


def test_a_changed_learning_rate_takes_effect_on_a_loaded_state_and_the_schedule_goes_on(tokenizer):
    config = new_model_config(tokenizer, hidden_size=32, max_length=24)
    columns = make_columns()
    totals = BatchTotals.of(columns["response_mask"])

    def learn(engine):
        engine.forward_backward(columns, lambda rows: objective_of("policy")(engine.model, rows, totals))
        return engine.step()["lr"]

    def optim(lr):
        return OptimConfig(lr=lr, lr_scheduler_type="linear")

    saved = TrainEngine(build_policy(config, seed=3), optim(1e-2), total_steps=4)
    assert [learn(saved), learn(saved)] == [1e-2, 0.75e-2]
    resumed = TrainEngine(build_policy(config, seed=3), optim(1.0), total_steps=4)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert [learn(resumed), learn(resumed)] == [0.5, 0.25]


@pytest.mark.parametrize("asked", [{"with_entropy": False}, {"with_entropy": True, "entropy_gradient": False}])
def test_an_entropy_that_is_only_reported_keeps_nothing_for_a_gradient(tokenizer, asked):
    model = build_policy(new_model_config(tokenizer, hidden_size=32, max_length=24), seed=1)
    columns = make_columns()
    totals = BatchTotals.of(columns["response_mask"])

    def kept_of_logits(make):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda t: t):
            made = make()
        return kept.count((ROWS, LENGTH, model.config.vocab_size)), made

    needed, output = kept_of_logits(lambda: policy_forward(model, columns, temperature=1.0, **asked))
    assert output.entropy is None or not output.entropy.requires_grad
    reported, result = kept_of_logits(lambda: PolicyObjective(entropy_coeff=0.0)(model, columns, totals))
    learned, _ = kept_of_logits(lambda: PolicyObjective(entropy_coeff=0.01)(model, columns, totals))
    assert needed == reported < learned
    assert metric_values(result.metrics)["actor/entropy"] > 0
