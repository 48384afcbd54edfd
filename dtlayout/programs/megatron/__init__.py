"""Megatron-LM: its options in both directions, in a script, in its own YAML and in FlagScale's."""
