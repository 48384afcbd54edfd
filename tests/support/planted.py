"""A batch of noise, planted into the text of a tiny run."""

import random
from pathlib import Path

from tiny import TinyFiles

from dtlayout.config.loading import load_config
from dtlayout.data.prepare import prepare_tokens
from dtlayout.data.samples import open_samples


def plant_noise(files: TinyFiles, step: int, folder: Path) -> None:
    """Write letters that the corpus does not have over each sample of a step, which counts from 1 on.

    `folder` gets the tokens of the corpus as it was: which samples a step has depends on how many there are alone.
    """
    config = load_config(files.config, [f"--data.folder={folder}"])
    samples = open_samples(config.data, [prepare_tokens(config.data)], 260, config.batch, seed=config.train.seed)
    text, length = bytearray(files.corpus.read_bytes()), config.batch.seq_len
    letters = random.Random(0)
    for sample in samples.locate(step - 1, range(config.batch.global_batch))[1]:
        noise = bytes(letters.choices(range(ord("A"), ord("Z")), k=length))
        text[sample * length : (sample + 1) * length] = noise
    files.corpus.write_bytes(text)
