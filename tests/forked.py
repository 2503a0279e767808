"""Runs `dist-ens` commands, each in a process that is forked from this one, which has imported what
they need.

Standard input has a command a line, as JSON: its `words` after `dist-ens`, its `xla_flags`, and its
two output `streams`, names of files in a `folder` or one of the words below. Standard output has
the exit codes.
"""

import gc
import json
import os
import pathlib
import signal
import sys

LIMIT_SECS = 300
CLOSED = "closed"  # a stream that is not open
NOBODY = "nobody"  # a pipe whose reader is gone


def opened(stream, folder):
    """The descriptor of a stream; None for one that is not open."""
    if stream == CLOSED:
        return None
    if stream == NOBODY:
        reads, writes = os.pipe()
        os.close(reads)
        return writes
    return os.open(folder / stream, os.O_WRONLY | os.O_CREAT)


def main():
    import dist_ens.bench
    import dist_ens.evaluation.calibration
    import dist_ens.experiment.assess
    import dist_ens.experiment.train  # noqa: F401
    import launch

    gc.freeze()  # what is never collected is never copied
    for line in sys.stdin:
        command = json.loads(line)
        child = os.fork()
        if not child:
            signal.alarm(LIMIT_SECS)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            folder = pathlib.Path(command["folder"])
            descriptors = [opened(stream, folder) for stream in command["streams"]]
            for number, descriptor in enumerate(
                descriptors, 1
            ):  # none is opened once one is closed
                os.close(number) if descriptor is None else os.dup2(descriptor, number)
            os.environ["XLA_FLAGS"] = command["xla_flags"]  # read when a backend starts
            sys.argv = ["dist-ens", *command["words"]]
            launch.main()
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
