"""What must move between ranks when plan A becomes plan B.

A rank needs the blocks of its new units that it does not hold yet; nothing else moves. All replicas
hold the same bits, so any replica's owner may give; the least loaded one does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ntp_core.plan import Plan
from ntp_core.units import ModelUnits, TensorSpec, block_numel, blocks_of_units

Held = Sequence[Mapping[int, tuple[int, ...]]]
"""For each tensor of a model the blocks that each global rank holds."""


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


def held_by_plan(plan: Plan, model: ModelUnits) -> Held:
    """Every rank holds the blocks of its units; each tensor without units whole."""
    return [{g: blocks_held(plan, t, g) for g in plan.ranks} for t in model.tensors]


def moves(old: Plan, new: Plan, model: ModelUnits) -> tuple[Move, ...]:
    """The moves from `old` to `new`, in an order that is the same on every rank.

    Both plans must be over the same model; ranks only in `old` may give, ranks only in `new` get.
    """
    return moves_between(held_by_plan(old, model), held_by_plan(new, model), model)


def moves_between(old: Held, new: Held, model: ModelUnits, turn: int = 0) -> tuple[Move, ...]:
    """What each rank must get to hold `new` where `old` is held; every block must be held.

    Args:
        turn: 0 takes each block from its least loaded holder; each further turn from another one,
            as long as there is one: for a second try where bytes came damaged.
    """
    load: dict[int, int] = {}
    found: list[Move] = []
    for index, t in enumerate(model.tensors):
        num_units = 1 if t.kind is None else model.counts[t.kind]
        holders = _holders(old[index])
        for dst in sorted(new[index]):
            have = set(old[index].get(dst, ()))
            for block in new[index][dst]:
                if block in have:
                    continue
                numel = block_numel(t, num_units, block)
                ranked = sorted(holders[block], key=lambda g: (load.get(g, 0), g))
                src = ranked[turn % len(ranked)]
                load[src] = load.get(src, 0) + numel
                found.append(Move(index, block, src, dst, numel))
    return tuple(found)


def elements_lower_bound(
    old: Plan, new: Plan, model: ModelUnits, holders: Collection[int] | None = None
) -> int:
    """Elements that any change to the new shares must move, whichever units are chosen.

    A rank that goes from n to m > n units of a kind must receive m - n of them. All are of one size
    but the last, which may be smaller: it can be among them, once in a replica, unless a rank that
    loses nothing holds it already. Tensors whose blocks are shared are counted by the blocks that
    the new units cannot do without.

    Args:
        holders: ranks that hold what the old plan gave them; default: all.
    """
    total, there = 0, set(old.ranks).intersection(old.ranks if holders is None else holders)
    for t in model.tensors:
        if t.kind is None:  # newcomers need it whole
            total += t.numel * len(set(new.ranks).difference(there))
            continue
        num_units = model.counts[t.kind]
        last = num_units // t.sharing - 1
        full, short = (block_numel(t, num_units, b) for b in (0, last))
        for r in new.replicas:
            gained, is_last_kept = 0, False
            for dst in r.ranks:
                have = blocks_held(old, t, dst) if dst in there else ()
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


def _holders(held: Mapping[int, tuple[int, ...]]) -> dict[int, list[int]]:
    holders: dict[int, list[int]] = {}
    for g in sorted(held):
        for block in held[g]:
            holders.setdefault(block, []).append(g)
    return holders
