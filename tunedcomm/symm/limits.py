"""What a machine and a workspace allow, worked out without either: stored environments can be asked about anywhere."""

from __future__ import annotations

from tunedcomm import settings
from tunedcomm.hardware import Environment, Fabric
from tunedcomm.spec import Limits
from tunedcomm.symm.layout import MAX_BLOCKS, MAX_WORLD_SIZE, LaneLayout

__all__ = ["limits_for"]


def limits_for(environment: Environment, world_size: int, *, layout: LaneLayout | None = None) -> Limits:
    """What an environment and a workspace layout allow; needs no GPU: stored environments can be asked about."""
    layout = layout or LaneLayout.for_messages(settings.workspace_bytes())
    fabric = Fabric.parse(environment.fabric)
    apart, left_over = divmod(world_size, environment.nodes)
    spans = environment.nodes > 1 and left_over == 0 and 2 <= apart <= MAX_WORLD_SIZE and fabric.can_share_memory
    return Limits(
        backend="host" if environment.is_host else "cuda",
        num_sms=environment.num_sms,
        multicast=environment.multicast,
        max_blocks=MAX_BLOCKS,
        staging_bytes=layout.staging_bytes,
        one_shot_bytes=layout.one_shot_bytes,
        stage_bytes=layout.stage_bytes,
        panel_bytes=layout.panel_bytes,
        symmetric=environment.nodes == 1 and 2 <= world_size <= MAX_WORLD_SIZE and fabric.can_share_memory,
        ranks_per_node=apart if spans else 0,
        launch_pdl=environment.compute_capability >= 90,
    )
