"""Any `torch.nn.Module` over uneven ranks, by a plan in words.

    rules = {"layers.*.up": "colwise:mlp", "layers.*.down": "rowwise:mlp"}
    model = parallelize(module, plan, rules, comm)

The module comes in whole, with the same weights on every rank (or on the meta device, to be filled
from a checkpoint), and is cut in place: parameters keep their identity and names, `forward` of cut
modules is wrapped (see `wrap` beside this). All checks come before anything is changed and before
any process group is created, and all ranks agree on them (`accord`), so that a misfit on one rank
raises the same error on every rank, and nothing hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from ntp_core.errors import ModelMismatch, PlanError
from ntp_core.plan import Plan
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.layers import TensorParallelGroup
from ntp_core.runtime.modules.accord import in_accord
from ntp_core.runtime.modules.wrap import (
    Forward,
    InputCopies,
    colwise,
    embedding,
    experts,
    gathered,
    is_conv1d,
    refuse,
    rowwise,
)
from ntp_core.runtime.shards import Shard, Shards, shards_of
from ntp_core.styles import Rule, Style, parse_rules, rule_for
from ntp_core.units import ModelUnits, TensorSpec, UnitKind, block_slices

PACKED_PARTS = 2
OnPlan = Callable[["ParallelModule"], None]
Rules = Mapping[str, str] | Callable[[], Mapping[str, str]]
_DRAWS = ("attention_dropout", "jitter_noise")


class ParallelModule:
    """A module cut over one replica's ranks; satisfies `ParallelModel`."""

    def __init__(
        self,
        module: nn.Module,
        units: ModelUnits,
        plan: Plan,
        group: TensorParallelGroup,
        rank: int,
        on_plan: Sequence[OnPlan] = (),
    ) -> None:
        self.module = module
        self.units = units
        self.group = group
        self._on_plan = tuple(on_plan)
        self._rows: dict[tuple[str, str], torch.Tensor] = {}
        params = dict(module.named_parameters())
        for shard in shards_of(units, plan, rank):
            param = params[shard.spec.name]
            param.data = cut(shard, param.data)
        self.shards = Shards(units, plan, rank, params)
        self._refresh()

    def adopt(self, plan: Plan, tensors: list[torch.Tensor]) -> None:
        """Take the local tensors of a new plan, and the group of this rank's replica in it."""
        self.shards.adopt(plan, tensors)
        self.group.ranks = plan.replicas[plan.place(self.shards.rank)[0]].ranks
        self._refresh()

    def shard(self, name: str) -> Shard:
        """The shard of the parameter of that name."""
        for s in self.shards.shards:
            if s.spec.name == name:
                return s
        raise ModelMismatch(f"no parameter '{name}' in this model")

    def columns(self, name: str) -> torch.Tensor:
        """Logical index of each local row of a parameter, int64."""
        return self._lookup("columns", name)

    def rows(self, name: str) -> torch.Tensor:
        """Logical index -> local row of a parameter, -1 where another rank holds it, int64."""
        return self._lookup("rows", name)

    def _lookup(self, what: str, name: str) -> torch.Tensor:
        key = (what, name)
        if key not in self._rows:
            shard = self.shard(name)
            columns = shard.logical_index()
            rows = torch.full((shard.spec.shape[shard.spec.dim],), -1, dtype=torch.int64)
            rows[columns] = torch.arange(len(columns))
            self._rows["columns", name], self._rows["rows", name] = columns, rows
        return self._rows[key]

    def _refresh(self) -> None:
        self._rows.clear()
        for tell in self._on_plan:
            tell(self)


def parallelize(
    module: nn.Module,
    plan: Plan,
    rules: Rules,
    comm: Comm,
    on_plan: Sequence[OnPlan] = (),
) -> ParallelModule:
    """Cut a module in place for this rank of a plan. Every rank of the world takes part.

    Args:
        module: whole, the same on every rank.
        plan: its counts are the numbers of units.
        rules: name pattern -> style (see `ntp_core.styles`); parameters of two dims and more need
            one, those of one dim without a rule are held whole. Or what gives them, to be called
            among the checks.
        on_plan: called now and after every change of plan, for attributes that follow local sizes.

    Raises:
        ModelMismatch: naming the tensor and what to do; the same on every rank, also when only one
            of them was given something else. The module is as it was.
        PlanError: when the plan has no place for this rank, or for the job's ranks.
    """
    parsed, units = in_accord(comm, lambda: _checked(module, plan, rules, comm))
    group = TensorParallelGroup(comm, plan.replicas[plan.place(comm.rank)[0]].ranks)
    model = ParallelModule(module, units, plan, group, comm.rank, on_plan)
    _wrap_all(model, parsed)
    return model


