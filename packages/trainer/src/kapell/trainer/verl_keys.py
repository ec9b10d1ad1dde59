"""What stands here for keys and values of verl's that do not exist, for those who bring a command line along."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["instead_of_key", "instead_of_value"]

_NEEDLESS = "leave it out: "
_SERVER = "it is an option of the server that samples (rollout.name=openai), which you start"
_PER_GPU = "verl's old name of {key}_per_gpu; set that"
_OVERLONG = "set reward.overlong_buffer.enable, .len and .penalty_factor"
_BETTER = "reward.custom_reward_function or reward.terms says how responses are scored"

# By the end of the key, a whole group's by its name.
_KEYS: Mapping[str, str] = {
    "use_remove_padding": _NEEDLESS + "micro-batches are cut to the tokens that they have",
    "use_fused_kernels": _NEEDLESS + "torch's own kernels are used",
    "use_torch_compile": _NEEDLESS + "nothing is compiled",
    "use_shm": _NEEDLESS + "model folders are read where they are",
    "trust_remote_code": "code that comes with a model is not run; take an architecture that transformers has",
    "fsdp_config": "models in parts are actor.strategy=fsdp2 (and critic.strategy); nothing is offloaded",
    "ulysses_sequence_parallel_size": "sequences are not split over workers",
    "actor.megatron": "Megatron is not supported; actor.strategy=fsdp2 holds models in parts",
    "actor.loss_scale_factor": "seq-mean-token-sum-norm divides by data.max_response_length",
    "checkpoint": "checkpoints hold all that a run needs to go on; `kapell export` writes a model alone",
    "optim.warmup_style": "verl's old name of optim.lr_scheduler_type; set that",
    "optim.num_cycles": "set optim.lr_scheduler_type=cosine_with_restarts and optim.lr_scheduler_kwargs",
    "optim.total_training_steps": _NEEDLESS + "schedules plan for the steps that the run will make",
    "ppo_micro_batch_size": _PER_GPU,
    "log_prob_micro_batch_size": _PER_GPU,
    "forward_micro_batch_size": _PER_GPU,
    **dict.fromkeys(
        (
            "tensor_model_parallel_size",
            "gpu_memory_utilization",
            "enforce_eager",
            "free_cache_engine",
            "max_num_batched_tokens",
            "max_model_len",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "load_format",
            "engine_kwargs",
            "rollout.dtype",
        ),
        _SERVER,
    ),
    "rollout.mode": _NEEDLESS + "rollout.name says what samples",
    "rollout.ignore_eos": "responses end with the model's end tokens",
    "rollout.prompt_length": "set data.max_prompt_length",
    "rollout.response_length": "set data.max_response_length",
    "rollout.calculate_log_probs": _NEEDLESS + "the sampler's log-probabilities are always kept",
    "rollout.multi_turn": "one turn is sampled; a step of your own can sample more, see docs/trainer.md",
    "rollout.agent": "one turn is sampled; a step of your own can sample more, see docs/trainer.md",
    "hybrid_engine": _NEEDLESS + "the policy trains and samples in the same workers",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.norm_scope=none is its false; true is GRPO's default",
    "algorithm.filter_groups": "groups are not sampled again; those without a spread have advantage 0",
    "algorithm.use_pf_ppo": "prompts are not sampled again by their score",
    "gen_batch_size": "groups are not sampled again; data.train_batch_size prompts are answered",
    "return_raw_chat": _NEEDLESS + "the chat is always kept",
    "filter_overlong_prompts_workers": _NEEDLESS + "prompts are filtered in one process",
    "train_max_samples": "write a shorter file",
    "val_max_samples": "write a shorter file",
    "image_key": "prompts are text",
    "video_key": "prompts are text",
    "custom_cls": "data.train_files may name files of four kinds; code of your own can give rows to PromptDataset",
    "reward_model.overlong_buffer": _OVERLONG,
    "overlong_buffer_cfg": _OVERLONG,
    "reward_model.model.path": "set reward.reward_model.path",
    "reward_model.reward_manager": _BETTER,
    "reward.reward_manager": _BETTER,
    "reward_model.launch_reward_fn_async": "an async function is called as one",
    "reward.num_workers": "set reward.concurrency, for async functions",
    "trainer.val_only": "set trainer.total_training_steps=0",
    "trainer.default_hdfs_dir": "runs are on disks; set trainer.default_local_dir",
    "trainer.del_local_ckpt_after_load": "set trainer.max_ckpt_to_keep",
    "trainer.max_actor_ckpt_to_keep": "set trainer.max_ckpt_to_keep, which counts checkpoints of all roles",
    "trainer.max_critic_ckpt_to_keep": "set trainer.max_ckpt_to_keep, which counts checkpoints of all roles",
    "trainer.ray_wait_register_center_timeout": _NEEDLESS + "there is no register center",
    "trainer.use_legacy_worker_impl": _NEEDLESS + "there is one kind of worker",
    "ray_kwargs": "set backend.options, such as backend.options={num_cpus: 8}",
    "ray_init": "set backend.options, such as backend.options={num_cpus: 8}",
    "transfer_queue": "set trainer.data_plane=reference",
    "global_profiler": "timing_s/... and perf/... in metrics.jsonl have the times; there is no profiler",
}

_STRATEGIES = {"fsdp": "set fsdp2", "megatron": "Megatron is not supported; fsdp2 holds models in parts"}
_VALUES: Mapping[str, Mapping[str, str]] = {
    "actor_rollout_ref.rollout.name": dict.fromkeys(
        ("vllm", "sglang", "trtllm"),
        "start its OpenAI-compatible server, and set rollout.name=openai and rollout.server.url",
    ),
    "actor_rollout_ref.actor.strategy": _STRATEGIES,
    "critic.strategy": _STRATEGIES,
}


def instead_of_key(key: str) -> str | None:
    """What to do in place of setting the key, dotted from the top; None for one that is not known from verl."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        for start in range(end):
            name = ".".join(parts[start:end])
            if name in _KEYS:
                return _KEYS[name].replace("{key}", key)
    return None


def instead_of_value(key: str, value: object) -> str | None:
    """What to do in place of giving the key this value; None for one that is not known from verl."""
    return _VALUES.get(key, {}).get(str(value))
