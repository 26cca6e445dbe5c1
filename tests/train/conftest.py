"""Training is tested on the CPU, in float32 and on several processes, GPU or not."""

from tests.train.on_the_cpu import no_gpu, one_thread

__all__ = ["no_gpu", "one_thread"]
