"""Work whose time and memory a client or a checkpoint decides, in processes that bound both."""

from cluster.frontend.bounded.children import Children, ChildrenClosed, ChildrenFailed, Run
from cluster.frontend.bounded.process import Bounds, Child, TooMuch, WorkRefused
from cluster.frontend.bounded.templates import check_template, rendered
