"""Documents to tokens on disk to the batches each rank reads."""
