"""How a device runs the members it holds: executions, lowerings, the lift, and their choice."""
