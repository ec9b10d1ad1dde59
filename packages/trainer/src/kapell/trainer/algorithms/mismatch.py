"""How far the training policy is from the one that sampled, in numbers that combine over parts of a batch."""
# B rows, T response tokens

from torch import Tensor

from kapell.trainer.algorithms.masked import as_mask, keep, masked_mean, masked_sum
from kapell.trainer.algorithms.metrics import Metric

__all__ = ["mismatch_metrics"]

_MAX_LOG_RATIO = 20.0  # exp(2 x 20) is still far inside float32; a perplexity beyond exp(20) says no more


def mismatch_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, Metric]:
    """Metrics `rollout_corr/...`; with rho = p_old/p_rollout and NLL the mean -log p of a row:

    over tokens, kl = -mean log rho and k3_kl = mean(rho - 1 - log rho), both KL(rollout || old), and
    chi2_token = mean rho^2 - 1; over rows, training_ppl and rollout_ppl = mean exp NLL, log_ppl_diff =
    mean(NLL_old - NLL_rollout) and its absolute, ppl_ratio = mean exp of that difference and
    chi2_seq = mean (prod rho)^2 - 1. Rows without a valid token do not count.
    """
    mask_BT = as_mask(response_mask)
    old_BT, rollout_BT = keep(mask_BT, old_log_probs).detach(), keep(mask_BT, rollout_log_probs).detach()
    log_rho_BT = old_BT - rollout_BT
    rho_BT = _exp(log_rho_BT)
    nll_old_B = -masked_mean(old_BT, mask_BT, dim=-1)
    nll_rollout_B = -masked_mean(rollout_BT, mask_BT, dim=-1)
    difference_B = nll_old_B - nll_rollout_B
    product_B = _exp(masked_sum(log_rho_BT, mask_BT, dim=-1))
    by_token = {
        "kl": -log_rho_BT,
        "k3_kl": rho_BT - 1 - log_rho_BT,
        "chi2_token": rho_BT.square() - 1,
    }
    by_row = {
        "training_ppl": _exp(nll_old_B),
        "rollout_ppl": _exp(nll_rollout_B),
        "training_log_ppl": nll_old_B,
        "rollout_log_ppl": nll_rollout_B,
        "log_ppl_diff": difference_B,
        "log_ppl_abs_diff": difference_B.abs(),
        "ppl_ratio": _exp(difference_B),
        "chi2_seq": product_B.square() - 1,
    }
    rows_B = mask_BT.any(-1)
    return {f"rollout_corr/{name}": _mean(values_BT, mask_BT) for name, values_BT in by_token.items()} | {
        f"rollout_corr/{name}": _mean(values_B, rows_B) for name, values_B in by_row.items()
    }


def _exp(logarithm: Tensor) -> Tensor:
    return logarithm.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _mean(values: Tensor, mask: Tensor) -> Metric:
    return Metric.part_of_mean(float(masked_sum(values, mask)), weight=int(mask.sum()))
