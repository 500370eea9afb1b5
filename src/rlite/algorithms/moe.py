"""Expert load and routing agreement of a mixture-of-experts layer.

Shape legend: N tokens, E experts, k experts for each token.
"""

import torch
from torch import Tensor


def expert_load(routes_Nk: Tensor, num_experts: int) -> Tensor:
    """int64 `[E]`: tokens sent to each expert. Additive over micro-batches and ranks."""
    return torch.bincount(routes_Nk.flatten().long(), minlength=num_experts)


def load_violation(load_E: Tensor) -> dict[str, float]:
    """`max_vio`, `min_vio`, `avg_vio` of load / mean - 1 (arXiv 2408.15664); 0 is balance. All 0 without any token."""
    load_E = load_E.double()
    violation_E = load_E / load_E.mean() - 1.0 if load_E.sum() > 0 else torch.zeros_like(load_E)
    return {
        "max_vio": float(violation_E.max()),
        "min_vio": float(violation_E.min()),
        "avg_vio": float(violation_E.abs().mean()),
    }


def routing_mismatch(routes_Nk: Tensor, other_Nk: Tensor) -> Tensor:
    """`[N]` fraction of each token's expert set that the other router did not choose; the order does not matter."""
    shared_N = (routes_Nk[:, :, None] == other_Nk[:, None, :]).any(dim=2).double().mean(dim=1)
    return 1.0 - shared_N


def load_balancing_loss(router_logits_NE: Tensor, routes_Nk: Tensor) -> Tensor:
    """E * sum_e (load_e / N) * mean softmax probability_e (arXiv 2101.03961, as in transformers)."""
    num_tokens, num_experts = router_logits_NE.shape
    share_E = expert_load(routes_Nk, num_experts).to(router_logits_NE.dtype) / max(num_tokens, 1)
    return num_experts * (share_E * router_logits_NE.softmax(dim=1).mean(dim=0)).sum()
