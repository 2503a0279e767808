"""Worker processes that read data for a trainer, and end with it."""

import multiprocessing
import multiprocessing.connection
import os
import threading


def end_with_trainer(worker_index: int = 0, num_workers: int = 1) -> None:
    """Makes this worker process end when the process that started it ends, even by `kill -9`.

    Without it, a worker of Grain's `mp_prefetch` outlives a trainer that is killed, and keeps its
    shared memory. Pass it as Grain's `worker_init_fn`, which calls it in each worker:

        dataset.mp_prefetch(options, worker_init_fn=end_with_trainer)
    """
    trainer = multiprocessing.parent_process()
    if trainer is None:
        return

    def wait() -> None:
        multiprocessing.connection.wait([trainer.sentinel])
        os._exit(1)  # Python's own end would wait for the trainer to take the last batches.

    threading.Thread(target=wait, name="end_with_trainer", daemon=True).start()
