"""Teach a small model to spell words backward: a weak start from noisy examples, then reinforcement learning.

``python examples/spell_backward.py grpo`` (or ``ppo``, ``reward_model``) takes some minutes on two cores. Words of 3
to 6 letters and the reward come from reasoning-gym's task ``spell_backward``
(``pip install "kapell-trainer[reasoning-gym]"``). Its score gives 0.8 to the right word followed by junk, so the curves
show the exact match beside the reward. With ``reward_model`` PPO never sees that score: a classifier that learned it
judges. ``python examples/spell_backward.py draw`` puts the curves of the runs that there are into one picture.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import reasoning_gym
import torch
from matplotlib import pyplot
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kapell.trainer.build import prepare, train
from kapell.trainer.config_load import load_config
from kapell.trainer.hooks import RunSummary
from kapell.trainer.models import build_policy, new_model_config
from kapell.trainer.run_folder import RunFiles
from kapell.trainer.tokenizer import build_character_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LONGEST_ANSWER = 8  # six letters and the end, and room for junk
OVERRIDES = {
    "grpo": ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.optim.lr=3e-4"],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "critic.optim.lr=1e-3",
        "critic.ppo_epochs=2",
    ],
}
OVERRIDES["reward_model"] = [*OVERRIDES["ppo"], "reward.reward_model.enable=true"]


def model_sizes(tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Qwen3's architecture with 2 layers of width 64."""
    return new_model_config(
        tokenizer, model_type="qwen3", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_length=32
    )


def make_words(seed: int, held_out: int = 200) -> tuple[list[str], list[str]]:
    """The task's words in lower case, each once, and as many that training never sees."""
    task = reasoning_gym.create_dataset("spell_backward", seed=seed, size=1, min_word_len=3, max_word_len=6)
    words = sorted({word.lower() for word in task.words if set(word.lower()) <= set(LETTERS)})
    random.Random(seed).shuffle(words)
    return words[held_out:], words[:held_out]


def write_rows(file: Path, words: Sequence[str]) -> None:
    """The task's rows in verl's format. The prompt is the word alone; the entry is what the task's score needs."""
    with file.open("w") as lines:
        for word in words:
            entry = {"question": word, "answer": word[::-1], "metadata": {"word": word}}
            row = {
                "data_source": "reasoning_gym/spell_backward",
                "prompt": [{"role": "user", "content": word}],
                "reward_model": {"ground_truth": word[::-1]},
                "extra_info": {"entry": entry},
            }
            lines.write(json.dumps(row) + "\n")


def noisy_answer(word: str, rng: random.Random) -> str:
    """An answer of the warm-up's corpus: right in 3 of 10 cases, otherwise with wrong letters or junk behind."""
    answer = list(word[::-1])
    kind = rng.random()
    if kind < 0.3:
        return "".join(answer)
    if kind < 0.5:
        return "".join(answer) + "".join(rng.choices(LETTERS, k=rng.randint(1, LONGEST_ANSWER - 1 - len(answer))))
    for place in rng.sample(range(len(answer)), k=rng.randint(1, len(answer))):
        answer[place] = rng.choice(LETTERS)
    return "".join(answer)


