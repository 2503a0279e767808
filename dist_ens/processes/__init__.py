"""The processes of a run: the cluster, peers, signals, the watchdog, and the compilation cache."""
