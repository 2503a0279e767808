"""The standard streams of a command; see `launch.stdio`."""

from launch.stdio import say

__all__ = ["say"]
