"""The states of services, callbacks and data in a checkpoint, each with the name of its owner."""

import json
import operator
from collections.abc import Callable, Sequence

from dist_ens.callbacks.protocol import OWN, Service, call_hook, name_of_callback
from dist_ens.checkpoint import Checkpoints, OpenCheckpoints
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError, first_line
from dist_ens.ground.json_text import Json, JsonDict
from dist_ens.ground.types import Callback
from dist_ens.training.data_protocol import TrainingData

# Files of a checkpoint. Any host may read the first one of another. The second one is of one host.
_SHARED, _OF_HOST = "services", "position"


def saved_states(services: Sequence[Callback]) -> Callable[[], dict[str, bytes]]:
    """Returns a function that returns the files with the states of the services, by name.

    The states are taken now. That of a service may be a function, which is called by the thread
    that saves, once the metrics of the step have been read.
    """
    states = [(each, _plain(each, call_hook(each, "state"))) for each in _with_state(services)]

    def files() -> dict[str, bytes]:
        found: dict[str, list[Json]] = {}
        for service, taken in states:
            state = taken() if callable(taken) else taken
            if state is not None or not isinstance(service, Service):
                file = _OF_HOST if isinstance(service, TrainingData) else _SHARED
                entry = {"name": name_of_callback(service), "state": state}
                found.setdefault(file, []).append(entry)
        return {file: json.dumps(entries).encode() for file, entries in found.items()}

    return files


def restore_states(
    services: Sequence[Callback], opened: OpenCheckpoints, checkpoints: Checkpoints
) -> None:
    """Restores the states of services and callbacks in a run that is resumed.

    `resume="anyway"` restores the callbacks with the name of a saved one.
    """
    saved = [(each["name"], each["state"]) for each in _read(opened, _SHARED)]
    with_state = _with_state(services)
    given = [name_of_callback(each) for each in with_state if not isinstance(each, Service)]
    found = [name for name, _ in saved if not name.startswith(OWN)]
    if found and given != found and checkpoints.resume == "same":
        raise UserError(
            f"{quoted(checkpoints.folder)} holds states of the callbacks {', '.join(found)}, and "
            f"this run has {', '.join(given) or 'none'}. Give the same callbacks in the same "
            "order, or set resume='anyway' to begin others anew."
        )
    for service in with_state:
        names = [name for name, _ in saved]
        if name_of_callback(service) in names:
            _, state = saved.pop(names.index(name_of_callback(service)))
            call_hook(service, "restore", state)


def saved_position(opened: OpenCheckpoints) -> Json:
    """Returns the position of this host in the data; None if the step determines it."""
    return next((each["state"] for each in _read(opened, _OF_HOST)), None)


def _read(opened: OpenCheckpoints, file: str) -> list[JsonDict]:
    stored = opened.restore_host_file(file, is_shared=file == _SHARED)
    return [] if stored is None else json.loads(stored)


def _with_state(services: Sequence[Callback]) -> list[Callback]:
    return [service for service in services if hasattr(service, "restore")]


def _plain(service: Callback, state: object) -> Json:
    """Returns a copy of a state in types that JSON holds; the state itself if it is a function."""
    if isinstance(service, Service) and callable(state):
        return state
    try:
        return json.loads(json.dumps(state, default=operator.methodcaller("item")))
    except (AttributeError, TypeError, ValueError) as error:
        name = name_of_callback(service)
        raise UserError(
            f"The state of the callback {name} cannot be saved: {first_line(error)} Return what "
            f"JSON can hold from {name}.state, such as a dict of numbers."
        ) from error
