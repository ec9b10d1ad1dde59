"""Where the workers of a run are placed: their pool, with its GPUs, and their processes' environment."""

from __future__ import annotations

from kapell.workergroup import Backend, ClassWithInitArgs, WorkerGroup

from .config import RewardModelConfig, TrainerConfig

__all__ = ["start_group"]


def start_group(
    backend: Backend,
    worker: ClassWithInitArgs,
    *,
    role: str,
    size: TrainerConfig | RewardModelConfig,
    trainer: TrainerConfig,
) -> WorkerGroup:
    """A group on a pool of its own with ``size.nnodes`` x ``size.n_gpus_per_node`` processes."""
    # Threads that spin while they wait would take the cores from the other workers.
    environment = {
        "OMP_NUM_THREADS": str(trainer.torch_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    on_gpu = trainer.device == "cuda"
    try:
        pool = backend.resource_pool([size.n_gpus_per_node] * size.nnodes, **({"use_gpu": True} if on_gpu else {}))
        return backend.worker_group(pool, worker, role=role, worker_env=environment)
    except (ValueError, TimeoutError) as error:
        if on_gpu:
            error.add_note(
                f"trainer.device=cuda asks for a GPU for each of {size.nnodes} x {size.n_gpus_per_node} worker "
                "processes (nnodes x n_gpus_per_node): lower these to the GPUs there are, or set trainer.device=cpu"
            )
        raise
