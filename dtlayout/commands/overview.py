"""The commands, by the questions that they answer, in the order of the work."""

STAGES = {
    "What do I have?": {
        "calibrate": "Measure these machines, and write the cluster file that predictions for them take.",
    },
    "Which layout?": {
        "recommend": "Find the fastest layouts of a model that fit on a cluster, with what stands against the others.",
        "web": "Open the planner as a page of this machine, which answers while one types.",
        "read": "Show how another program's script or config is understood, and write it as a config of ours.",
        "explain": "Show a layout's memory and time by component, what binds it and what would help.",
        "timeline": "Draw when each pipeline rank is predicted to do what, and where it waits.",
        "compare": "Show layouts side by side, and where their time and their memory differ.",
    },
    "Does it fit?": {
        "check": "Say whether a config can train on so many ranks, and what it would do and need.",
        "dryrun": "Build and step the trainer as ranks of a cluster that is not there: what they hold and send.",
        "trace": "Read what a model computes off its own code, for any decoder that transformers builds.",
    },
    "Train": {
        "train": "Train a config on ranks of this machine: torchrun, with a check before and our own lines last.",
        "config": "Show every key of a config, with its type, its default and what it means.",
        "prepare": "Tokenize the data of a config once, as training would.",
        "plot": "Draw loss, validation, speed and memory of runs as one page and as PNG files.",
        "data": "Show a training sample as text with its targets marked, or those of a step whose loss was not finite.",
        "checkpoint": "List what a run has saved, show what wrote it, and verify that it is what was written.",
        "convert": "Write the weights of a run or a checkpoint as a Hugging Face folder, or of one as a checkpoint.",
        "generate": "Write text with the weights of a run, a checkpoint or a Hugging Face folder.",
    },
    "Measure": {
        "sweep": "Run many configs for real, and keep how each of them ended.",
    },
    "Learn": {
        "report": "Say what measured layouts teach about each choice, with plots.",
        "validate": "Score predictions against tables of measured runs, and fit the constants to them.",
        "refit": "Fit a calibrated cluster file to sweeps that ran with it, and keep how right their predictions were.",
    },
    "This command line": {
        "completion": "Print the code by which a shell completes this command line.",
    },
}
"""Question → commands that answer it, with a sentence each; questions are in the order of the work."""
COMMANDS = {name: text for commands in STAGES.values() for name, text in commands.items()}
