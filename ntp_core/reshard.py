"""What must move between ranks when plan A becomes plan B.

A rank needs the blocks of its new units that it does not hold yet; nothing else moves. All replicas
hold the same bits, so any replica's owner may give; the least loaded one does.
"""

from __future__ import annotations

from dataclasses import dataclass

from ntp_core.plan import Plan
from ntp_core.units import ModelUnits, TensorSpec, block_numel, blocks_of_units


@dataclass(frozen=True, slots=True)
class Move:
    """One block of one tensor goes from global rank `src` to `dst`; `numel` elements."""

    tensor: int
    block: int
    src: int
    dst: int
    numel: int


def blocks_held(plan: Plan, tensor: TensorSpec, global_rank: int) -> tuple[int, ...]:
    """Blocks of a tensor that a rank holds under a plan; a whole tensor is one block, 0."""
    if tensor.kind is None:
        return (0,)
    replica, tp_rank = plan.place(global_rank)
    layout = plan.replicas[replica].layout(tensor.kind, tensor.layer)
    return blocks_of_units(tensor, layout.units(tp_rank))


def moves(old: Plan, new: Plan, model: ModelUnits) -> tuple[Move, ...]:
    """The moves from `old` to `new`, in an order that is the same on every rank.

    Both plans must be over the same model; ranks only in `old` may give, ranks only in `new` get.
    """
    load = dict.fromkeys(old.ranks, 0)
    found: list[Move] = []
    for index, t in enumerate(model.tensors):
        if t.kind is None:
            continue
        holders = _holders(old, t)
        for dst in new.ranks:
            have = set(blocks_held(old, t, dst)) if dst in load else set()
            for block in blocks_held(new, t, dst):
                if block in have:
                    continue
                numel = block_numel(t, model.counts[t.kind], block)
                src = min(holders[block], key=lambda g: (load[g], g))
                load[src] += numel
                found.append(Move(index, block, src, dst, numel))
    return tuple(found)


def elements_lower_bound(old: Plan, new: Plan, model: ModelUnits) -> int:
    """Elements that any change to the new shares must move, whichever units are chosen.

    A rank that goes from n to m > n units of a kind must receive m - n of them. All are of one size
    but the last, which may be smaller: it can be among them, once in a replica, unless a rank that
    loses nothing holds it already. Tensors whose blocks are shared are counted by the blocks that
    the new units cannot do without.
    """
    total = 0
    for t in model.tensors:
        if t.kind is None:
            continue
        num_units = model.counts[t.kind]
        last = num_units // t.sharing - 1
        full, short = (block_numel(t, num_units, b) for b in (0, last))
        for r in new.replicas:
            gained, is_last_kept = 0, False
            for dst in r.ranks:
                have = blocks_held(old, t, dst) if dst in old.ranks else ()
                need = -(-_share(new, t, dst) // t.sharing)
                gained += max(0, need - len(have))
                is_last_kept = is_last_kept or (last in have and need >= len(have))
            if t.sharing > 1:  # several ranks may get a copy of the last block
                total += gained * short
            elif gained:
                total += gained * full - (0 if is_last_kept else full - short)
    return total


def _share(plan: Plan, t: TensorSpec, global_rank: int) -> int:
    assert t.kind is not None
    replica, tp_rank = plan.place(global_rank)
    return plan.replicas[replica].layout(t.kind, t.layer).shares[tp_rank]


def _holders(plan: Plan, t: TensorSpec) -> dict[int, list[int]]:
    holders: dict[int, list[int]] = {}
    for g in plan.ranks:
        for block in blocks_held(plan, t, g):
            holders.setdefault(block, []).append(g)
    return holders
