"""The gRPC client: continues broken streams and repeats broken calls."""

from cluster.client.channel import Tls
from cluster.client.client import AsyncClient, Client
from cluster.client.core import NotReady
from cluster.client.retry import NO_RETRY, RetryPolicy
