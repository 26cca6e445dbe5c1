"""The training loop: set up, step, evaluate, survive, sum up; on one process or many."""
