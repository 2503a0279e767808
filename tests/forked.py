"""Runs `dist-ens` commands, each in a process that is forked from this one, which has imported what
they need.

Standard input has a line for each set of commands that run at the same time, as JSON. A command has
its `words` after `dist-ens`, the `environ` that is changed, the folder `cwd` in which it runs, and
its two output `streams`, names of files in a `folder` or one of the words below, and the signals
that are `ignored`. Standard output has two lines for each set: the ids of the processes, and the
exit codes when all have ended.
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
    return os.open(folder / stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def become(command):
    """Makes this process the one that runs a command."""
    import launch

    signal.alarm(LIMIT_SECS)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    folder = pathlib.Path(command["folder"])
    descriptors = [opened(stream, folder) for stream in command["streams"]]
    for number, descriptor in enumerate(descriptors, 1):  # none is opened once one is closed
        os.close(number) if descriptor is None else os.dup2(descriptor, number)
    for number in command["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.environ |= command["environ"]  # XLA reads its flags when a backend starts
    os.chdir(command["cwd"])
    sys.argv = ["dist-ens", *command["words"]]
    launch.main()


def main():
    import dist_ens.evaluation.calibration
    import dist_ens.experiment.assessment
    import dist_ens.experiment.bench
    import dist_ens.experiment.train  # noqa: F401
    import launch  # noqa: F401

    gc.freeze()  # what is never collected is never copied
    for line in sys.stdin:
        children = []
        for command in json.loads(line):
            child = os.fork()
            if not child:
                become(command)
                return
            children.append(child)
        print(json.dumps(children), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
