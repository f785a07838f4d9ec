"""The error tree of the engine.

    NtpError
    |-- InvalidInput (also ValueError)   the caller gave something that cannot be
    |   |-- PlanError                    a plan that is not a partition, or does not fit its job
    |   |-- ModelMismatch                a plan, a model or a world size that do not go together
    |   `-- StaleEpoch                   a message or proposal made for an older plan
    `-- JobFault                         the environment failed while the job ran
        |-- RanksDisagree                ranks stand at different steps or plans
        |-- PeerLost                     a rank is gone, or others say so: regroup without it
        |-- Fenced                       the others went on without this rank
        |-- StoreLost                    the store on which ranks meet is gone
        |-- StateLost                    no living rank holds a part of the state any more
        |-- DivergenceUnresolved         replicas differ and nothing tells which one is right
        `-- CheckpointError              a checkpoint cannot be written, or is not what was saved

Every message says what was wrong, with the values, and what to do about it.
"""

from __future__ import annotations


class NtpError(Exception):
    """Root of everything this package raises on purpose."""


class InvalidInput(NtpError, ValueError):
    """The caller's input is wrong; nothing was changed."""


class PlanError(InvalidInput):
    """A plan that is not a partition of its units, or that names ranks twice."""


class ModelMismatch(InvalidInput):
    """Plan, model and world size do not fit together."""


class StaleEpoch(InvalidInput):
    """A message or a proposal belongs to an older plan and is refused."""


class JobFault(NtpError):
    """The environment failed while the job ran."""


class RanksDisagree(JobFault):
    """Ranks stand at different steps, epochs or plans."""


class PeerLost(JobFault):
    """A collective cannot end: a peer is gone, or does not answer, or others say so."""


class Fenced(JobFault):
    """The others have gone on without this rank; what it holds is old. It may join again."""


class StoreLost(JobFault):
    """The store on which ranks meet does not answer any more; nobody can regroup."""


class StateLost(JobFault):
    """A part of parameters or optimizer state was held by lost ranks only."""


class DivergenceUnresolved(JobFault):
    """Replicas hold different bits and no evidence tells which one is right."""


class CheckpointError(JobFault):
    """A checkpoint could not be written, or is not, bit for bit, what was saved."""