def _checked(
    module: nn.Module, plan: Plan, rules: Rules, comm: Comm
) -> tuple[tuple[tuple[Rule, ...], ModelUnits], dict[str, object]]:
    """Rules and units, and what must be the same on every rank; nothing is changed."""
    if plan.ranks != comm.world:
        raise PlanError(
            f"the plan places ranks {list(plan.ranks)}, the job has {len(comm.world)} ranks. "
            "Start as many ranks as the plan places."
        )
    given = rules() if callable(rules) else rules
    parsed = parse_rules(given)
    units = units_of(module, parsed, plan.counts)
    plan.check_model(units)
    for kind in plan.counts:
        if all(t.kind is not kind for t in units.tensors):
            raise ModelMismatch(
                f"the plan counts {plan.counts[kind]} {kind} units, which cut no tensor of this "
                f"{type(module).__name__}. Leave the kind out of the plan, or give a rule."
            )
    for name, part in module.named_modules():
        _check_draws(name, part)
        rule = _rule_of_module(name, parsed)
        if rule is not None and not _fits(part, rule.style):
            raise refuse(part, name, rule.style)
    same: dict[str, object] = {"the plan": plan.to_json(), "rules": dict(given)}
    same |= {f"tensor '{t['name']}'": t for t in units.to_json()["tensors"]}
    return (parsed, units), same


def _check_draws(name: str, module: nn.Module) -> None:
    """Torch's own random numbers are each rank's: what they drop is not the same on all ranks."""
    rates = {a: getattr(module, a, 0) for a in _DRAWS}
    if isinstance(module, nn.modules.dropout._DropoutNd):
        rates["p"] = module.p
    for what, rate in rates.items():
        if isinstance(rate, float) and rate > 0:
            raise ModelMismatch(
                f"'{name}' draws random numbers ({what} = {rate}), each rank its own, so that "
                "ranks would compute different things. Set it to 0, or use UnitDropout instead."
            )


def units_of(
    module: nn.Module, rules: Iterable[Rule], counts: Mapping[UnitKind, int]
) -> ModelUnits:
    """The module's tensors and how units cut them. Tied weights appear once.

    Raises:
        ModelMismatch: for a tensor without a rule, or one that does not fit its rule.
    """
    rules = tuple(rules)
    modules = dict(module.named_modules())
    specs = []
    for name, param in module.named_parameters():
        rule = rule_for(name, rules)
        if rule is None and param.dim() > 1:
            raise ModelMismatch(
                f"no rule for '{name}' of shape {tuple(param.shape)}; give one, for example "
                f"{{'{name.rpartition('.')[0]}': 'replicated'}}"
            )
        owner = modules[name.rpartition(".")[0]]
        specs.append(_spec(name, param, rule, owner))
    size = next((p.element_size() for p in module.parameters()), 4)
    return ModelUnits(counts=dict(counts), tensors=tuple(specs), dtype_bytes=size)


def cut(shard: Shard, whole: torch.Tensor) -> torch.Tensor:
    """This rank's blocks of a whole tensor, put together."""
    spec = shard.spec
    if spec.kind is None:
        return whole
    ends = [block_slices(spec, shard.num_units, b) for b in shard.blocks]
    pieces = [
        whole.narrow(spec.dim, block[p][0], block[p][1] - block[p][0])
        for p in range(spec.parts)
        for block in ends
    ]
    if not pieces:
        return whole.new_empty(shard.shape)
    return torch.cat(pieces, dim=spec.dim)


