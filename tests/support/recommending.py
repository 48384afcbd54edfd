"""What tests of dtlayout recommend share: questions, and asking them."""

import json

from dtlayout.cli import main

LLAMA = ["--model", "llama-7b", "--gpu", "a100-80g-sxm", "--gpus", "16", "--seq-len", "2048", "--global-batch", "128"]
DEBUG = ["--model", "debug", "--gpu", "cpu", "--gpus", "4", "--seq-len", "64", "--global-batch", "8"]
HF = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


def with_model(arguments, model):
    return [*arguments[:1], str(model), *arguments[2:]]


def ask(capsys, *arguments):
    """The JSON document that answers."""
    assert main(["recommend", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "", printed.err
    return json.loads(printed.out)


def ask_with_progress(capsys, *arguments):
    """The same of a question whose answer takes a while."""
    assert main(["recommend", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refuse(capsys, *arguments):
    """The lines that refuse."""
    assert main(["recommend", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err
