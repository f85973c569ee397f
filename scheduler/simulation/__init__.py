"""The real scheduler in virtual time, over replicas that count tokens instead of computing them."""

from scheduler.simulation.experiment import (
    MEASURED_POOL,
    Experiment,
    Figures,
    PoolTimes,
    Sample,
    Setup,
)
from scheduler.simulation.faults import FaultPlan
from scheduler.simulation.hardware import DEVICES, PAIRS, FittedTimes, Roofline, Times
from scheduler.simulation.reference import reference_output
from scheduler.simulation.replica import SimulatedReplica
from scheduler.simulation.workload import (
    AcceptanceMix,
    Lengths,
    WorkloadRequest,
    bursts,
    drawn,
    lognormal,
    parse_acceptance,
    parse_lengths,
    poisson,
    read_trace,
    uniform,
)
from scheduler.simulation.world import Report, World

__all__ = [
    "DEVICES",
    "MEASURED_POOL",
    "PAIRS",
    "AcceptanceMix",
    "Experiment",
    "FaultPlan",
    "Figures",
    "FittedTimes",
    "Lengths",
    "PoolTimes",
    "Report",
    "Roofline",
    "Sample",
    "Setup",
    "SimulatedReplica",
    "Times",
    "World",
    "WorkloadRequest",
    "bursts",
    "drawn",
    "lognormal",
    "parse_acceptance",
    "parse_lengths",
    "poisson",
    "read_trace",
    "reference_output",
    "uniform",
]
