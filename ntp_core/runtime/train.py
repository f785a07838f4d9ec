"""One rank of a training job as a program: `python -m ntp_core.runtime.train --config job.json`.

Start it under any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun, or
`ntp_core.runtime.launch`), under Slurm or by hand: docs/launch.md. More variables are honoured:

    NTP_RANK, NTP_WORLD_SIZE, NTP_STORE
                   the rank's place and the store on which ranks meet, above all others
    NTP_OBSERVER   "module:function" that returns an `ntp_core.observe.Observer`
    NTP_INBOX      folder in which proposals and the wish to stop are left for the job
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path

import torch

from ntp_core.cost import Work
from ntp_core.errors import InvalidInput, NtpError
from ntp_core.inbound.plain_json import to_json
from ntp_core.job import ElasticConfig, JobConfig
from ntp_core.observe import NULL_OBSERVER, Observer
from ntp_core.plan import Plan
from ntp_core.planning.regroup import RegroupPolicy
from ntp_core.runtime.calibrate import measure_work
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.data import ByteText, standard_library_text
from ntp_core.runtime.elastic.loop import ElasticOptions, ElasticRank
from ntp_core.runtime.elastic.membership import Membership, Patience
from ntp_core.runtime.elastic.store import loss_told, store_outside
from ntp_core.runtime.faults import Faults
from ntp_core.runtime.inbox import NEWCOMERS, Inbox
from ntp_core.runtime.launchers.place import Place
from ntp_core.runtime.trainer import Trainer

NUM_BYTES = 256


def load_observer(name: str | None) -> Observer:
    """The observer that NTP_OBSERVER names; the one that hears nothing when it names none.

    Raises:
        InvalidInput: when the name cannot be imported.
    """
    if not name:
        return NULL_OBSERVER
    module, _, function = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"NTP_OBSERVER={name!r}: {error}; use module:function") from error
    observer: Observer = NULL_OBSERVER if made is None else made
    return observer


def run_rank(config: JobConfig, losses: Path | None = None) -> None:
    """Train as the rank that the environment names, to the end."""
    place = Place.of(os.environ)
    rank, world_size = place.rank, place.world_size
    if config.train.model.vocab < NUM_BYTES:
        raise InvalidInput(
            f"vocab = {config.train.model.vocab}: the text's tokens are bytes; give at least 256"
        )
    if config.elastic is None and config.plan.ranks != tuple(range(world_size)):
        raise InvalidInput(
            f"the plan places ranks {list(config.plan.ranks)}, WORLD_SIZE is {world_size}; "
            "start as many ranks as the plan places"
        )
    if config.elastic is None and rank >= world_size:
        raise InvalidInput(f"rank {rank} of {world_size}: give each rank its own number below")
    os.environ.update(place.variables())  # for observers, and for torch's own rendezvous
    torch.set_num_threads(1)
    text = ByteText(standard_library_text(), config.train.seq, config.train.seed)
    observer = load_observer(os.environ.get("NTP_OBSERVER"))
    folder = os.environ.get("NTP_INBOX")
    inbox = None if not folder else Path(folder)
    faults = Faults(rank, observer, folder=inbox if config.obey_faults else None)
    if config.elastic is not None:
        comm = Comm(rank, 1, observer, config.elastic.timeout_s)
        act = partial(elastic_losses, config, config.elastic)
    else:
        comm = Comm(0, 1, observer)
        if world_size > 1:
            store = store_outside(os.environ) if os.environ.get("NTP_STORE") else None
            comm = Comm.connect(rank, world_size, observer, store=store)
        act = partial(rigid_losses, config)
    try:
        kept = act(comm, text, faults, Inbox(inbox))
    finally:
        comm.close()
    if losses is not None and comm.is_leader:
        losses.write_text(to_json(kept))


def rigid_losses(
    config: JobConfig, comm: Comm, text: ByteText, faults: Faults, inbox: Inbox
) -> list[float]:
    """Train to the end; the loss of a rank ends the job."""
    work = shared_work(config, comm) if config.calibrate else None
    trainer = Trainer(config.train, config.plan, comm, text, faults, inbox, work, config.save)
    if config.save is not None and config.save.resume:
        trainer.resume()
    return [r.loss for r in trainer.train(config.steps - trainer.step)]


def elastic_losses(
    config: JobConfig,
    elastic: ElasticConfig,
    comm: Comm,
    text: ByteText,
    faults: Faults,
    inbox: Inbox,
) -> list[float]:
    """Train to the end, whatever ranks go and come."""
    patience = Patience(
        silent_s=elastic.silent_s, stopped_s=elastic.stopped_s, newcomer_s=elastic.newcomer_s
    )
    store = store_outside(os.environ)
    membership = Membership(store, comm.rank, patience)

    def control() -> int:
        return inbox.control() | (NEWCOMERS if membership.has_newcomers() else 0)

    def make(plan: Plan, work: Work | None, *, is_new: bool) -> Trainer:
        if work is None and config.calibrate:
            work = shared_work(config, comm)
        save = config.save
        return Trainer(
            config.train, plan, comm, text, faults, inbox, work, save, control, is_new=is_new
        )

    rank = ElasticRank(
        config.plan,
        config.train.model.units(),
        config.steps,
        comm,
        store,
        membership,
        make,
        ElasticOptions(policy=RegroupPolicy(least_part=elastic.least_part)),
    )
    with loss_told(os.environ):
        return rank.run()


def shared_work(config: JobConfig, comm: Comm) -> Work:
    """Work as the leader measures it while the others wait; the same on every rank."""
    data = None
    if comm.is_leader:
        r = config.plan.replicas[0]
        data = json.dumps(measure_work(config.train, len(r.ranks), r.batch).to_json()).encode()
    if len(comm.world) > 1:
        data = comm.broadcast_bytes(data, comm.world[0])
    return Work.from_json(json.loads(data or b"{}"))


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ntp_core.runtime.train", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="job config, JSON")
    parser.add_argument(
        "--losses", type=Path, help="rank 0 writes its losses here, JSON; NaN as null"
    )
    args = parser.parse_args(argv)
    try:
        run_rank(JobConfig.from_json(args.config.read_text()), args.losses)
    except (OSError, InvalidInput, UnicodeDecodeError) as error:
        sys.stderr.write(f"train: {error}\n")
        return 2
    except NtpError as error:
        sys.stderr.write(f"train: {type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.exit(code)  # looked up only now: an observer may listen to it
