"""The real scheduler in virtual time, over replicas that count tokens instead of computing them."""

from scheduler.simulation.experiment import MEASURED_POOL_S, Experiment, Figures, Sample, Setup
from scheduler.simulation.hardware import DEVICES, PAIRS, Decoder, Roofline, Times, joined
from scheduler.simulation.simulated_replica import SimulatedReplica, reference_output
from scheduler.simulation.workload import (
    Lengths,
    WorkloadRequest,
    drawn,
    lognormal,
    parse_lengths,
    poisson,
    uniform,
)
from scheduler.simulation.world import FaultPlan, Report, World
