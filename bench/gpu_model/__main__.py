"""See ``command.py``."""

from bench.gpu_model.command import main

main()
