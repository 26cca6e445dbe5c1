"""What a run leaves to go on from: checkpoints, how they are read, and the folder of a run."""
