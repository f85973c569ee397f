"""Calls between the processes of one cluster."""
