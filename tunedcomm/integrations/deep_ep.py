"""The calls of DeepEP's `Buffer`, served by `ep_dispatch` and `ep_combine` in the layout `tokens`.

Differences:

- With `num_worst_tokens` nothing waits for the device, and each rank has room for `num_worst_tokens` / n tokens. Row
  r · room + t of the result is token t of rank r: rows in use do not stand at the front. The ids of other rows are −1.
- Without it rows in use stand closely packed, in the order of (rank, token), and the counts of tokens come back as a
  Python list. Both cost a wait for the device in every call, and so does the exchange of the ranks' numbers of tokens.
- Calls run in the current stream; `num_sms` bounds their SMs; events are recorded behind them. No low-latency calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.ops.collectives import all_reduce
from tunedcomm.ops.experts import TokenDispatchResult, ep_combine, ep_dispatch

Tokens: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"


class EventOverlap:
    """The end of the current stream's work when the event was made."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """Let the current stream wait for the event."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A dispatch of `num_tokens` of this rank, for `combine` and for further dispatches to the same experts."""

    sent: TokenDispatchResult
    num_tokens: int
    rows: torch.Tensor | None  # in use, where they were packed closely


class Buffer:
    """A group's exchange of tokens; it holds no memory of its own, so sizes of buffers are taken and ignored."""

    num_sms: ClassVar[int | None] = None  # upper limit of a call; None: no limit

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 0,
    ) -> None:
        if low_latency_mode:
            self.low_latency_dispatch()
        self.group = group
        self.group_size = dist.get_world_size(group)

    @classmethod
    def set_num_sms(cls, num_sms: int) -> None:
        """Bound the SMs of all later calls."""
        cls.num_sms = num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event behind the current stream's work."""
        on_gpu = torch.cuda.is_available()
        return EventOverlap(torch.cuda.current_stream().record_event() if on_gpu else None)

    def low_latency_dispatch(self, *_: object, **__: object) -> NoReturn:
        """Raise UnsupportedInputError, as all low-latency calls do."""
        raise UnsupportedInputError(
            "DeepEP's low-latency calls are not served; call dispatch with num_worst_tokens, which never waits for the "
            "device and may be captured in CUDA graphs"
        )

    low_latency_combine = clean_low_latency_buffer = get_next_low_latency_combine_buffer = low_latency_dispatch

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous_event: EventOverlap | None = None
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Return (tokens for each rank, None, tokens for each expert, [T, n] whether a token goes to a rank, event)."""
        _wait(previous_event)
        named = torch.where(topk_idx >= 0, topk_idx, num_experts).long()
        flat = named.flatten()
        per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=flat.device)
        per_expert.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        ranks = torch.arange(self.group_size, dtype=torch.int64, device=flat.device)
        in_rank = (named.unsqueeze(-1) // (num_experts // self.group_size) == ranks).any(1)
        return in_rank.sum(0, dtype=torch.int32), None, per_expert[:num_experts], in_rank, self.capture()

    @torch.no_grad()
    def dispatch(
        self,
        x: Tokens,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: object = None,
        previous_event: EventOverlap | None = None,
    ) -> tuple[Tokens, torch.Tensor | None, torch.Tensor | None, list[int] | None, Handle, EventOverlap]:
        """Send tokens, [T, H] or (fp8, scales), to their experts' ranks; T may differ from rank to rank.

        Args:
            handle: of an earlier dispatch, whose ids and rows are then used again; else pass `topk_idx` and
                `num_tokens_per_expert`.
            num_worst_tokens: 0, or tokens of all ranks that there is room for.

        Returns:
            (tokens, their ids of local experts or None, their weights or None, tokens of each local expert rounded up
            to `expert_alignment`, handle, event); the list is empty with `num_worst_tokens`, and None with a handle.

        Raises:
            UnsupportedInputError: neither a handle nor ids, or no room for so many tokens.
        """
        _wait(previous_event)
        tokens, scales = x if isinstance(x, tuple) else (x, None)
        if handle is not None:
            room, ids, num_experts = len(handle.sent.topk_ids), handle.sent.topk_ids, handle.sent.num_experts
        elif topk_idx is None or num_tokens_per_expert is None:
            raise UnsupportedInputError("dispatch needs topk_idx and num_tokens_per_expert, or a handle")
        else:
            room, num_experts = num_worst_tokens // self.group_size, num_tokens_per_expert.numel()
            if not num_worst_tokens:
                most = torch.full((1,), len(tokens), dtype=torch.int32, device=tokens.device)
                room = int(all_reduce(most, op="max", group=self.group))
            ids = _filled(topk_idx, room, -1)
        weights = None if topk_weights is None else _filled(topk_weights, room, 0)
        sent = ep_dispatch(
            _filled(tokens, room, 0), ids, num_experts=num_experts, layout="tokens", topk_weights=weights,
            scales=None if scales is None else _filled(scales, room, 0), group=self.group, max_sms=self.num_sms,
        )  # fmt: skip
        rows, counts = None if handle is None else handle.rows, None
        if handle is None:
            counts = []
            if not num_worst_tokens:
                counts = [-(-count // expert_alignment) * expert_alignment for count in sent.counts.tolist()]
                rows = (sent.expert_ids >= 0).any(1).nonzero().flatten()

        def chosen(values: Any) -> Any:
            return values if rows is None or values is None else values[rows]

        received = chosen(sent.tokens) if scales is None else (chosen(sent.tokens), chosen(sent.scales))
        made = Handle(replace(sent, tokens=sent.tokens[:0]), len(tokens), rows)
        found = None if topk_idx is None else chosen(sent.expert_ids).to(topk_idx.dtype)
        return received, found, chosen(sent.weights), counts, made, self.capture()

    @torch.no_grad()
    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        config: object = None,
        previous_event: EventOverlap | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Return (sums [T, H] of the ranks' rows, plus `bias`; `topk_weights` sent back, [T, K], or None; event)."""
        _wait(previous_event)

        def combined(rows: torch.Tensor) -> torch.Tensor:
            if handle.rows is not None:
                whole = rows.new_zeros(len(handle.sent.expert_ids), rows.shape[1])
                rows = whole.index_copy_(0, handle.rows, rows)
            return ep_combine(rows, handle.sent, max_sms=self.num_sms)[: handle.num_tokens]

        y, back = combined(x), None
        if topk_weights is not None:
            here = handle.sent.expert_ids if handle.rows is None else handle.sent.expert_ids[handle.rows]
            back = combined(topk_weights.masked_fill(here < 0, 0))
        return y if bias is None else y + bias, back, self.capture()


def _wait(previous_event: EventOverlap | None) -> None:
    if previous_event is not None:
        previous_event.current_stream_wait()


def _filled(values: torch.Tensor, room: int, filler: int) -> torch.Tensor:
    """`values` with rows of `filler` behind them, `room` in all."""
    if len(values) > room:
        raise UnsupportedInputError(f"{len(values)} tokens do not fit into num_worst_tokens, {room} for each rank")
    if len(values) == room:
        return values
    bits = values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values
    return pad(bits, (0, 0) * (values.dim() - 1) + (0, room - len(values)), value=filler).view(values.dtype)
