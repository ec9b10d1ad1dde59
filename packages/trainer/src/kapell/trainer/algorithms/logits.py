"""Log-probabilities and entropy of the distribution that logits describe at a temperature."""
# B rows, T tokens, V vocabulary

import torch
from torch import Tensor

from kapell.trainer.algorithms.aggregation import Aggregation, BatchTotals, LossResult, aggregated_loss
from kapell.trainer.algorithms.masked import widen

__all__ = ["entropy_from_logits", "entropy_loss", "log_probs_from_logits", "sum_pi_squared_from_logits"]


def log_probs_from_logits(logits_BTV: Tensor, tokens_BT: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-softmax of z/temperature at the given tokens, (B, T), at least float32.

    The temperature is the sampler's, or the ratio of an on-policy step is not 1.
    """
    scaled_BTV = _scaled(logits_BTV, temperature)
    chosen_BT = scaled_BTV.gather(-1, tokens_BT[..., None]).squeeze(-1)
    return chosen_BT - torch.logsumexp(scaled_BTV, dim=-1)


def entropy_from_logits(logits_BTV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """H = -sum p log p with p = softmax(z/temperature), (B, T); tokens ruled out by -inf add nothing."""
    log_p_BTV = torch.log_softmax(_scaled(logits_BTV, temperature), dim=-1)
    p_BTV = log_p_BTV.exp()
    return -torch.where(p_BTV > 0, p_BTV * torch.where(p_BTV > 0, log_p_BTV, 0.0), 0.0).sum(-1)


def entropy_loss(
    entropy_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    mode: Aggregation | str,
    totals: BatchTotals,
    scale: float | None = None,
) -> LossResult:
    """The aggregated entropy, to be subtracted from the policy loss with a coefficient; metric `actor/entropy`."""
    return aggregated_loss("actor/entropy", entropy_BT, loss_mask_BT, mode, totals, scale=scale)


def sum_pi_squared_from_logits(logits_BTV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Sum of p^2 over the vocabulary, (B, T): what the optimal token baseline needs."""
    return torch.softmax(_scaled(logits_BTV, temperature), dim=-1).square().sum(-1)


def _scaled(logits_BTV: Tensor, temperature: float) -> Tensor:
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}; greedy decoding has no log-probabilities")
    logits_BTV = widen(logits_BTV)
    return logits_BTV if temperature == 1.0 else logits_BTV / temperature
