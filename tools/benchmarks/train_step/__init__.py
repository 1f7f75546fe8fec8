"""The `train-step` benchmark: training steps of ours and of peers, one after the other in one process group."""
