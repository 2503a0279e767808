"""A web service with an exported ensemble. It needs jax, flatbuffers and fastapi, and no dist_ens.

    dist-ens export --workdir=runs/digits --output=digits.jaxexport
    pip install jax flatbuffers fastapi uvicorn
    python examples/serve.py digits.jaxexport 8000

`GET /` describes the ensemble. `POST /predict` takes {"inputs": [...]}, a list of examples, and
answers with the outputs of the file, such as mean, total, aleatoric and epistemic, as lists.

Result: the answers are those of `predict`.
"""

import json
import pathlib
import sys
from typing import Annotated

import jax.export
import numpy as np
import uvicorn
from fastapi import Body, FastAPI, HTTPException


def service(path):
    """Returns the service with the exported ensemble in a file."""
    content = pathlib.Path(path).read_bytes()
    about = json.loads(pathlib.Path(f"{path}.json").read_text())
    predict = jax.jit(jax.export.deserialize(bytearray(content)).call)
    (given,) = about["inputs"].values()
    app = FastAPI(title="ensemble")

    @app.get("/")
    def describe() -> dict:
        return about

    @app.post("/predict")
    def answer(inputs: Annotated[list, Body(embed=True)]) -> dict:
        try:
            x = np.array(inputs, given["dtype"])
            if x.dtype.kind in "iub" and (x != np.array(inputs)).any():
                raise ValueError(f"{given['dtype']} holds whole numbers")
        except (OverflowError, TypeError, ValueError) as error:
            raise HTTPException(422, f"inputs are no such array: {error}") from error
        if not len(x) or [*x.shape[1:]] != given["shape"][1:]:
            raise HTTPException(422, f"inputs are {[*x.shape]}, and not {given['shape']}.")
        # Each size of a batch is compiled once. Powers of two are few sizes.
        size = 1 << (len(x) - 1).bit_length()
        found = predict(np.concatenate([x, np.repeat(x[-1:], size - len(x), axis=0)]))
        answers = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(found):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            axis = about["outputs"][name]["shape"].index("batch")
            answers[name] = np.asarray(leaf).take(range(len(x)), axis=axis).tolist()
        return answers

    return app


if __name__ == "__main__":
    uvicorn.run(service(sys.argv[1]), port=int(sys.argv[2]), log_level="warning")
