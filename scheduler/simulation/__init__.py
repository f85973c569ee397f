"""The real scheduler in virtual time, over replicas that count tokens instead of computing them."""

from scheduler.simulation.experiment import (
    MEASURED_POOL_S as MEASURED_POOL_S,
    Experiment as Experiment,
    Figures as Figures,
    Sample as Sample,
    Setup as Setup,
)
from scheduler.simulation.hardware import (
    DEVICES as DEVICES,
    PAIRS as PAIRS,
    Roofline as Roofline,
    Times as Times,
)
from scheduler.simulation.simulated_replica import (
    SimulatedReplica as SimulatedReplica,
    reference_output as reference_output,
)
from scheduler.simulation.workload import (
    Lengths as Lengths,
    WorkloadRequest as WorkloadRequest,
    drawn as drawn,
    lognormal as lognormal,
    parse_lengths as parse_lengths,
    poisson as poisson,
    uniform as uniform,
)
from scheduler.simulation.world import FaultPlan as FaultPlan, Report as Report, World as World
