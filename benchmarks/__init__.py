"""What dist_ens costs and gains; run like its commands."""

import launch  # noqa: F401  asks for huge pages as they do
