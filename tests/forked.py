"""Commands, each in a process that is forked from one that has imported what they need.

What a process says of a bad command line is the same, but for the seconds that imports take.

python tests/forked.py FOLDER, with the command lines as JSON on standard input
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def dist_ens(command_lines, folder, environment):
    """What became of each `dist-ens` command line.

    Args:
        command_lines: The words after `dist-ens`, of each.
        folder: For what they print.
        environment: Of the processes.
    """
    folder.mkdir()
    subprocess.run(
        [sys.executable, __file__, folder],
        cwd=ROOT,
        # Said already, so that no command starts anew to say it.
        env=environment | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0", "PYTHONPATH": str(ROOT)},
        input=json.dumps(command_lines),
        text=True,
        timeout=60 + 10 * len(command_lines),
        check=True,
    )
    return [
        Ended(
            int((folder / f"{i}.code").read_text()),
            (folder / f"{i}.out").read_text(),
            (folder / f"{i}.err").read_text(),
        )
        for i in range(len(command_lines))
    ]


def main(folder):
    import dist_ens.assess
    import dist_ens.bench
    import dist_ens.plan
    import dist_ens.train  # noqa: F401
    import launch

    for i, command_line in enumerate(json.load(sys.stdin)):
        child = os.fork()
        if not child:
            for number, ending in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / f"{i}.{ending}", os.O_WRONLY | os.O_CREAT), number)
            sys.argv = ["dist-ens", *command_line]
            launch.main()
            return
        _, status = os.waitpid(child, 0)
        (folder / f"{i}.code").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
