"""The Mixture-of-Experts layer: routing, permutation, dispatch, grouped experts, load balancing.

Tensors carry their shape as a suffix. The letters, here and in `model`:
    B rows of a micro-batch    S positions of a row    T tokens (B·S less padding)    D model width
    E experts    e experts of this rank    K experts per token (top_k)    F expert width
    N = T·K token copies sent    R token copies received    H heads    V vocabulary    L layers
"""
