"""Grad-mode and autocast regions: nodes whose meaning is their position."""

from __future__ import annotations

import torch
import torch.fx as fx

#: They open or close a region.
REGIONS = {
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
}


def region_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether a region begins or ends between two nodes of a graph, ``first`` not behind ``last``."""
    while first is not last:
        if first.target in REGIONS:
            return True
        first = first.next
    return False