def warm_up(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, words: Sequence[str], *, steps: int, seed: int
) -> None:
    """Supervised steps on the noisy corpus, so that reinforcement learning has something to choose from.

    This is the example's own and no part of the trainer.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(steps):
        chosen = rng.sample(words, k=min(64, len(words)))
        prompts = [tokenizer(word)["input_ids"] for word in chosen]
        answers = [[*tokenizer(noisy_answer(word, rng))["input_ids"][:-1], tokenizer.eos_token_id] for word in chosen]
        width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        ids = torch.full((len(chosen), width), tokenizer.pad_token_id)
        labels = torch.full_like(ids, -100)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        loss = model(ids, attention_mask=(ids != tokenizer.pad_token_id).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_reward_model(
    folder: Path, tokenizer: PreTrainedTokenizerBase, words: Sequence[str], *, steps: int, seed: int
) -> None:
    """Fit a classifier with one label to the task's own score of noisy answers, and save it in Hugging Face format.

    This too is the example's own and no part of the trainer.
    """
    rng = random.Random(seed)
    score_answer = reasoning_gym.get_score_answer_fn("spell_backward")
    sizes = model_sizes(tokenizer)
    sizes.num_labels = 1
    sizes.pad_token_id = tokenizer.pad_token_id
    model = AutoModelForSequenceClassification.from_config(sizes, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        chosen = [(word, noisy_answer(word, rng)) for word in rng.choices(words, k=128)]
        ids = [
            [*tokenizer(word)["input_ids"], *tokenizer(answer)["input_ids"][:-1], tokenizer.eos_token_id]
            for word, answer in chosen
        ]
        width = max(map(len, ids))
        batch = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids])
        scores = torch.tensor([score_answer(answer, {"answer": word[::-1]}) for word, answer in chosen])
        logits = model(batch, attention_mask=(batch != tokenizer.pad_token_id).long()).logits[:, 0]
        loss = torch.nn.functional.mse_loss(logits, scores)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def main(
    algorithm: str = "grpo",
    folder: str = "runs/spell_backward",
    *overrides: str,
    warm_up_steps: int = 500,
    seed: int = 1,
) -> RunSummary:
    """Warm up, then train; the run's folder has the curves, the numbers and the model."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    run = Path(folder) / algorithm
    run.mkdir(parents=True, exist_ok=True)
    train_words, held_out = make_words(seed)
    for name, words in (("train", train_words), ("val", held_out)):
        write_rows(run / f"{name}.jsonl", words)
    tokenizer = build_character_tokenizer(LETTERS)
    model = build_policy(model_sizes(tokenizer), seed=seed)
    warm_up(model, tokenizer, train_words, steps=warm_up_steps, seed=seed)
    model.save_pretrained(run / "warm")
    tokenizer.save_pretrained(run / "warm")
    judge = []
    if algorithm == "reward_model":
        train_reward_model(run / "judge", tokenizer, train_words, steps=3 * warm_up_steps, seed=seed)
        judge = [f"reward.reward_model.path={run / 'judge'}"]
    resolved = load_config(
        overrides=[
            *OVERRIDES[algorithm],
            *judge,
            f"actor_rollout_ref.model.path={run / 'warm'}",
            f"data.train_files={run / 'train.jsonl'}",
            f"data.val_files={run / 'val.jsonl'}",
            "data.train_batch_size=32",
            f"data.max_response_length={LONGEST_ANSWER}",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.ppo_epochs=1",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "actor_rollout_ref.actor.entropy_coeff=0",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.kl_loss_type=k3",
            "actor_rollout_ref.actor.kl_loss_coef=0.001",
            "trainer.total_training_steps=200",
            "trainer.test_freq=20",
            "trainer.n_gpus_per_node=1",
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true",  # as in training: the noise is in what it samples
            "backend=local",
            *overrides,
        ]
    )
    (run / "config.yaml").write_text(resolved.to_yaml())
    (run / "config_origins.yaml").write_text(resolved.origins_to_yaml())
    return train(prepare(resolved.config, run), run, hooks=[RunFiles(run)])


def draw(folder: str = "runs/spell_backward", picture: str = "spell_backward.png") -> None:
    """Reward and exact match over the steps, in training and on held-out words, for each run in the folder."""
    runs = [Path(folder) / name for name in OVERRIDES if (Path(folder) / name / "metrics.jsonl").is_file()]
    figure, axes = pyplot.subplots(1, len(runs), figsize=(4.5 * len(runs), 3.4), sharey=True, squeeze=False)
    for axis, run in zip(axes[0], runs, strict=True):
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for name, label, style in (
            ("critic/score/mean", "reward, training", "C0-"),
            ("reward/exact_match", "exact match, training", "C1-"),
            ("val/score/mean", "reward, held out", "C0o"),
            ("val/exact_match", "exact match, held out", "C1o"),
        ):
            points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
            axis.plot(*zip(*points, strict=True), style, label=label, markersize=4)
        axis.set_title(run.name.replace("_", " "))
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    if sys.argv[1:2] == ["draw"]:
        draw(*sys.argv[2:])
        sys.exit()
    summary = main(*sys.argv[1:])
    for name in ("critic/score/mean", "reward/exact_match", "val/score/mean", "val/exact_match"):
        print(f"{name}: {summary.first[name]:.3f} → {summary.last[name]:.3f}")
    print(f"{summary.steps} steps in {summary.seconds:.0f} s")
