"""Execution of a device's members: executions, lowerings, the lift, and how one is chosen."""
