"""A TFDS data set of a few digits, of features that can be written without TensorFlow."""

import numpy as np
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits


class TinyDigits(tfds.core.GeneratorBasedBuilder):
    """120 training and 50 test digits, uint8[8, 8]."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Tensor(shape=(8, 8), dtype=np.uint8),
                    "label": tfds.features.Tensor(shape=(), dtype=np.int64),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(0, 120), "test": self._generate_examples(120, 170)}

    def _generate_examples(self, start, stop):
        digits = load_digits()
        for i in range(start, stop):
            yield i, {"image": digits.images[i].astype(np.uint8), "label": digits.target[i]}
