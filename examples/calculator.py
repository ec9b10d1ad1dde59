"""Teach a small model to write Python that does what a pocket calculator does: PPO on tests that run in a sandbox.

A pocket calculator takes its keys from left to right, so that ``a+b*c`` is ``(a+b)*c``. The model reads the keys and
writes a function; its score is the share of tests that the function passes, in a process that can do nothing but
compute (Linux only). It starts weak, from examples of which 3 in 10 are right. ``python examples/calculator.py`` takes
some minutes on two cores; ``python examples/calculator.py draw`` puts its curves into a picture.
"""

import itertools
import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from matplotlib import pyplot
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kapell.trainer.build import prepare, train
from kapell.trainer.config_load import load_config
from kapell.trainer.hooks import RunSummary
from kapell.trainer.models import build_policy, new_model_config
from kapell.trainer.run_folder import RunFiles
from kapell.trainer.tokenizer import build_character_tokenizer

HEAD = "def f(a,b,c): return "
ALPHABET = HEAD + "+-*"
LONGEST_ANSWER = len(HEAD) + 14  # four variables, three operators, two pairs of brackets, the end, and room for junk
ARGUMENTS = [[1, 1, 1], [0, 1, 1], [2, 3, 5], [7, 4, -3], [-6, 11, 8]]  # the first two forgive some mistakes


def solve(keys: str) -> str:
    """The keys as Python, with brackets around what the calculator shows before the next operator."""
    answer = keys[:3]
    for place in range(3, len(keys), 2):
        answer = f"({answer}){keys[place : place + 2]}"
    return answer


def value(expression: str, arguments: Sequence[int]) -> int:
    """The expression's value; it is this file's own, so that it needs no sandbox."""
    return eval(expression, dict(zip("abc", arguments, strict=True)))


def make_keys(seed: int, num_held_out: int) -> tuple[list[str], list[str]]:
    """All keys of two or three operators that Python would read otherwise, and as many that training never sees."""
    keys = []
    for operators in (2, 3):
        for parts in itertools.product("abc", *["+-*", "abc"] * operators):
            text = "".join(parts)
            if any(value(text, arguments) != value(solve(text), arguments) for arguments in ARGUMENTS):
                keys.append(text)
    random.Random(seed).shuffle(keys)
    return keys[num_held_out:], keys[:num_held_out]


def write_rows(file: Path, keys: Iterable[str]) -> None:
    """Rows in verl's format; the ground truth is tests."""
    with file.open("w") as lines:
        for text in keys:
            outputs = [value(solve(text), arguments) for arguments in ARGUMENTS]
            tests = {"fn_name": "f", "inputs": ARGUMENTS, "outputs": outputs}
            row = {"data_source": "calculator", "prompt": text, "reward_model": {"ground_truth": json.dumps(tests)}}
            lines.write(json.dumps(row) + "\n")


def noisy_answer(keys: str, rng: random.Random) -> str:
    """An answer of the warm-up's corpus: right in 3 of 10 cases, otherwise the keys as they are, or right but for a
    wrong, a missing or an additional character or two.
    """
    kind = rng.random()
    answer = list(keys if 0.2 <= kind < 0.5 else solve(keys))
    if kind >= 0.5:
        for _ in range(rng.randint(1, 2)):
            place = rng.randrange(len(answer))
            answer[place : place + rng.randint(0, 1)] = rng.choices("abc+-*()", k=rng.randint(0, 1))
    return HEAD + "".join(answer)


def warm_up(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, keys: Sequence[str], *, steps: int, seed: int
) -> None:
    """Supervised steps on the noisy corpus, so that reinforcement learning has something to choose from.

    This is the example's own and no part of the trainer.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        prompts = rng.sample(keys, k=min(64, len(keys)))
        texts = [(tokenizer(text)["input_ids"], tokenizer(noisy_answer(text, rng))["input_ids"]) for text in prompts]
        rows = [torch.tensor([*prompt, *answer[:-1], tokenizer.eos_token_id]) for prompt, answer in texts]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
        labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
        for row, (prompt, _) in enumerate(texts):
            labels[row, : len(prompt)] = -100
        loss = model(ids, attention_mask=(ids != tokenizer.pad_token_id).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(
    folder: str = "runs/calculator",
    *overrides: str,
    warm_up_steps: int = 400,
    num_held_out: int = 200,
    seed: int = 1,
) -> RunSummary:
    """Warm up, then train; the run's folder has the curves, the numbers and the model."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    run = Path(folder)
    run.mkdir(parents=True)  # an error where it exists, so that no run is written over
    train_keys, held_out = make_keys(seed, num_held_out)
    write_rows(run / "train.jsonl", train_keys)
    write_rows(run / "val.jsonl", held_out)
    tokenizer = build_character_tokenizer(ALPHABET)
    sizes = new_model_config(
        tokenizer, model_type="qwen3", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_length=64
    )
    model = build_policy(sizes, seed=seed)
    warm_up(model, tokenizer, train_keys, steps=warm_up_steps, seed=seed)
    model.save_pretrained(run / "warm")
    tokenizer.save_pretrained(run / "warm")
    resolved = load_config(
        overrides=[
            "algorithm.adv_estimator=gae",
            "reward.terms.tests.type=sandbox",
            f"actor_rollout_ref.model.path={run / 'warm'}",
            f"data.train_files={run / 'train.jsonl'}",
            f"data.val_files={run / 'val.jsonl'}",
            "data.train_batch_size=32",
            f"data.max_response_length={LONGEST_ANSWER}",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true",  # as in training: the noise is in what it samples
            "actor_rollout_ref.actor.optim.lr=1e-4",
            "actor_rollout_ref.actor.ppo_epochs=1",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "actor_rollout_ref.actor.entropy_coeff=0",
            "critic.optim.lr=1e-3",
            "critic.ppo_epochs=2",
            "trainer.total_training_steps=60",
            "trainer.test_freq=10",
            "trainer.n_gpus_per_node=1",
            "backend=local",
            *overrides,
        ]
    )
    (run / "config.yaml").write_text(resolved.to_yaml())
    (run / "config_origins.yaml").write_text(resolved.origins_to_yaml())
    return train(prepare(resolved.config, run), run, hooks=[RunFiles(run)])


def draw(folder: str = "runs/calculator", picture: str = "calculator.png") -> None:
    """The share of tests passed, and of functions that pass all, over the steps."""
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    figure, axis = pyplot.subplots(figsize=(6, 3.4))
    for name, label, style in (
        ("critic/score/mean", "tests passed, training", "C0-"),
        ("reward/exact_match", "all tests passed, training", "C1-"),
        ("val/score/mean", "tests passed, held out", "C0o"),
        ("val/exact_match", "all tests passed, held out", "C1o"),
    ):
        points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
        axis.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
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
