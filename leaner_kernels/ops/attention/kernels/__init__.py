"""The kernels of softmax attention, in Triton and Gluon; ``..launch`` chooses which runs a call.

A forward and a backward each, by the number of tokens: ``warp_multihead`` (a warp owns heads),
``short_*`` (a program owns a head, K and V on chip, and so ``hopper_*`` and ``ampere_*`` for these
architectures) and ``online_*`` (any length).
"""
