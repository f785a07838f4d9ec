"""Hooks into torch for jobs that do not use our engine. The only file here that touches torch.

Importing this module imports no torch; `TorchHooks.arm` needs it loaded already. Used are torch's
official global optimizer step hooks; the functions of `torch.distributed`,
`torch.autograd.backward`, `GradScaler.scale`, `torch.save` and the data loader's `__next__` are
wrapped. Not used, because of their cost or because they take the user's place: module hooks, DDP
communication hooks, tensor modes.

Each hook swallows its own errors and switches itself off after `MAX_ERRORS` of them. What
distributed data parallel does in C++ passes no Python function and stays unseen: its waiting time
counts as backward. A collective started with `async_op=True` is timed until the call returns.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol
from weakref import ref

from ntp_core.observe import Op
from sidecar.probe.steps import StepMeter
from sidecar.probe.writer import ProbeObserver

MAX_ERRORS = 8
LOSS_EVERY_STEPS = 16  # on an accelerator the loss is copied without waiting, this often

# name -> operation, and the parameter that holds what this rank hands in
COLLECTIVES: dict[str, tuple[Op, str]] = {
    "all_reduce": (Op.ALL_REDUCE, "tensor"),
    "all_gather": (Op.ALL_GATHER, "tensor"),
    "all_gather_into_tensor": (Op.ALL_GATHER, "input_tensor"),
    "all_gather_single": (Op.ALL_GATHER, "input_tensor"),
    "all_gather_object": (Op.ALL_GATHER, ""),
    "reduce_scatter": (Op.REDUCE_SCATTER, "input_list"),
    "reduce_scatter_tensor": (Op.REDUCE_SCATTER, "input"),
    "reduce_scatter_single": (Op.REDUCE_SCATTER, "input"),
    "broadcast": (Op.BROADCAST, "tensor"),
    "broadcast_object_list": (Op.BROADCAST, ""),
    "all_to_all": (Op.ALL_TO_ALL, "input_tensor_list"),
    "all_to_all_single": (Op.ALL_TO_ALL, "input"),
    "barrier": (Op.BARRIER, ""),
    "reduce": (Op.OTHER, "tensor"),
    "gather": (Op.OTHER, "tensor"),
    "scatter": (Op.OTHER, "tensor"),
    "send": (Op.SEND_RECV, "tensor"),
    "recv": (Op.SEND_RECV, "tensor"),
    "isend": (Op.SEND_RECV, "tensor"),
    "irecv": (Op.SEND_RECV, "tensor"),
}
_SEND_RECV_BIT = 1 << 30  # sends and receives are numbered apart: their ranks do not march in step


class HostProcess(Protocol):
    """What the hooks need to know of the process they live in."""

    def observer_for_hooks(self) -> ProbeObserver | None:
        """The probe to write to; None while this process is no rank, or its job reports itself."""

    def become_rank(self, global_rank: int, world_size: int, local_rank: int) -> None:
        """A process group was set up here."""

    def become_lone_rank(self) -> None:
        """An optimizer steps here and there is no process group."""


class _Collective(NamedTuple):
    op: int
    group: int
    seq: int
    begin_ns: int


class Hook:
    """One hook's body: an error in it never reaches the job, several switch it off."""

    __slots__ = ("_body", "errors", "first_error")

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = body
        self.errors = 0
        self.first_error = ""

    def __call__(self, *args: Any) -> Any:
        if self.errors >= MAX_ERRORS:
            return None
        try:
            return self._body(*args)
        except Exception:
            if not self.errors:
                self.first_error = traceback.format_exc()
            self.errors += 1
            return None


