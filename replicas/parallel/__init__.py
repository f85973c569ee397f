"""One replica on several devices: tensor parallelism, and the ranks that compute together."""

from replicas.parallel.parallel_replica import ParallelReplica, follow, load_parallel, load_replica
from replicas.parallel.ranks import RankHandle, ReplicaBroken
from replicas.parallel.rendezvous import LOOPBACK
