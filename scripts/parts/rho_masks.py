"""Which tokens --rho_mask_lower_bound and --rho_mask_upper_bound drop, by the ratio rho of learner and engine.

What is tested against the bounds, for a token t of response i:

    rho_it                          the default             IcePop, arXiv:2510.18855
    exp(mean_t log rho_it)          rho_mask_sequence_level  the geometric mean: the same for the whole response
    mean_t |rho_it - 1|             rho_mask_tv_divergence   VACO, arXiv:2603.01365; open-instruct's definition

The last is an estimate of twice the total variation of the two policies on the response. Where it is outside the
bounds, only those tokens are dropped whose update would increase it: log rho_it * A_it > 0. Means are over the tokens
to train on. A bound of 0 is off.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor


def kept(log_rho: Tensor, inputs: Any, args: Any, response_mean: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Where a token is not dropped, bool (B, T). Outside the mask the values mean nothing.

    log_rho is (B, T), zero outside the mask; inputs are grpo.LossInputs, args grpo.GRPOFlags and response_mean grpo's.
    """
    tested = log_rho.exp()
    if args.rho_mask_sequence_level:
        tested = response_mean(log_rho, inputs.mask, inputs.seq_ids).exp()
    elif args.rho_mask_tv_divergence:
        distance = (tested - 1).abs()
        tested = response_mean(distance, inputs.mask, inputs.seq_ids)

    upper = args.rho_mask_upper_bound or math.inf
    is_inside = (tested >= args.rho_mask_lower_bound) & (tested <= upper)
    if args.rho_mask_tv_divergence:
        comes_closer = log_rho * inputs.advantages <= 0
        return is_inside | comes_closer
    return is_inside