class TorchHooks:
    """All hooks of one process. `arm` once, after torch was imported."""

    def __init__(self, host: HostProcess) -> None:
        self._host = host
        self._meter: StepMeter | None = None
        self._metered: ProbeObserver | None = None
        self._lead: ref[Any] | None = None
        self._optimizer_begin_ns = 0
        self._seqs: dict[int, int] = {}
        self._unscaled: Any = None
        self._loss = LossReader()
        self._since_ns = 0  # where step 1 begins
        self.is_armed = False
        self.hooks: dict[str, Hook] = {}

    def _hook(self, name: str, body: Callable[..., Any]) -> Hook:
        return self.hooks.setdefault(name, Hook(body))

    def arm(self) -> None:
        """Install everything. Does nothing the second time, or while torch is not loaded."""
        torch = sys.modules.get("torch")
        if self.is_armed or torch is None:
            return
        self.is_armed = True
        self._since_ns = time.monotonic_ns()
        self._hook("arm optimizer", self._arm_optimizer)()
        self._hook("arm distributed", self._arm_distributed)(torch)
        self._hook("arm backward", self._arm_backward)(torch)
        self._hook("arm data", self._arm_data)()
        self._hook("arm save", self._arm_save)(torch)

    def _observer(self) -> ProbeObserver | None:
        """The probe, with a step meter ready for it."""
        observer = self._host.observer_for_hooks()
        if observer is not self._metered:
            self._metered = observer
            self._meter = None
            if observer is not None:
                self._meter = StepMeter(observer, self._since_ns)
        return observer

    # -- optimizer

    def _arm_optimizer(self) -> None:
        from torch.optim.optimizer import (  # torch is optional: loaded only where it is already
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        before = self._hook("optimizer begin", self._before_step)
        after = self._hook("optimizer end", self._after_step)

        def pre_hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            before(optimizer)

        def post_hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            after(optimizer)

        register_optimizer_step_pre_hook(pre_hook)
        register_optimizer_step_post_hook(post_hook)

    def _before_step(self, optimizer: Any) -> None:
        if self._host.observer_for_hooks() is None:
            self._host.become_lone_rank()
        if self._observer() is None:
            return
        if self._lead is None or self._lead() is None:
            self._lead = ref(optimizer)
        if self._lead() is optimizer:
            self._optimizer_begin_ns = time.monotonic_ns()

    def _after_step(self, optimizer: Any) -> None:
        observer, meter = self._observer(), self._meter
        if observer is None or meter is None or self._lead is None:
            return
        if self._lead() is optimizer:
            now_ns = time.monotonic_ns()
            meter.optimizer(self._optimizer_begin_ns, now_ns)
            meter.loss = self._loss.newest()
            meter.end(observer, now_ns)

    # -- torch.distributed

    def _arm_distributed(self, torch: Any) -> None:
        dist = getattr(torch, "distributed", None)
        if dist is None or not dist.is_available():
            return
        self._wrap_init(dist)
        for name, (op, argument) in COLLECTIVES.items():
            original = getattr(dist, name, None)
            if original is not None:
                setattr(dist, name, self._wrap_collective(dist, original, op, argument))

    def _wrap_init(self, dist: Any) -> None:
        original = dist.init_process_group
        joined = self._hook("init_process_group", self._joined)

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            joined(dist)
            return result

        dist.init_process_group = init_process_group
        dist.distributed_c10d.init_process_group = init_process_group

    def _joined(self, dist: Any) -> None:
        local_rank = os.environ.get("LOCAL_RANK", "")
        local = int(local_rank) if local_rank.isdigit() else -1
        self._since_ns = time.monotonic_ns()
        self._host.become_rank(dist.get_rank(), dist.get_world_size(), local)
        self._observer()

    def _wrap_collective(
        self, dist: Any, original: Callable[..., Any], op: Op, argument: str
    ) -> Callable[..., Any]:
        parameters = list(inspect.signature(original).parameters)
        group_at = parameters.index("group") if "group" in parameters else len(parameters)
        input_at = parameters.index(argument) if argument in parameters else -1
        begin = self._hook(f"{original.__name__} begin", self._enter)
        end = self._hook(f"{original.__name__} end", self._leave)
        is_compiling = _dynamo_test()

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # the compiler knows the original function and must meet it
                return original(*args, **kwargs)
            group = args[group_at] if len(args) > group_at else kwargs.get("group")
            data = None
            if input_at >= 0:
                data = args[input_at] if len(args) > input_at else kwargs.get(argument)
            entered = begin(dist, op, group, data)
            try:
                return original(*args, **kwargs)
            finally:
                if entered is not None:
                    end(entered)

        return collective

    def _enter(self, dist: Any, op: Op, group: Any, data: Any) -> _Collective | None:
        observer = self._observer()
        if observer is None or group is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        number = _group_number(dist, group)
        if op == Op.SEND_RECV:
            number |= _SEND_RECV_BIT
        seq = self._seqs.get(number, 0) + 1
        self._seqs[number] = seq
        observer.collective_begin(int(op), number, seq, _num_bytes(data))
        return _Collective(int(op), number, seq, time.monotonic_ns())

    def _leave(self, entered: _Collective) -> None:
        observer, meter = self._observer(), self._meter
        if observer is None or meter is None:
            return
        duration_ns = time.monotonic_ns() - entered.begin_ns
        meter.collective(duration_ns)
        observer.collective_end(entered.op, entered.group, entered.seq, duration_ns)

    # -- backward and loss

    def _arm_backward(self, torch: Any) -> None:
        original = torch.autograd.backward
        begin = self._hook("backward begin", self._before_backward)
        end = self._hook("backward end", self._after_backward)

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            started = begin()
            result = original(tensors, *args, **kwargs)
            if started is not None:
                end(started, tensors)
            return result

        torch.autograd.backward = backward
        self._arm_scaler(torch)

    def _arm_scaler(self, torch: Any) -> None:
        """Remember the loss before a gradient scaler multiplies it."""
        scaler = torch.amp.GradScaler
        original = scaler.scale
        keep = self._hook("scale", self._keep_unscaled)

        @functools.wraps(original)
        def scale(this: Any, outputs: Any) -> Any:
            keep(outputs)
            return original(this, outputs)

        scaler.scale = scale

    def _keep_unscaled(self, outputs: Any) -> None:
        self._unscaled = outputs.detach() if hasattr(outputs, "detach") else None

    def _before_backward(self) -> tuple[int, int] | None:
        if self._observer() is None or self._meter is None:
            return None
        return time.monotonic_ns(), self._meter.collective_ns

    def _after_backward(self, started: tuple[int, int], tensors: Any) -> None:
        meter = self._meter
        if meter is None:
            return
        begin_ns, collective_before_ns = started
        end_ns = time.monotonic_ns()
        meter.backward(begin_ns, end_ns, max(0, meter.collective_ns - collective_before_ns))
        root = self._unscaled if self._unscaled is not None else tensors
        self._unscaled = None
        self._loss.take(root, meter.step)

    # -- data loader

    def _arm_data(self) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter  # as above

        original = _BaseDataLoaderIter.__next__
        done = self._hook("data", self._got_batch)

        @functools.wraps(original)
        def __next__(this: Any) -> Any:  # noqa: N807 - it takes the place of that method
            begin_ns = time.monotonic_ns()
            batch = original(this)
            done(begin_ns)
            return batch

        setattr(_BaseDataLoaderIter, "__next__", __next__)  # noqa: B010 - mypy refuses the plain form

    def _got_batch(self, begin_ns: int) -> None:
        if self._observer() is not None and self._meter is not None:
            self._meter.data(begin_ns, time.monotonic_ns())

    # -- checkpoints

    def _arm_save(self, torch: Any) -> None:
        original = torch.save
        begin = self._hook("save begin", self._before_save)
        end = self._hook("save end", self._after_save)

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            begin_ns = begin()
            try:
                return original(*args, **kwargs)
            finally:
                if begin_ns is not None:
                    end(begin_ns)

        torch.save = torch.serialization.save = save

    def _before_save(self) -> int | None:
        observer = self._observer()
        if observer is None:
            return None
        observer.save_begin()
        return time.monotonic_ns()

    def _after_save(self, begin_ns: int) -> None:
        observer = self._observer()
        if observer is not None:
            observer.save_end(time.monotonic_ns() - begin_ns)


class LossReader:
    """Reads the loss without ever waiting for an accelerator.

    On the CPU the value is there. Elsewhere it is copied to pinned memory behind the work already
    queued, every `LOSS_EVERY_STEPS` steps, and picked up at a later step, once the copy is over.
    """

    def __init__(self) -> None:
        self._value = math.nan
        self._pinned: Any = None
        self._copied: Any = None
        self._next_step = 1

    def take(self, root: Any, step: int) -> None:
        """Note the root of a backward pass; anything but one number is no loss."""
        tensor = root[0] if isinstance(root, (list, tuple)) and root else root
        if not hasattr(tensor, "numel") or tensor.numel() != 1:
            return
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            self._value = float(tensor)
        elif tensor.device.type == "cuda" and self._copied is None and step >= self._next_step:
            self._next_step = step + LOSS_EVERY_STEPS
            self._copy(tensor)

    def _copy(self, tensor: Any) -> None:
        torch = sys.modules["torch"]
        if self._pinned is None:
            self._pinned = torch.empty(1, dtype=torch.float32, pin_memory=True)
        self._pinned.copy_(tensor.reshape(1), non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def newest(self) -> float:
        """The newest loss known; NaN before the first."""
        if self._copied is not None and self._copied.query():
            self._copied = None
            self._value = float(self._pinned)
        return self._value


def _dynamo_test() -> Callable[[], bool]:
    """A function that tells whether torch.compile is tracing; the compiler folds it away."""
    compiler = getattr(sys.modules["torch"], "compiler", None)
    test: Callable[[], bool] | None = getattr(compiler, "is_dynamo_compiling", None)
    return test or bool


def _group_number(dist: Any, group: Any) -> int:
    """A number for a process group that is the same on all its ranks: its name's, 0 the default."""
    name = str((dist.group.WORLD if group is None else group).group_name)
    return int(name) if name.isdigit() else zlib.crc32(name.encode()) & (_SEND_RECV_BIT - 1)


def _num_bytes(data: Any) -> int:
    if data is None:
        return 0
    if isinstance(data, (list, tuple)):
        return sum(int(t.nbytes) for t in data)
    return int(data.nbytes)
