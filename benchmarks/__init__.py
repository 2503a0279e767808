"""What dist_ens costs and gains; run like its commands."""

import launch  # noqa: F401  asks the C library for what they ask