def _spec(name: str, param: nn.Parameter, rule: Rule | None, owner: nn.Module) -> TensorSpec:
    shape, layer = tuple(param.shape), _layer(name)
    if rule is None or rule.style in (Style.REPLICATED, Style.MOE_TP_EXPERTS):
        return TensorSpec(name=name, shape=shape, layer=layer)
    if rule.style is Style.REPLICATED_WITH_GRAD_ALLREDUCE:
        return TensorSpec(name=name, shape=shape, layer=layer, partial_grad=True)
    is_bias = param.dim() == 1
    if rule.style is Style.ROWWISE and is_bias:  # added once, after the sum
        return TensorSpec(name=name, shape=shape, layer=layer)
    return TensorSpec(
        name=name,
        shape=shape,
        kind=rule.kind,
        layer=layer,
        dim=0 if is_bias else _cut_dim(name, param, rule, owner),
        parts=_parts(name, rule, owner),
        sharing=rule.sharing,
    )


def _cut_dim(name: str, param: nn.Parameter, rule: Rule, owner: nn.Module) -> int:
    """Outputs come before inputs in nn.Linear and in expert parameters, after them in Conv1D."""
    if rule.style is Style.EMBEDDING_ROWWISE:
        return 0
    outputs_first = not is_conv1d(owner)
    last = param.dim() - 1
    if rule.style is Style.ROWWISE:
        return last if outputs_first else last - 1
    return last - 1 if outputs_first else last


def _parts(name: str, rule: Rule, owner: nn.Module) -> int:
    if rule.style is not Style.PACKED_COLWISE:
        return 1
    fused = getattr(owner, "packed_parts", None)
    return int(fused) if fused is not None else PACKED_PARTS


def _layer(name: str) -> int:
    """The first number in a dotted name, -1 without one."""
    return next((int(word) for word in name.split(".") if word.isdigit()), -1)


def _wrap_all(model: ParallelModule, rules: tuple[Rule, ...]) -> None:
    copies = InputCopies(model.group)
    for name, module in model.module.named_modules():
        rule = _rule_of_module(name, rules)
        if rule is not None:
            _wrap(model, name, module, rule.style, copies)


def _rule_of_module(name: str, rules: tuple[Rule, ...]) -> Rule | None:
    return next((r for r in reversed(rules) if r.matches(name)), None)


def _fits(module: nn.Module, style: Style) -> bool:
    """Whether `_forward` knows what to do."""
    is_linear = isinstance(module, nn.Linear) or is_conv1d(module)
    match style:
        case Style.REPLICATED | Style.REPLICATED_WITH_GRAD_ALLREDUCE | Style.MOE_TP_EXPERTS:
            return True
        case Style.EMBEDDING_ROWWISE:
            return isinstance(module, nn.Embedding)
        case _:
            return is_linear


def _wrap(
    model: ParallelModule, name: str, module: nn.Module, style: Style, copies: InputCopies
) -> None:
    if style not in (Style.REPLICATED, Style.REPLICATED_WITH_GRAD_ALLREDUCE):
        # On the instance: the class and its other instances stay as they are.
        module.__dict__["forward"] = _forward(model, name, module, style, copies)


def _forward(
    model: ParallelModule, name: str, module: nn.Module, style: Style, copies: InputCopies
) -> Forward:
    is_linear = isinstance(module, nn.Linear) or is_conv1d(module)
    match style:
        case Style.MOE_TP_EXPERTS:
            return experts(module, model.group, copies)
        case Style.EMBEDDING_ROWWISE if isinstance(module, nn.Embedding):
            return embedding(module, model.group, lambda: model.rows(f"{name}.weight"))
        case Style.COLWISE | Style.PACKED_COLWISE if is_linear:
            return colwise(module, copies)
        case Style.ROWWISE if is_linear:
            return rowwise(module, model.group)
        case Style.COLWISE_GATHER_OUTPUT if is_linear:
            weight = model_name(model, module)
            width = model.shard(weight).spec.shape[0]
            return gathered(module, copies, model.group, lambda: model.columns(weight), width)
        case _:  # `_fits` came before
            raise refuse(module, name, style)


def model_name(model: ParallelModule, module: nn.Module) -> str:
    """Name of a module's weight in the units: a tied weight goes by its first name."""
    for shard, param in model.shards:
        if param is module.weight:
            return shard.spec.name
    raise ModelMismatch(f"{type(module).__name__} has no weight that is part of the model")
