from __future__ import annotations

import torch
from fake_sums import total


def helion_one_shot_all_reduce(a_shared: torch.Tensor) -> torch.Tensor:
    return total(a_shared).to(a_shared.dtype)
