"""Work whose time and memory a client or a checkpoint decides, in processes that bound both."""

from cluster.frontend.bounded.children import ChildrenClosed, ChildrenFailed
from cluster.frontend.bounded.process import WorkRefused
from cluster.frontend.bounded.work import BoundedWork, templates_at_load
