"""Requests that wait for a replica, in the order in which they are served."""
