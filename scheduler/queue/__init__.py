"""The order in which waiting sequences are offered a place."""

from scheduler.queue.waiting import Waiting, WaitingQueue

__all__ = ["Waiting", "WaitingQueue"]
