"""One folder an op: the public function, its specification, its kernels."""
