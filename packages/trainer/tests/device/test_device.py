"""A run on another device than the CPU: the same numbers, all where it belongs, a clear word where there is none.

The other device is the one of second_device.py, in place of CUDA; test_cuda.py runs on a real one.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from second_device import DEVICE, There, second_device
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForSequenceClassification

from kapell.trainer.algorithms import merge_metrics, metric_values
from kapell.trainer.build import prepare, train
from kapell.trainer.config import OptimConfig
from kapell.trainer.config_load import load_config
from kapell.trainer.devices import memory_metrics, worker_device
from kapell.trainer.doctor import check_devices, examine_config
from kapell.trainer.engine import TrainEngine
from kapell.trainer.micro_batches import MicroBatches
from kapell.trainer.models import build_policy, new_model_config
from kapell.trainer.plan import plan_run
from kapell.trainer.reward_model import RewardModelWorker
from kapell.trainer.run_folder import RunFiles
from kapell.trainer.stages import Stages
from kapell.trainer.tasks import reverse_digits
from kapell.workergroup import LocalBackend, WorkerFailedError

CUDA = "trainer.device=cuda"
SMALL = [
    "backend=local",
    "data.train_files=rows.jsonl",
    "data.val_files=rows.jsonl",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.model.hidden_size=8",
    "actor_rollout_ref.model.num_hidden_layers=1",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "trainer.n_gpus_per_node=2",
    "trainer.test_freq=2",
    "trainer.val_before_train=false",
    "trainer.save_freq=1",
    "trainer.total_training_steps=2",
]
# The second device has no fused step, which rounds in its own way.
UNFUSED = [f"{role}.optim.override_optimizer_config={{fused: false}}" for role in ("actor_rollout_ref.actor", "critic")]
RUNS = {
    "ppo": [
        "algorithm.adv_estimator=gae",
        "reward.reward_model.enable=true",
        "reward.reward_model.path=reward_model",
        "reward.reward_model.use_own_tokenizer=true",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    ],
    "grpo": [
        "actor_rollout_ref.model.model_type=llama",
        "actor_rollout_ref.model.lora_rank=2",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24",
        "actor_rollout_ref.rollout.top_k=6",
        "actor_rollout_ref.rollout.top_p=0.9",
        "actor_rollout_ref.rollout.stop=['1']",
        "actor_rollout_ref.rollout.max_num_seqs=1",
    ],
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    rows, _ = reverse_digits.make_rows(seed=1)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    config = new_model_config(tokenizer, hidden_size=8, num_hidden_layers=1, max_length=64)
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained("reward_model")
    tokenizer.save_pretrained("reward_model")


@pytest.fixture
def there(monkeypatch):
    """Workers of the block take the second device for CUDA."""
    for module in ("workers", "reward_model"):
        monkeypatch.setattr(f"kapell.trainer.{module}.set_up_process", lambda kind, **options: DEVICE)
    with second_device():
        yield DEVICE


def run(folder, *overrides):
    folder = Path(folder)
    prepared = prepare(load_config(overrides=[*SMALL, *UNFUSED, *overrides]).config, folder)
    with sdpa_kernel(SDPBackend.MATH):  # torch would choose another kernel for another device
        train(prepared, folder, hooks=[RunFiles(folder)])


def numbers(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing", "perf")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


def same_files(first, second, name):
    ours, others = load_file(Path(first) / name), load_file(Path(second) / name)
    return ours.keys() == others.keys() and all(torch.equal(ours[key], others[key]) for key in ours)


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_on_another_device_gives_the_numbers_of_the_cpu_bit_for_bit(kind, request, monkeypatch):
    run("cpu", *RUNS[kind])
    devices, results = set(), set()
    _spy(monkeypatch, TrainEngine, "step", lambda engine, _: devices.update(_devices_of(engine)))
    _spy(monkeypatch, RewardModelWorker, "_logits", lambda worker, _: devices.add(worker._model.device.type))
    for stage in ("generate", "old_log_probs", "update_actor"):
        _spy(
            monkeypatch,
            Stages,
            stage,
            lambda _, batch: results.update(tensor.device for tensor in batch.batch.values()),
        )
    request.getfixturevalue("there")
    run("there", *RUNS[kind], CUDA)
    assert numbers("there") == numbers("cpu")
    assert devices == {DEVICE.type}
    assert results == {torch.device("cpu")}
    for name in ("model/model.safetensors", "global_step_2/actor/model.safetensors"):
        assert same_files("there", "cpu", name)


def test_a_checkpoint_goes_on_on_another_device(request):
    run("cpu", *RUNS["ppo"])
    run("both", *RUNS["ppo"], "trainer.total_training_steps=1")
    request.getfixturevalue("there")
    run("both", *RUNS["ppo"], CUDA)
    assert numbers("both")[-1] == numbers("cpu")[-1]
    for role in ("actor", "critic"):
        assert same_files("both", "cpu", f"global_step_2/{role}/optimizer.safetensors")


def test_columns_go_to_the_device_by_micro_batches_and_results_come_back(tokenizer):
    ones_BL, sizes = torch.ones(5, 6, dtype=torch.long), set()
    columns = dict.fromkeys(("input_ids", "attention_mask", "position_ids"), ones_BL)
    columns |= dict.fromkeys(("responses", "response_mask"), ones_BL[:, :2])

    def forward(model, micro):
        assert all(isinstance(column, There) for column in micro.values())
        sizes.add(len(micro["input_ids"]))
        return {"values": micro["responses"].float()}

    with second_device() as device:
        model = build_policy(new_model_config(tokenizer, hidden_size=8, max_length=8))
        engine = TrainEngine(model, OptimConfig(), device=device)
        made = engine.evaluate(columns, forward, names=("values",), micro_batches=MicroBatches(max_rows=2))
    assert sizes == {1, 2}
    assert made["values"].device.type == "cpu"


def test_ranks_of_one_process_take_its_gpus_in_turn(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    devices = [worker_device("cuda", local_rank=rank) for rank in range(3)]
    assert devices == [torch.device("cuda", index) for index in (0, 1, 0)]
    assert worker_device("cpu", local_rank=1) == torch.device("cpu")


def test_a_missing_gpu_is_an_error_of_the_worker_that_names_the_key(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(WorkerFailedError) as caught:
        run("run", CUDA)
    assert "trainer.device=cuda" in str(caught.value)
    assert "set trainer.device=cpu" in str(caught.value)


def test_every_pool_asks_for_gpus_and_one_that_cannot_have_them_names_the_keys(monkeypatch):
    asked = []

    class NoGPU(LocalBackend):
        def resource_pool(self, process_on_nodes, **options):
            asked.append((list(process_on_nodes), options))
            return super().resource_pool(process_on_nodes, **options)

        def worker_group(self, *args, **options):
            raise ValueError("the cluster has 0 GPU")

    monkeypatch.setattr("kapell.trainer.roles.load_backend", lambda name: NoGPU)
    for device in ("cpu", "cuda"):
        with pytest.raises(ValueError, match="has 0 GPU") as caught:
            run("run", f"trainer.device={device}")
        notes = "".join(getattr(caught.value, "__notes__", ()))
        assert ("each of 1 x 2 worker processes" in notes) == ("trainer.device=cpu" in notes) == (device == "cuda")
    assert asked == [([2], {}), ([2], {"use_gpu": True})]


def test_the_plan_shows_devices_and_the_gpus_that_each_pool_asks_for():
    pools = ["reward.reward_model.enable=true", "reward.reward_model.path=somewhere", "trainer.nnodes=2"]
    pools += ["reward.reward_model.enable_resource_pool=true", "trainer.n_gpus_per_node=4"]

    def gpus(*overrides):
        found = plan_run(load_config(overrides=[*pools, *overrides]))
        return {pool.name: (pool.device, pool.gpus) for pool in found.pools}

    assert gpus(CUDA) == {"workers": ("cuda", 8), "reward_model": ("cuda", 1)}
    assert gpus() == {"workers": ("cpu", 0), "reward_model": ("cpu", 0)}
    assert gpus(CUDA, "backend=local") == {"workers": ("cuda", 0), "reward_model": ("cuda", 0)}


@pytest.mark.parametrize(("backend", "found", "ok"), [("ray", 2, True), ("ray", 1, False), ("local", 1, True)])
def test_the_doctor_counts_the_gpus_of_this_machine(monkeypatch, backend, found, ok):
    monkeypatch.setattr("torch.cuda.device_count", lambda: found)
    (finding,) = check_devices(load_config(overrides=[*SMALL, CUDA, f"backend={backend}"]).config)
    assert finding.ok == ok
    assert f"finds {found} on this one" in finding.message
    assert ok or "trainer.n_gpus_per_node" in finding.way_out


def test_the_doctor_goes_on_without_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    findings = list(examine_config(load_config(overrides=[*SMALL, CUDA])))
    assert [finding.check for finding in findings if not finding.ok] == ["devices"]
    assert findings[-1].check == "errors"


def test_the_memory_of_a_gpu_is_reported_under_verls_names_as_the_most_of_any_rank(monkeypatch):
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: {0: 1, 1: 3}[device.index] * 2**29)
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda device: 2**32)
    ranks = [memory_metrics(torch.device("cuda", index)) for index in (0, 1)]
    assert metric_values(merge_metrics(ranks)) == {
        "perf/max_memory_allocated_gb": 1.5,
        "perf/max_memory_reserved_gb": 4.0,
    }
    assert memory_metrics(torch.device("cpu")) == {}


def _spy(monkeypatch, cls, name, see):
    original = getattr(cls, name)

    def spied(self, *args, **options):
        result = original(self, *args, **options)
        see(self, result)
        return result

    spied.__dict__.update(original.__dict__)
    monkeypatch.setattr(cls, name, spied)


def _devices_of(engine):
    moments = [state["exp_avg"] for state in engine.optimizer.state.values()]
    assert moments
    return {tensor.device.type for tensor in (*engine.model.parameters(), *engine.model.buffers(), *moments)}
