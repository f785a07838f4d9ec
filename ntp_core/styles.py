"""How the tensors of a module are cut: a plan in words, one style for each pattern of names.

The styles are those of Hugging Face transformers' `base_model_tp_plan` (5.24), so that a model's
own plan can be used as it is, plus `replicated` to say so on purpose. A rule may name the units
that cut its tensors: "colwise:mlp", "colwise:attention:4" (4 units, e.g. query heads, share one
block).

This module knows names and numbers only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ntp_core.errors import ModelMismatch
from ntp_core.units import UnitKind


class Style(StrEnum):
    """What is cut and what is summed.

    COLWISE: outputs are cut; the input's gradient is summed over the replica.
    ROWWISE: inputs are cut; the output is summed over the replica, then the bias is added.
    PACKED_COLWISE: like COLWISE for stacked parts (gate and up; query, key and value).
    REPLICATED_WITH_GRAD_ALLREDUCE: whole on every rank, each rank's gradient covers its own units.
    MOE_TP_EXPERTS: a module of experts whose columns are cut; its output is summed.
    EMBEDDING_ROWWISE: vocab rows are cut.
    COLWISE_GATHER_OUTPUT: outputs are cut, and the whole output is put together afterwards.
    REPLICATED: whole on every rank, with the same gradient on each.
    """

    COLWISE = "colwise"
    ROWWISE = "rowwise"
    PACKED_COLWISE = "packed_colwise"
    REPLICATED_WITH_GRAD_ALLREDUCE = "replicated_with_grad_allreduce"
    MOE_TP_EXPERTS = "moe_tp_experts"
    EMBEDDING_ROWWISE = "embedding_rowwise"
    COLWISE_GATHER_OUTPUT = "colwise_gather_output"
    REPLICATED = "replicated"

    @property
    def is_cut(self) -> bool:
        """Whether units cut the tensor."""
        return self not in (
            Style.REPLICATED,
            Style.REPLICATED_WITH_GRAD_ALLREDUCE,
            Style.MOE_TP_EXPERTS,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of a plan in words.

    Attributes:
        pattern: dotted name of modules or parameters; `*` stands for one number.
        kind: the units that cut them, None where nothing is cut.
        sharing: units that use the same block.
    """

    pattern: str
    style: Style
    kind: UnitKind | None = None
    sharing: int = 1

    def matches(self, name: str) -> bool:
        """Whether the rule is for the module or parameter of that name."""
        text = re.escape(self.pattern).replace(r"\*", r"\d+")
        return re.fullmatch(text, name) is not None


def parse_rules(plan: Mapping[str, str]) -> tuple[Rule, ...]:
    """Rules from a dict such as {"layers.*.mlp.up_proj": "colwise:mlp"}.

    A cut without a unit kind is given one by the words in its name.

    Raises:
        ModelMismatch: for an unknown style, unit kind, or a name that tells no kind.
    """
    return tuple(_parse(pattern, text) for pattern, text in plan.items())


def kind_by_name(name: str) -> UnitKind | None:
    """The unit kind that the usual words in a name tell, or None.

    >>> kind_by_name("model.layers.*.mlp.experts.down_proj")
    <UnitKind.EXPERT: 'expert'>
    """
    words = (
        (UnitKind.EXPERT, ("expert",)),
        (UnitKind.ATTENTION, ("attn", "attention")),
        (UnitKind.MLP, ("mlp", "ffn", "feed_forward")),
        (UnitKind.VOCAB, ("embed", "lm_head", "wte", "vocab", "output")),
    )
    for kind, hints in words:
        if any(hint in name for hint in hints):
            return kind
    return None


def rule_for(name: str, rules: tuple[Rule, ...]) -> Rule | None:
    """The rule for a parameter: one of its own name, else one of its module; the last one wins."""
    for wanted in (name, name.rpartition(".")[0]):
        for rule in reversed(rules):
            if rule.matches(wanted):
                return rule
    return None


def _parse(pattern: str, text: str) -> Rule:
    words = str(text).split(":")
    try:
        style = Style(words[0])
    except ValueError:
        known = ", ".join(Style)
        raise ModelMismatch(
            f"style '{words[0]}' of '{pattern}' is not known; the styles are {known}"
        ) from None
    try:
        kind = UnitKind(words[1]) if len(words) > 1 else kind_by_name(pattern)
        sharing = int(words[2]) if len(words) > 2 else 1
    except ValueError as error:
        raise ModelMismatch(f"rule '{text}' of '{pattern}': {error}") from None
    if not style.is_cut:
        return Rule(pattern=pattern, style=style)
    if kind is None or sharing < 1:
        raise ModelMismatch(
            f"rule '{text}' of '{pattern}' does not say which units cut it; "
            f"write '{words[0]}:KIND' with one of {', '.join(UnitKind)}"
        )
    return Rule(pattern=pattern, style=style, kind=kind, sharing=sharing)
